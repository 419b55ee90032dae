"""Options of planning: ``verify`` compares before the first step is taken, ``cost`` chooses where times come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxckpt import InvalidArgumentError, VerificationError, auto_checkpoint, get_plan
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


@pytest.mark.parametrize("cost", ["roofline", "h200", "measure"])
def test_costs_lead_to_plans_within_the_budget(cost: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    x = torch.randn(256, 64)
    planned = auto_checkpoint(model, x, budget_gb=0.8e6 / 2**30, cost=cost, on_infeasible="best")
    plain = auto_checkpoint(model, x, strategy="none")
    assert get_plan(planned).extra_seconds > 0
    assert get_plan(planned).peak_bytes < get_plan(plain).peak_bytes


def test_unknown_costs_are_listed() -> None:
    model, x = _model()
    with pytest.raises(InvalidArgumentError, match="'a100'"):
        auto_checkpoint(model, x, budget_gb=1, cost="v100")
