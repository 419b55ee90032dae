"""What is refused, how it is said, and that the model stays as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt import auto_checkpoint, get_graph_module, get_plan, get_report, make_plan
from fxckpt.errors import (
    BudgetInfeasibleError,
    CaptureError,
    FxckptError,
    InvalidArgumentError,
    PlanMismatchError,
)
from fxckpt.plan import Plan
from tests import harness, models
from tests.planning import smallest_peak


def _chain() -> tuple[nn.Module, tuple[Any, ...]]:
    harness.seed_all()
    model, args, _ = models.chain(8, 16, 256, nn.GELU)
    return model, args


def _facts(model: nn.Module) -> Any:
    state = {key: (value.clone(), value.data_ptr()) for key, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return harness.freeze(state), hooks, [sorted(vars(m)) for m in model.modules()], [type(m) for m in model.modules()]


def _refused(model: nn.Module, *args: Any, error: type[FxckptError], **options: Any) -> FxckptError:
    before = _facts(model)
    with pytest.raises(error) as caught:
        auto_checkpoint(model, *args, **options)
    after = _facts(model)
    assert list(harness.differences(before[0], after[0])) == []
    assert before[1:] == after[1:]
    assert isinstance(caught.value, FxckptError)
    return caught.value


def test_budget_out_of_reach_tells_the_smallest() -> None:
    model, args = _chain()
    budget_bytes = smallest_peak(model, args, {}) - 1
    error = _refused(model, *args, error=BudgetInfeasibleError, budget_gb=budget_bytes / 2**30)
    assert isinstance(error, BudgetInfeasibleError)
    assert error.budget_bytes == budget_bytes
    assert error.min_peak_bytes == budget_bytes + 1
    assert 0 < error.fixed_bytes < error.min_peak_bytes
    for words in ("smallest reachable peak", "fixed", "largest segment", "Try: budget_gb="):
        assert words in str(error)
    planned = auto_checkpoint(model, *args, budget_gb=error.min_peak_bytes / 2**30)
    assert get_plan(planned).peak_bytes <= error.min_peak_bytes


def test_best_effort_warns_and_takes_the_smallest() -> None:
    model, args = _chain()
    with pytest.warns(UserWarning, match="no plan fits"):
        planned = auto_checkpoint(model, *args, budget_gb=1e-6, on_infeasible="best")
    assert get_plan(planned).peak_bytes == smallest_peak(model, args, {})


@pytest.mark.parametrize("budget_gb", [0, -1, 0.0, float("nan"), float("inf"), "8", True, None])
def test_budget_is_a_positive_number(budget_gb: Any) -> None:
    model, args = _chain()
    if budget_gb is None:
        error = _refused(model, *args, error=InvalidArgumentError)  # on CPU nobody can guess it
    else:
        error = _refused(model, *args, error=InvalidArgumentError, budget_gb=budget_gb)
    assert "budget_gb" in str(error)


def test_unknown_strategy_lists_the_known() -> None:
    model, args = _chain()
    error = _refused(model, *args, error=InvalidArgumentError, budget_gb=1, strategy="dq")
    for known in ("dp", "sqrtn", "none"):
        assert known in str(error)


@pytest.mark.parametrize(
    "options",
    [{"on_infeasible": "shrug"}, {"reserve_gb": -1.0}, {"optimizer": "adam"}, {"plan": "plan"}],
)
def test_other_options_are_checked(options: dict[str, Any]) -> None:
    model, args = _chain()
    error = _refused(model, *args, error=FxckptError, budget_gb=1, **options)
    assert next(iter(options)) in str(error)


def test_not_a_module() -> None:
    with pytest.raises(InvalidArgumentError, match="Module"):
        auto_checkpoint(lambda x: x, torch.ones(1), budget_gb=1)  # type: ignore[arg-type]


def test_inputs_that_forward_does_not_take() -> None:
    model, args = _chain()
    error = _refused(model, *args, *args, error=InvalidArgumentError, budget_gb=1)
    assert "forward" in str(error)
    error = _refused(model, *args, error=InvalidArgumentError, budget_gb=1, example_kwargs={"mask": None})
    assert "mask" in str(error)
    _refused(model, torch.randn(4, 17), error=FxckptError, budget_gb=1)


def test_without_trainable_parameters_or_inputs() -> None:
    model, args = _chain()
    model.requires_grad_(False)
    error = _refused(model, *args, error=FxckptError, budget_gb=1)
    assert "requires grad" in str(error) or "trainable" in str(error)


class Branching(nn.Module):
    """Nothing in it can be captured: one module, and it branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if y.sum().item() > 0:  # the line that the error names
            y = -y
        return y


def test_what_cannot_be_captured_names_module_line_and_construct() -> None:
    model = Branching()
    error = _refused(model, torch.ones(2, 3), error=CaptureError, budget_gb=1)
    assert isinstance(error, CaptureError)
    assert "test_bad_input.py" in error.source
    assert "test_bad_input.py" in str(error)
    assert error.reason
    assert model(torch.ones(2, 3)).sum() == -6


def test_failed_planning_at_the_first_call_leaves_eager_usable() -> None:
    model, args = _chain()
    planned = auto_checkpoint(model, budget_gb=1e-6)
    with pytest.raises(BudgetInfeasibleError) as caught:
        planned(*args)
    plain = model(*args)
    assert torch.equal(planned.eval()(*args), plain)
    again = auto_checkpoint(model, budget_gb=caught.value.min_peak_bytes / 2**30)
    assert torch.equal(again.train()(*args), plain)


def test_plan_of_another_model_or_format() -> None:
    model, args = _chain()
    plan = make_plan(model, *args, strategy="sqrtn")
    assert Plan.from_json(plan.to_json()) == plan
    other, other_args, _ = models.chain(9, 16, 256, nn.GELU)
    _refused(other, *other_args, error=PlanMismatchError, plan=plan)
    broken = dataclasses.replace(plan, segments=plan.segments[:-1])
    _refused(model, *args, error=FxckptError, plan=broken)
    unknown = dataclasses.replace(plan.segments[0], kept=("no_such_value",))
    _refused(model, *args, error=FxckptError, plan=dataclasses.replace(plan, segments=(unknown, *plan.segments[1:])))
    with pytest.raises(PlanMismatchError):
        Plan.from_json("{}")
    planned = auto_checkpoint(model, *args, plan=Plan.from_json(plan.to_json()))
    assert get_plan(planned).segments == plan.segments


def test_accessors_of_a_model_that_was_not_planned() -> None:
    model, _ = _chain()
    for accessor in (get_plan, get_report, get_graph_module):
        with pytest.raises(InvalidArgumentError, match="auto_checkpoint"):
            accessor(model)
        with pytest.raises(FxckptError, match="train"):
            accessor(auto_checkpoint(model, strategy="sqrtn"))


@pytest.mark.parametrize("name", ["unet", "gpt2", "swin_t"])
def test_smallest_peak_succeeds_and_a_byte_less_does_not(name: str) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    smallest = smallest_peak(model, args, kwargs)
    plan = make_plan(model, *args, example_kwargs=kwargs, budget_gb=smallest / 2**30)
    assert plan.peak_bytes == smallest
    with pytest.raises(BudgetInfeasibleError) as caught:
        make_plan(model, *args, example_kwargs=kwargs, budget_gb=(smallest - 1) / 2**30)
    assert caught.value.min_peak_bytes == smallest
