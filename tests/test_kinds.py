"""Constructs of real models that a trace treats in a way of its own: each equals eager bit for bit, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt import auto_checkpoint
from fxckpt.errors import CaptureError
from fxckpt.passes.capture import capture
from tests.harness import compare
from tests.planning import STRATEGIES

WAYS = ["dp", "sqrtn", "recompute"]


class Model(nn.Module):
    """Two linear layers around ``middle``."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        return self.middle(self, x)


def _cast_twice(model: Any, x: Tensor) -> Tensor:
    """Autocast entered inside forward shares the cast weight between its two uses."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.a(x)
        with torch.autocast("cpu", enabled=False):
            z = model.a(y.float())
        return (model.b(z) @ model.b.weight).float() + z


def _annotated(model: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("a span"):
        y = model.a(x).tanh()
    with torch.profiler.record_function("another"):
        return model.b(y)


def _seeding(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn_like(x)
    return model.b(torch.tanh(model.a(x) + noise))


def _permuted(model: Any, x: Tensor) -> Tensor:
    """A loss of the output sends a contiguous gradient to this transposed output."""
    return model.a(x).view(2, 3, 8).tanh().transpose(0, 1).transpose(1, 2)


def _loss(output: Tensor) -> Tensor:
    return (output * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("middle", [_cast_twice, _annotated, _permuted], ids=lambda middle: middle.__name__)
def test_equals_eager(middle: Callable[[nn.Module, Tensor], Any], way: str) -> None:
    def build() -> Any:
        return Model(middle), (torch.randn(6, 8),), {}

    assert compare(build, _loss, make_planned=STRATEGIES[way]) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hidden", [8, 16, 24])
def test_a_gru_equals_eager(hidden: int, way: str) -> None:
    def build() -> Any:
        return nn.GRU(8, hidden, batch_first=True), (torch.randn(3, 6, 8),), {}

    assert compare(build, lambda output: _loss(output[0]), make_planned=STRATEGIES[way]) == []


@pytest.mark.parametrize("chunk", [lambda h: h.unsafe_chunk(3, 1), lambda h: (h[:, :16], h[:, 16:32], h[:, 32:])])
def test_in_place_operators_keep_the_layout(chunk: Callable[[Tensor], Any]) -> None:
    def middle(model: Any, x: Tensor) -> Tensor:
        one, two, three = chunk(model.a(x).repeat(1, 6) + 1)
        return one.add_(two).tanh_() * three.sigmoid_().exp_()

    def build() -> Any:
        return Model(middle), (torch.randn(6, 8),), {}

    assert compare(build, _loss, make_planned=STRATEGIES["sqrtn"]) == []


@pytest.mark.parametrize("way", WAYS)
def test_backward_is_traced_outside_of_autocast(way: str) -> None:
    """The products of this attention run in 32 bits inside a step of 16 bits, and so do their gradients."""

    def build() -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2), (torch.randn(3, 6, 8),), {}

    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    assert compare(build, lambda y: _loss(y.float()), make_planned=STRATEGIES[way], context=context) == []


class Compares(nn.Module):
    """Blocks around functions that round otherwise while they are traced; they stay outside of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)))
        self.pair = nn.Bilinear(8, 8, 8)
        self.loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1, 8), label_smoothing=0.1, ignore_index=2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.blocks(x)
        result: Tensor = self.loss(self.pair(h.float(), x), target)
        return result


@pytest.mark.parametrize("rows", [18, 23])
@pytest.mark.parametrize("way", ["dp", "sqrtn"])
def test_what_a_trace_would_change_stays_outside(way: str, rows: int) -> None:
    def build() -> Any:
        return Compares(), (torch.randn(rows, 8), torch.arange(rows) % 8), {}

    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    assert compare(build, lambda y: y, make_planned=STRATEGIES[way], context=context) == []
    with context(), pytest.raises(CaptureError, match="bilinear under autocast"):
        capture(*build())
    model, (x, target), _ = build()
    with pytest.raises(CaptureError, match="weights and label smoothing"):
        capture(model.loss, (x, target), {})


def test_backward_under_autocast_is_warned_of() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 8)
    planned = auto_checkpoint(model, x, strategy="sqrtn")
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="backward.. runs under torch.autocast"):
        planned(x).float().sum().backward()


def test_a_gradient_with_other_strides_than_traced() -> None:
    """Autograd reshapes such a gradient; a view of it would fail."""

    def build() -> Any:
        return nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(3, 5, 8),) * 3, {}

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return _loss(output[0]) + _loss(output[1])

    assert compare(build, loss, make_planned=STRATEGIES["dp"]) == []


def test_seeding_in_forward_stops_the_trace() -> None:
    """The operators in the graph would draw from another seed."""
    before = torch.manual_seed, torch.random.set_rng_state
    with pytest.raises(CaptureError, match="is called in forward"):
        capture(Model(_seeding), (torch.randn(6, 8),), {})
    assert (torch.manual_seed, torch.random.set_rng_state) == before


@pytest.mark.parametrize("way", ["dp", "sqrtn"])
def test_torchscript_stays_outside_and_whole(way: str) -> None:
    def build() -> Any:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())
        return nn.Sequential(block, scripted, nn.Linear(8, 8)), (torch.randn(6, 8),), {}

    assert compare(build, _loss, make_planned=STRATEGIES[way]) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_by_name() -> None:
    model, x = nn.Linear(8, 8), torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(CaptureError, match="nested tensor"):
        auto_checkpoint(model, x, strategy="sqrtn")
    assert model(x).is_nested
