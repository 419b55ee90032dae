"""A planned model lives like any other: copied, saved, moved, shared by threads, interrupted, run for long."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt import _torch, auto_checkpoint, get_plan
from fxckpt.errors import FxckptError
from tests import harness, models
from tests.planning import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WAYS = ["dp", "sqrtn", "recompute"]


class Block(nn.Module):
    """Residual block with BatchNorm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Some blocks and a head; has a method and an attribute of its own."""

    def __init__(self, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.settings = {"width": width}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits

    def describe(self) -> str:
        return f"width {self.settings['width']}"


def _built(way: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[Net, torch.Tensor]:
    harness.seed_all()
    model, x = Net().to(dtype).train(), torch.randn(8, 12, dtype=dtype)
    if way:
        model = STRATEGIES[way](model, (x,), {})  # type: ignore[assignment]
    return model, x


def _train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Losses and final parameters and buffers of a short training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness.seed_all()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _is_planned(model: nn.Module) -> bool:
    return bool(get_plan(model).segments)


@pytest.mark.parametrize("way", WAYS)
def test_methods_and_attributes_are_the_models(way: str) -> None:
    model, _ = _built(way)
    assert isinstance(model, Net)
    assert model.describe() == "width 12"
    assert model.settings == {"width": 12}
    assert "Net" in repr(model)
    assert type(model).__name__ == "Net"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trained", [False, True])
def test_deepcopy_is_independent_and_planned(way: str, trained: bool) -> None:
    plain, x = _built()
    planned, _ = _built(way)
    if trained:
        _train(plain, x)
        _train(planned, x)
    twin = copy.deepcopy(planned)
    assert isinstance(twin, Net)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in planned.parameters()}
    before = [value.clone() for value in planned.state_dict().values()]
    expected = _train(copy.deepcopy(plain), x)
    assert _equal(_train(twin, x), expected)
    assert _equal(list(planned.state_dict().values()), before)
    assert _equal(_train(planned, x), expected)
    assert _is_planned(twin)


@pytest.mark.parametrize("way", WAYS)
def test_pickle_and_torch_save(way: str) -> None:
    planned, x = _built(way)
    stream = io.BytesIO()
    torch.save(planned, stream)
    stream.seek(0)
    loaded = [pickle.loads(pickle.dumps(planned)), torch.load(stream, weights_only=False)]
    expected = _train(*_built())
    for model in loaded:
        assert isinstance(model, Net)
        assert model.describe() == "width 12"
        assert _equal(_train(model, x), expected)
        assert _is_planned(model)


@pytest.mark.parametrize("way", ["dp", "lazy"])
def test_ema_copy(way: str) -> None:
    plain, x = _built()
    planned, _ = _built(way)
    results = []
    for model in (plain, planned):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        _train(model, x)
        average.update_parameters(model)
        results.append([*average.state_dict().values(), average.eval()(x)])
    assert _equal(*results)


@pytest.mark.parametrize("way", WAYS)
def test_to_another_dtype(way: str) -> None:
    planned, x = _built(way)
    plain, _ = _built()
    for model in (plain, planned):
        model.double()
    assert _equal(_train(planned, x.double()), _train(plain, x.double()))
    plain.bfloat16()
    planned.bfloat16()
    assert _equal(_train(planned, x.bfloat16()), _train(plain, x.bfloat16()))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_load_state_dict_before_and_after_planning(way: str, assign: bool) -> None:
    plain, x = _built()
    torch.manual_seed(99)
    saved = {
        key: value + 0.1 * torch.rand(value.shape) if value.is_floating_point() else value + 1
        for key, value in plain.state_dict().items()
    }
    planned, _ = _built(way)
    before, _ = _built()
    before.load_state_dict(saved)
    results = []
    for model in (plain, planned, STRATEGIES[way](before, (x,), {})):
        model.load_state_dict(copy.deepcopy(saved), assign=assign)
        results.append(_train(model, x))
    assert _equal(results[0], results[1])
    assert _equal(results[0], results[2])


def test_state_dict_goes_both_ways() -> None:
    plain, _ = _built()
    planned, _ = _built("sqrtn")
    assert list(planned.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(planned.state_dict(), strict=True)
    planned.load_state_dict(plain.state_dict(), strict=True)


def test_original_and_planned_train_the_same_parameters() -> None:
    plain, x = _built()
    shared, _ = _built()
    planned = STRATEGIES["dp"](shared, (x,), {})
    expected, found = [], []
    for turn in range(4):
        expected += _train(plain, x, 1)
        found += _train(shared if turn % 2 else planned, x, 1)
    assert _equal(expected, found)


def test_planning_a_planned_model_again() -> None:
    planned, x = _built("sqrtn")
    again = auto_checkpoint(planned, x, strategy="none")
    assert isinstance(again, Net)
    assert _equal(_train(again, x), _train(*_built()))


@pytest.mark.parametrize("way", ["dp", "lazy"])
def test_two_models_train_in_two_threads(way: str) -> None:
    class Steady(Net):
        """No random numbers: threads share the generator, in eager as well."""

        def __init__(self) -> None:
            super().__init__(16, 4)
            for block in self.blocks:
                block.drop = nn.Identity()  # type: ignore[assignment]

    def make(seed: int) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(seed)
        return Steady(), torch.randn(8, 16)

    def losses(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    expected = [losses(*make(seed)) for seed in (1, 2)]
    inputs = [make(seed) for seed in (1, 2)]
    planned = [(STRATEGIES[way](model, (x,), {}), x) for model, x in inputs]
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        try:
            found[index] = losses(*planned[index])
        except BaseException as error:  # shown by the assertion below
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert isinstance(found[index], list), found[index]
        assert _equal(found[index], expected[index])


def test_one_model_used_by_two_threads() -> None:
    model, x = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), torch.randn(5, 6)
    planned = STRATEGIES["lazy"](model, (x,), {})
    (expected,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight])
    found: list[Any] = [None] * 4

    def work(index: int) -> None:
        for _ in range(10):
            (found[index],) = torch.autograd.grad(planned(x).square().sum(), [model[0].weight])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(gradient is not None and torch.equal(gradient, expected) for gradient in found)


@pytest.mark.parametrize("way", WAYS)
def test_exception_inside_backward_leaves_the_model_usable(way: str) -> None:
    planned, x = _built(way)
    plain, _ = _built()
    armed = True

    def out_of_memory(gradient: torch.Tensor) -> None:
        if armed:
            raise torch.OutOfMemoryError("simulated")

    for model in (plain, planned):
        armed = True
        handle = model.blocks[1].up.weight.register_hook(out_of_memory)
        harness.seed_all()
        with pytest.raises(torch.OutOfMemoryError):
            model(x).square().mean().backward()
        armed = False
        handle.remove()
        model.zero_grad()
    assert _equal(_train(planned, x), _train(plain, x))


class Failing(torch.autograd.Function):
    """Identity whose backward fails while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Failing.armed:
            raise torch.OutOfMemoryError("simulated")
        return gradient


@pytest.mark.parametrize("way", WAYS)
def test_exception_between_segments_of_backward(way: str) -> None:
    planned, x = _built(way)
    plain, _ = _built()
    for model in (plain, planned):
        harness.seed_all()
        middle = Failing.apply(model(x))
        Failing.armed = True
        with pytest.raises(torch.OutOfMemoryError):
            model(middle.repeat(1, 3)).square().mean().backward()
        Failing.armed = False
        model.zero_grad()
    assert _equal(_train(planned, x), _train(plain, x))


def test_exception_in_forward_leaves_the_model_usable() -> None:
    planned, x = _built("dp")
    plain, _ = _built()
    for model in (plain, planned):
        buffers = copy.deepcopy(model.state_dict())
        with pytest.raises((RuntimeError, FxckptError)):
            model(torch.randn(8, 13))
        model.load_state_dict(buffers)  # BatchNorm has counted the batch, or not, before the exception
    assert _equal(_train(planned, x), _train(plain, x))


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())


@pytest.mark.parametrize(("way", "steps"), [("dp", 1000), ("recompute", 200), ("lazy", 200)])
def test_many_steps_do_not_grow(way: str, steps: int) -> None:
    model, x = Net(12, 1).train(), torch.randn(8, 12)
    planned = STRATEGIES[way](model, (x,), {})

    def run(steps: int) -> None:
        for _ in range(steps):
            planned(x).square().mean().backward()

    run(20)
    tensors, objects = _live_tensors(), len(gc.get_objects())
    run(steps)
    assert _live_tensors() == tensors
    assert len(gc.get_objects()) <= objects + 50
    run(10)
    assert sum(_torch.cpu_allocations(lambda: run(5))) == 0


@pytest.mark.parametrize("way", WAYS)
def test_no_cycle_keeps_activations_alive(way: str) -> None:
    planned, x = _built(way)
    planned(x).square().mean().backward()

    def without_backward() -> None:
        planned(x)

    def with_backward() -> None:
        planned(x).square().mean().backward()

    gc.collect()
    gc.disable()
    try:
        assert sum(_torch.cpu_allocations(without_backward)) == 0
        assert sum(_torch.cpu_allocations(with_backward)) == 0
    finally:
        gc.enable()


def test_a_dropped_model_is_freed() -> None:
    planned, x = _built("dp")
    planned(x).sum().backward()
    watch = [weakref.ref(planned), weakref.ref(planned.head.weight)]
    del planned
    gc.collect()
    assert [reference() for reference in watch] == [None, None]


def test_real_model_round_trip() -> None:
    case = models.get("gpt2")

    def make_planned(model: Any, args: Any, kwargs: Any) -> Any:
        return pickle.loads(pickle.dumps(copy.deepcopy(STRATEGIES["dp"](model, args, kwargs))))

    assert harness.compare(case.build, case.loss, make_planned=make_planned, repeat=2) == []
