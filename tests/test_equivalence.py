"""Real models, planned in every way, train with the numbers of eager, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxckpt import auto_checkpoint, get_plan
from tests import harness, models
from tests.planning import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@functools.cache
def _eager(name: str) -> dict[str, Any]:
    case = models.get(name)
    return harness.record(case.build, case.loss, context=case.context, optimizer=_sgd, repeat=2)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "lazy"])
@pytest.mark.parametrize("name", models.MODELS)
def test_two_steps_equal_eager(name: str, strategy: str) -> None:
    case = models.get(name)
    planned = harness.record(
        case.build,
        case.loss,
        make_planned=STRATEGIES[strategy],
        context=case.context,
        optimizer=_sgd,
        repeat=2,
    )
    assert list(harness.differences(_eager(name), planned)) == []


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
