"""``verify="first"`` compares before the first step is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxckpt import VerificationError, auto_checkpoint
from fxckpt.model import planner_of


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2)), torch.randn(
        6, 4
    )


def test_an_equal_step_passes_and_leaves_no_trace() -> None:
    model, x = _model()
    planned = auto_checkpoint(model, strategy="sqrtn", verify="first")
    torch.manual_seed(5)
    planned(x).sum().backward()
    other, _ = _model()
    torch.manual_seed(5)
    other(x).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_a_difference_is_named() -> None:
    model, x = _model()
    planned = auto_checkpoint(model, x, strategy="sqrtn", verify="first")
    entry = planner_of(planned).outcome().entry
    assert entry is not None
    run = entry.graph_module.forward
    entry.graph_module.forward = lambda *inputs: [value * 1.5 for value in run(*inputs)]  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="loss"):
        planned(x)
