"""What depends on no input is computed while tracing, and comes out as eager computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt.constants import FLOAT_LIMIT_BYTES, LIMIT_BYTES
from fxckpt.joint import JointGraph
from fxckpt.passes.capture import capture
from fxckpt.passes.functionalize import functionalize
from tests.harness import compare
from tests.planning import STRATEGIES

aten = torch.ops.aten


class Model(nn.Module):
    """A linear layer and what ``use`` makes of its result."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(6, 6), use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.linear(x).tanh())


def _decides_by_values(y: Tensor) -> Tensor:
    positions = torch.arange(len(y))
    if (positions.diff() == 1).all():
        return y * positions[:, None]
    raise AssertionError("a fake tensor has no values")


def _mask_by_slices(y: Tensor) -> Tensor:
    mask = y.new_zeros(6, 6)
    mask[:3, :3] = 1
    mask[3:, 3:] = 2
    return y @ (mask == 2).to(y.dtype) + y @ mask


def _writes_after_reading(y: Tensor) -> Tensor:
    index = torch.arange(3)
    first = y[index]
    index += 1
    return first * y[index]


def _accumulates(y: Tensor) -> Tensor:
    total = torch.zeros(6)
    for row in y:
        total += row
    return total


def _returns(y: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(3)
    return y[index], index


def _large(y: Tensor) -> Tensor:
    mask = torch.ones(1100, 1100, dtype=torch.bool).tril()
    return y * mask.sum() + y * torch.ones(129, 129).cumsum(0).mean()


def _random(y: Tensor) -> Tensor:
    return y[torch.randperm(6)] * torch.randint(0, 5, (6,))


USES = [_decides_by_values, _mask_by_slices, _writes_after_reading, _accumulates, _returns, _large, _random]


@pytest.mark.parametrize("way", ["dp", "recompute"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_equals_eager(use: Callable[[Tensor], Any], way: str) -> None:
    def loss(output: Any) -> Tensor:
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    assert compare(lambda: (Model(use), (torch.randn(6, 6),), {}), loss, make_planned=STRATEGIES[way]) == []


def _joint(use: Callable[[Tensor], Any]) -> JointGraph:
    return functionalize(capture(Model(use), (torch.randn(6, 6),), {}))


@pytest.mark.parametrize("use", [_decides_by_values, _mask_by_slices])
def test_constants_take_no_operators(use: Callable[[Tensor], Any]) -> None:
    joint = _joint(use)
    made = {"arange", "new_zeros", "fill", "slice_scatter", "diff"}
    assert not made & {node.target._overloadpacket.__name__ for node in joint.forward}
    assert joint.constants
    assert {node.meta["val"].device.type for node in joint.forward if isinstance(node.meta["val"], Tensor)} == {"cpu"}


def test_large_constants_are_made_in_each_step() -> None:
    assert LIMIT_BYTES < 1100 * 1100
    assert FLOAT_LIMIT_BYTES < 4 * 129 * 129
    joint = _joint(_large)
    assert all(tensor.numel() <= 1 for tensor in joint.constants.values())
    assert len([node for node in joint.forward if node.target is aten.ones.default]) == 2
