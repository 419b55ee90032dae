"""Real models, planned in every way, train with the numbers of eager, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxckpt import auto_checkpoint, get_plan, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.measure import measure_peak
from fxckpt.plan import Plan, Segment
from tests import harness, models
from tests.planning import STRATEGIES, smallest_peak

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 0.02
FRACTIONS = {"dp 80 %": 0.8, "dp 60 %": 0.6, "dp 50 %": 0.5}
WAYS = ["none", "sqrtn", *FRACTIONS, "dp smallest", "recompute", "recompute whole"]
# Nothing new beside the small version of the same architecture, and slow.
FEW_WAYS = {"tutorial_b": ["sqrtn", "dp 60 %"]}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Side:
    """Two recorded training steps of a model, plain or planned, and the model itself for what comes after."""

    case: models.ModelCase
    make_planned: harness.MakePlanned | None = None
    model: nn.Module = field(init=False)
    inputs: harness.Batch = field(init=False)

    def __post_init__(self) -> None:
        self.context = self.case.context or contextlib.nullcontext
        self.seen = harness.record(
            self.case.build,
            self.case.loss,
            make_planned=self._make,
            context=self.case.context,
            optimizer=_sgd,
            repeat=2,
        )

    def _make(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        self.model, self.inputs = self.make_planned(model, args, kwargs) if self.make_planned else model, (args, kwargs)
        return self.model

    def peak_bytes(self) -> int:
        """Peak of a whole step from fresh gradients."""
        args, kwargs = self.inputs

        def step() -> None:
            with self.context():
                # The output gets no name: it would hold the logits while backward runs.
                loss = self.case.loss(self.model(*args, **kwargs))
            loss.backward()  # type: ignore[no-untyped-call]

        self.model.zero_grad()
        return measure_peak(step, held=(self.model, args, kwargs)).total_bytes

    def loss_bytes(self) -> int:
        """Peak of the loss alone, which lies outside the model; 0 if the model has its loss inside."""
        args, kwargs = self.inputs
        with torch.no_grad(), self.context():
            output = self.model(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            return 0
        output.requires_grad_()
        return measure_peak(lambda: self.case.loss(output).backward()).peak_bytes  # type: ignore[no-untyped-call]


@functools.cache
def _plain(name: str) -> tuple[dict[str, Any], int]:
    """What eager leaves behind, and its peak."""
    side = Side(models.get(name))
    return side.seen, side.peak_bytes()


@functools.cache
def _known(name: str) -> tuple[Plan, int]:
    """A plan that keeps everything, and the smallest reachable peak."""
    case = models.get(name)
    model, args, kwargs = case.build()
    with (case.context or contextlib.nullcontext)():
        return make_plan(model, *args, example_kwargs=kwargs, strategy="none"), smallest_peak(model, args, kwargs)


def _options(name: str, way: str) -> dict[str, Any]:
    """Keyword arguments of ``auto_checkpoint`` for one way of planning a model."""
    if way in FRACTIONS:
        return {"budget_gb": FRACTIONS[way] * _plain(name)[1] / 2**30}
    if way == "dp smallest":
        return {"budget_gb": _known(name)[1] / 2**30}
    if way.startswith("recompute"):
        plan = _known(name)[0]
        segments = tuple(replace(segment, kept=(), inner=()) for segment in plan.segments)
        if way == "recompute whole":
            segments = (Segment(0, plan.segments[-1].stop, name="all"),)
        return {"plan": replace(plan, segments=segments)}
    return {"strategy": way}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in models.MODELS for way in FEW_WAYS.get(name, WAYS)])
def test_numbers_are_eagers_and_the_peak_is_the_predicted(name: str, way: str) -> None:
    options = _options(name, way)
    budget_bytes = int(options.get("budget_gb", 1024) * 2**30)

    def make_planned(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        return auto_checkpoint(model, *args, example_kwargs=kwargs, **options)

    try:
        side = Side(models.get(name), make_planned)
    except BudgetInfeasibleError as error:
        assert way in FRACTIONS
        assert error.min_peak_bytes == _known(name)[1] > budget_bytes
        return
    assert list(harness.differences(_plain(name)[0], side.seen)) == []
    measured, predicted, loss = side.peak_bytes(), get_plan(side.model).peak_bytes, side.loss_bytes()
    assert abs(measured - predicted) <= TOLERANCE * predicted + loss
    assert measured <= budget_bytes + loss
    if way == "none":
        assert measured <= _plain(name)[1] * (1 + TOLERANCE)


@pytest.mark.parametrize("name", ["unet", "gpt2", "convnext"])
def test_accumulated_gradients_equal_eager(name: str) -> None:
    case = models.get(name)
    options: dict[str, Any] = {"context": case.context, "repeat": 3, "accumulate": True}
    assert harness.compare(case.build, case.loss, make_planned=STRATEGIES["dp"], **options) == []


@pytest.mark.parametrize("name", ["unet", "gpt2", "vit_b16"])
def test_eval_and_no_grad_run_the_original(name: str) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    planned = STRATEGIES["recompute"](model, args, kwargs)

    def run(module: nn.Module) -> Any:
        harness.seed_all()
        with torch.no_grad():
            return harness.freeze(module(*args, **kwargs), objects=3)

    for training in (False, True):
        model.train(training)
        planned.train(training)
        buffers = {key: value.clone() for key, value in model.state_dict().items()}
        plain_output, plain_buffers = run(model), harness.freeze(dict(model.named_buffers()))
        model.load_state_dict(buffers)
        assert list(harness.differences(plain_output, run(planned))) == []
        assert list(harness.differences(plain_buffers, harness.freeze(dict(model.named_buffers())))) == []


def test_eval_mode_with_gradients_equals_eager() -> None:
    case = models.get("unet")

    def build() -> Any:
        model, args, kwargs = case.build()
        return model.eval(), (args[0].requires_grad_(),), kwargs

    for strategy in ("dp", "recompute"):
        assert harness.compare(build, case.loss, make_planned=STRATEGIES[strategy]) == []


def test_tutorial_a_trains_ten_epochs_with_its_optimizer() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(256, 20), torch.arange(256) % 10)

    def train(planned: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        harness.seed_all()
        model = models.get("tutorial_a").build()[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if planned:
            model = auto_checkpoint(model, strategy="sqrtn", optimizer=optimizer)
        losses = []
        for _ in range(10):
            for inputs, labels in torch.utils.data.DataLoader(data, batch_size=64, shuffle=True):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, model.state_dict()

    plain, planned = train(False), train(True)
    assert plain[0] == planned[0]
    assert plain[0][-1] < plain[0][0]
    assert all(torch.equal(value, planned[1][key]) for key, value in plain[1].items())


def test_original_is_untouched_and_shares_everything() -> None:
    model, args, kwargs = models.get("unet").build()
    before = dict(vars(model)), dict(type(model).__dict__)
    keys = list(model.state_dict())
    planned = STRATEGIES["sqrtn"](model, args, kwargs)
    assert (dict(vars(model)), dict(type(model).__dict__)) == before
    assert isinstance(planned, type(model))
    assert list(planned.state_dict()) == keys
    assert [id(p) for p in planned.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in planned.named_modules()] == [name for name, _ in model.named_modules()]
    assert all(a is b for a, b in zip(list(planned.modules())[1:], list(model.modules())[1:], strict=True))
    assert get_plan(planned).strategy == "sqrtn"


def test_planning_leaves_model_inputs_and_random_state_alone() -> None:
    case = models.get("unet")
    harness.seed_all()
    model, args, kwargs = case.build()
    state = harness.freeze([model.state_dict(), args, kwargs]), harness._random_state()
    for strategy in ("dp", "sqrtn", "none"):
        STRATEGIES[strategy](model, args, kwargs)
    after = harness.freeze([model.state_dict(), args, kwargs]), harness._random_state()
    assert list(harness.differences(state[0], after[0])) == []
    assert list(harness.differences(state[1], after[1])) == []
    assert all(p.grad is None for p in model.parameters())


def test_smaller_last_batch_and_longer_sequence_are_planned_anew() -> None:
    case = models.get("gpt2")

    def extra() -> list[harness.Batch]:
        ids = [torch.randint(0, 211, shape) for shape in ((1, 48), (2, 40), (2, 48))]
        return [((x,), {"labels": x}) for x in ids]

    for strategy in ("dp", "sqrtn", "lazy"):
        found = harness.compare(case.build, case.loss, make_planned=STRATEGIES[strategy], extra_batches=extra)
        assert found == []


def test_freezing_a_stage_between_steps_is_noticed() -> None:
    case = models.get("unet")

    def mutate(model: nn.Module, step: int) -> None:
        model.down[0].requires_grad_(step != 1)  # type: ignore[index, union-attr]
        model.down[1].train(step != 2)  # type: ignore[index, union-attr]

    options: dict[str, Any] = {"mutate": mutate, "repeat": 4}
    for strategy in ("dp", "recompute"):
        assert harness.compare(case.build, case.loss, make_planned=STRATEGIES[strategy], **options) == []
