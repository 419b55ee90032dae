"""The ways in which tests plan a model, by name: what to hand to :func:`tests.harness.compare` as ``make_planned``."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from fxckpt import auto_checkpoint, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.plan import Plan, Segment
from tests.harness import MakePlanned

__all__ = ["STRATEGIES", "everything_recomputed", "planned", "smallest_peak"]

TINY_GB = 1e-9  # a byte


def smallest_peak(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> int:
    """Smallest whole-step peak in bytes that ``dp`` reaches, as the error of a hopeless budget tells it."""
    try:
        make_plan(model, *args, example_kwargs=kwargs, budget_gb=TINY_GB, **options)
    except BudgetInfeasibleError as error:
        return error.min_peak_bytes
    raise AssertionError("a budget of a byte was met")


def everything_recomputed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Plan:
    """A plan that keeps nothing between the ends of its segments.

    Args:
        model: to plan.
        args: example inputs.
        kwargs: example inputs.
        whole: one segment over the whole forward instead of the planner's segments.
    """
    return _forgetful(make_plan(model, *args, example_kwargs=kwargs, strategy="none"), whole)


def _forgetful(plan: Plan, whole: bool) -> Plan:
    if plan.regions:
        return dataclasses.replace(plan, regions=tuple((path, _forgetful(part, whole)) for path, part in plan.regions))
    if whole:
        segments: tuple[Segment, ...] = (Segment(plan.segments[0].start, plan.segments[-1].stop, name="all"),)
    else:
        segments = tuple(dataclasses.replace(segment, kept=(), inner=()) for segment in plan.segments)
    return dataclasses.replace(plan, segments=segments)


def _none(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    return auto_checkpoint(model, *args, example_kwargs=kwargs, strategy="none")


def _dp(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    budget_gb = smallest_peak(model, args, kwargs) / 2**30
    # Later batches may be larger than the first: they take the plan with the smallest peak.
    return auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=budget_gb, on_infeasible="best")


def _lazy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    return auto_checkpoint(model, strategy="sqrtn")


def _sqrtn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    return auto_checkpoint(model, *args, example_kwargs=kwargs, strategy="sqrtn")


def _recompute(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    plan = everything_recomputed(model, args, kwargs)
    return auto_checkpoint(model, *args, example_kwargs=kwargs, plan=plan)


def _recompute_whole(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    plan = everything_recomputed(model, args, kwargs, whole=True)
    return auto_checkpoint(model, *args, example_kwargs=kwargs, plan=plan)


STRATEGIES: dict[str, MakePlanned] = {
    "none": _none,
    "dp": _dp,
    "lazy": _lazy,
    "sqrtn": _sqrtn,
    "recompute": _recompute,
    "recompute whole": _recompute_whole,
}


def planned(strategy: str) -> MakePlanned:
    """The ``make_planned`` of one of :data:`STRATEGIES`."""
    return STRATEGIES[strategy]
