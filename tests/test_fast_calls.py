"""The shorter ways to operators reach the same operators with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import _torch

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 6)
B = torch.randn(2, 4, 6)
IMAGE, KERNEL = torch.randn(2, 3, 8, 8), torch.randn(6, 3, 3, 3)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (X, Y.t()), {}), (aten.addmm.default, (torch.randn(4), X, Y.t()), {}),
    (aten.bmm.default, (B, B.transpose(1, 2)), {}), (aten.baddbmm.default, (torch.randn(2, 4, 4), B, B.mT), {}),
    (aten.t.default, (X,), {}), (aten.transpose.int, (B, 0, 1), {}), (aten.permute.default, (B, [2, 0, 1]), {}),
    (aten.unsqueeze.default, (X, 0), {}), (aten.squeeze.dim, (X[None], 0), {}), (aten.view.default, (X, [24]), {}),
    (aten.expand.default, (X[:1], [4, 6]), {}), (aten.add.Tensor, (X, Y), {}), (aten.add.Tensor, (X, 1.5), {}),
    (aten.add.Tensor, (X, Y), {"alpha": 2}), (aten.mul.Tensor, (X, Y), {}), (aten.mul.Tensor, (X, 0.5), {}),
    (aten.sub.Tensor, (X, Y), {}), (aten.div.Tensor, (X, Y), {}), (aten.div.Scalar, (X, 0.9), {}),
    (aten.sum.dim_IntList, (X, [0], True), {}), (aten.sum.default, (X,), {}), (aten.mean.dim, (B, [1], True), {}),
    (aten.relu.default, (X,), {}), (aten.tanh.default, (X,), {}), (aten.sigmoid.default, (X,), {}),
    (aten.exp.default, (X,), {}), (aten.rsqrt.default, (X.abs(),), {}), (aten.neg.default, (X,), {}),
    (aten.pow.Tensor_Scalar, (X, 2), {}), (aten.clone.default, (X,), {}),
    (aten.clone.default, (B.mT,), {"memory_format": torch.contiguous_format}),
    (aten.native_layer_norm.default, (X, [6], torch.ones(6), torch.zeros(6), 1e-5), {}),
    (aten.convolution.default, (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
    (aten.native_batch_norm.default, (IMAGE, None, None, None, None, True, 0.1, 1e-5), {}),
    (aten.native_group_norm.default, (IMAGE, None, None, 2, 3, 64, 1, 1e-5), {}),
    (aten.embedding.default, (X, torch.tensor([1, 2])), {}), (aten.masked_fill.Scalar, (X, X > 0, 0.0), {}),
    (aten.where.self, (X > 0, X, Y), {}), (aten._softmax.default, (X, -1, False), {}),
    (aten._log_softmax.default, (X, -1, False), {}),
    (aten.cat.default, ([X, Y], 1), {}), (aten.gelu.default, (X,), {}),
]  # fmt: skip


class Seen(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("overload", "args", "kwargs"), CALLS, ids=lambda value: str(value)[:40])
def test_reaches_the_same_operator(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fast = _torch.fast_callable(overload)
    with torch.no_grad(), Seen() as seen, _torch.below_autograd():
        found = fast(*args, **kwargs)
    expected = overload(*args, **kwargs)
    same = str(overload).replace("div.Scalar", "div.Tensor"), str(overload)
    assert str(seen.operators[-1]) in same
    for one, other in zip(
        found if isinstance(found, tuple) else (found,), expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
