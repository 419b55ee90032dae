"""Plans at other sizes: what is taken over from the first ones, and what happens where nothing fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxckpt import auto_checkpoint, get_plan, get_report, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.measure import compare_steps
from fxckpt.model import planner_of
from tests import harness, models
from tests.planning import smallest_peak
from tests.test_resize import repeated, resized_captures

NAMES = ["gpt2", "unet"]


def _model(name: str) -> tuple[models.ModelCase, nn.Module, Any, Any]:
    case = models.get(name)
    harness.seed_all()
    return case, *case.build()


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_do_not_fit_are_refused_without_a_new_capture(name: str) -> None:
    case, model, args, kwargs = _model(name)
    first, larger = repeated(args, kwargs, 2), repeated(args, kwargs, 8)
    budget = smallest_peak(model, *first)
    planned = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=budget * 1.02 / 2**30)
    with pytest.raises(BudgetInfeasibleError) as caught:
        planned(*larger[0], **larger[1])
    assert resized_captures(planned) == [False, True]
    smallest = caught.value.min_peak_bytes
    assert smallest == pytest.approx(smallest_peak(model, *larger), rel=0.01)
    # Under the budget that the error names these sizes fit, also when had from the first trace.
    again = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=smallest / 2**30)
    result = compare_steps(model, again, *larger, case.loss, measure=True)
    assert resized_captures(again) == [False, True]
    assert result.equal
    assert result.planned_peak is not None
    assert result.planned_peak.total_bytes <= smallest
    # The refused call has changed nothing for the sizes that fit.
    assert compare_steps(model, planned, *first, case.loss).equal
    assert compare_steps(model, planned, *repeated(args, kwargs, 1), case.loss).equal
    assert resized_captures(planned)[:2] == [False, True]


@pytest.mark.parametrize("part", [0.35, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_plans_at_other_sizes_are_about_as_good_as_new_ones(name: str, part: float) -> None:
    _, model, args, kwargs = _model(name)
    first, larger = repeated(args, kwargs, 2), repeated(args, kwargs, 3)
    most = make_plan(model, *larger[0], example_kwargs=larger[1], strategy="none").peak_bytes
    least = smallest_peak(model, *larger)
    budget_gb = (least + part * (most - least)) / 2**30
    planned = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=budget_gb)
    planned(*larger[0], **larger[1])
    anew = auto_checkpoint(model, *larger[0], example_kwargs=larger[1], budget_gb=budget_gb)
    ours, theirs = get_report(planned), get_report(anew)
    assert resized_captures(planned) == [False, True]
    assert ours.peak_bytes <= budget_gb * 2**30
    assert ours.recompute_seconds <= theirs.recompute_seconds + 0.03 * theirs.plain_seconds


def test_a_report_is_of_its_own_plan_whenever_it_is_asked_for() -> None:
    _, model, args, kwargs = _model("gpt2")
    budget_gb = smallest_peak(model, *repeated(args, kwargs, 4)) * 1.1 / 2**30

    def after(*times: int) -> tuple[Any, ...]:
        first = repeated(args, kwargs, 2)
        planned = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=budget_gb)
        entry = planner_of(planned).outcome()
        for several in times:
            inputs = repeated(args, kwargs, several)
            planned(*inputs[0], **inputs[1])
        report = entry.report
        assert report is entry.report
        assert report.peak_bytes == entry.plan.peak_bytes
        return report.title, report.peak_bytes, report.min_peak_bytes, report.bound_seconds

    assert after() == after(3, 4)


def test_the_report_of_another_size_is_that_of_its_plan() -> None:
    _, model, args, kwargs = _model("gpt2")
    budget_gb = smallest_peak(model, *repeated(args, kwargs, 3)) * 1.1 / 2**30
    first = repeated(args, kwargs, 2)
    planned = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=budget_gb)
    with torch.no_grad():
        planned(*args, **kwargs)
    larger = repeated(args, kwargs, 3)
    planned(*larger[0], **larger[1])
    plan, report = get_plan(planned), get_report(planned)
    assert report.peak_bytes == plan.peak_bytes
    assert report.min_peak_bytes <= report.peak_bytes
    assert report.bound_seconds is not None
    assert report.bound_seconds <= report.recompute_seconds
