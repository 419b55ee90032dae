"""The measured peak of a planned step is the predicted one, and within the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt import auto_checkpoint, get_plan, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.measure import measure_peak
from tests import harness, models
from tests.planning import STRATEGIES, smallest_peak

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 0.02


def _measured(case: models.ModelCase, model: nn.Module, args: Any, kwargs: Any, optimizer: Any = None) -> int:
    """Peak in bytes of a whole step from fresh gradients, after one step to warm up."""

    def step() -> None:
        if case.context:
            with case.context():
                output = model(*args, **kwargs)
        else:
            output = model(*args, **kwargs)
        case.loss(output).backward()

    step()
    model.zero_grad()
    return measure_peak(step, held=(model, args, kwargs, optimizer)).total_bytes


def _in_context(case: models.ModelCase, call: Callable[[], Any]) -> Any:
    if case.context is None:
        return call()
    with case.context():
        return call()


def _built(name: str) -> tuple[models.ModelCase, nn.Module, tuple[Any, ...], dict[str, Any]]:
    harness.seed_all()
    case = models.get(name)
    return (case, *case.build())


@functools.cache
def _plain_peak(name: str) -> int:
    case, model, args, kwargs = _built(name)
    return _measured(case, model, args, kwargs)


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.5])
@pytest.mark.parametrize("name", models.MODELS)
def test_dp_meets_the_budget_as_predicted(name: str, fraction: float) -> None:
    case, model, args, kwargs = _built(name)
    budget_bytes = int(fraction * _plain_peak(name))

    def plan(limit: int) -> nn.Module:
        return auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=limit / 2**30)

    try:
        planned = _in_context(case, lambda: plan(budget_bytes))
    except BudgetInfeasibleError as error:
        assert error.budget_bytes == budget_bytes
        assert error.min_peak_bytes > budget_bytes
        budget_bytes = error.min_peak_bytes
        planned = _in_context(case, lambda: plan(budget_bytes))
    predicted = get_plan(planned).peak_bytes
    measured = _measured(case, planned, args, kwargs)
    assert measured <= budget_bytes
    assert measured == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("strategy", ["none", "sqrtn", "recompute"])
@pytest.mark.parametrize("name", models.MODELS)
def test_other_strategies_peak_as_predicted(name: str, strategy: str) -> None:
    case, model, args, kwargs = _built(name)
    planned = _in_context(case, lambda: STRATEGIES[strategy](model, args, kwargs))
    measured = _measured(case, planned, args, kwargs)
    assert measured == pytest.approx(get_plan(planned).peak_bytes, rel=TOLERANCE)
    if strategy == "none":
        assert measured <= _plain_peak(name) * (1 + TOLERANCE)


def test_sqrtn_lowers_the_activation_peak_of_a_chain_fourfold() -> None:
    name = "chain64_gelu"
    case, model, args, kwargs = _built(name)
    planned = STRATEGIES["sqrtn"](model, args, kwargs)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    fixed = 2 * parameter_bytes + args[0].nbytes  # with their gradients
    assert _plain_peak(name) - fixed >= 4 * (_measured(case, planned, args, kwargs) - fixed)


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_smaller_budgets_never_peak_higher_nor_work_less(name: str) -> None:
    case, model, args, kwargs = _built(name)
    smallest, plain = smallest_peak(model, args, kwargs), _plain_peak(name)
    peaks, seconds = [], []
    for tenth in range(11):
        budget_bytes = smallest + (plain - smallest) * tenth // 10
        planned = auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=budget_bytes / 2**30)
        peaks.append(_measured(case, planned, args, kwargs))
        seconds.append(get_plan(planned).extra_seconds)
        assert peaks[-1] <= budget_bytes
    assert seconds == sorted(seconds, reverse=True)
    # Plans of equal cost may differ by a temporary.
    assert all(low <= high * 1.01 for low, high in zip(peaks, peaks[1:], strict=False))


def test_budget_of_the_plain_peak_recomputes_nothing() -> None:
    case, model, args, kwargs = _built("unet")
    plan = make_plan(model, *args, budget_gb=1.01 * _plain_peak("unet") / 2**30)
    assert plan.extra_seconds == 0


def test_optimizer_state_counts() -> None:
    case, model, args, kwargs = _built("gpt2")
    optimizer = torch.optim.Adam(model.parameters())
    without = smallest_peak(model, args, kwargs)
    before = smallest_peak(model, args, kwargs, optimizer=optimizer)
    case.loss(model(*args, **kwargs)).backward()
    optimizer.step()
    model.zero_grad()
    after = smallest_peak(model, args, kwargs, optimizer=optimizer)
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    assert after - without == pytest.approx(state_bytes, rel=0.01)
    assert before in (without, pytest.approx(after, rel=0.01))
    planned = auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=after / 2**30, optimizer=optimizer)
    assert _measured(case, planned, args, kwargs, optimizer) <= after


def test_reserve_is_left_free() -> None:
    case, model, args, kwargs = _built("unet")
    assert smallest_peak(model, args, kwargs, reserve_gb=2**20 / 2**30) == smallest_peak(model, args, kwargs) + 2**20


def test_existing_gradients_count_when_accumulating() -> None:
    case, model, args, kwargs = _built("chain64_gelu")
    case.loss(model(*args)).backward()
    smallest = smallest_peak(model, args, kwargs)
    planned = auto_checkpoint(model, *args, budget_gb=smallest / 2**30)

    def step() -> None:
        case.loss(planned(*args)).backward()

    step()
    measured = measure_peak(step, held=(planned, args)).total_bytes
    assert measured <= smallest
    assert measured == pytest.approx(smallest, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["unet", "gpt2", "chain64_gelu", "convnext"])
def test_dp_at_its_smallest_is_below_sqrtn(name: str) -> None:
    case, model, args, kwargs = _built(name)
    sqrtn = make_plan(model, *args, example_kwargs=kwargs, strategy="sqrtn")
    assert smallest_peak(model, args, kwargs) <= sqrtn.peak_bytes
