"""Fallback: where a model cannot be captured whole, its largest submodules that can are planned, the rest stays Python.

While the model's own forward runs, each candidate submodule's ``forward`` is replaced. At its first call a candidate is
captured; if that fails its children become the candidates. One budget covers all regions: after the first pass through
the model every region gets the plan at which the whole step fits with the least recomputation.
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxckpt.decide import Candidate, Decision, Goal, Options
from fxckpt.errors import BudgetInfeasibleError, CaptureError, FxckptError
from fxckpt.plan import Plan, Timeline
from fxckpt.signature import Call
from fxckpt.units import GIB, format_bytes

__all__ = ["LeftOut", "RegionUse", "Regions", "combined_plan", "thin"]

MIN_OPERATIONS = 3  # a region with fewer operations than this saves nothing over eager
MAX_CHOICES = 16


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A module that stays Python.

    Attributes:
        module: its path.
        reason: why it was not captured.
        source: ``file:line``, if known.
    """

    module: str
    reason: str
    source: str


@dataclass(slots=True)
class RegionUse:
    """One region for one kind of call.

    Attributes:
        path: module path.
        options: its candidate plans.
        choices: indices of the candidates considered, cheapest first.
        chosen: index into ``choices``.
        build: makes the runnable entry for a decision.
        entry: what runs at present.
    """

    path: str
    options: Options
    choices: list[int]
    chosen: int
    build: Callable[[Decision], Any]
    entry: Any = None
    decision: Decision | None = None

    def candidate(self) -> Candidate:
        """The candidate chosen at present."""
        return self.options.search.at(self.choices[self.chosen])

    def settle(self) -> None:
        """Make the entry for the candidate chosen at present."""
        self.decision = self.options.settle(self.candidate())
        self.entry = self.build(self.decision)


@dataclass(slots=True)
class Regions:
    """All regions of one model.

    Attributes:
        make: captures a module for a call and returns its use; raises CaptureError.
        key: takes a call of a module apart; its structure is what the plan of the region is kept under.
        goal: strategy and budget of the whole step.
        leave: patterns of module paths that stay Python.
        only: patterns of module paths that become regions; empty means any.
        uses: the regions, by path and key.
        left: modules that could not be captured, by path.
        plain: paths of modules with nothing to plan.
        settled: the budget has been shared out; a region met from now on takes what the others leave.
        order: keys of ``uses`` in the order of the calls of the first pass.
        outside_bytes: fixed memory of the whole step, and parameter gradients that do not exist yet.
    """

    make: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Call], RegionUse]
    key: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Call]
    goal: Goal
    leave: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    uses: dict[Any, RegionUse] = field(default_factory=dict)
    left: dict[str, LeftOut] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    settled: bool = False
    order: list[Any] = field(default_factory=list)
    outside_bytes: tuple[int, int] = (0, 0)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of ``model`` with its regions planned."""
        with contextlib.ExitStack() as stack:
            run = _Run(self, stack, {id(module): path for path, module in model.named_modules()})
            run.patch_children(model)
            return type(model).forward(model, *args, **kwargs)

    def forget(self) -> None:
        """Start again: nothing has been met yet."""
        for met in (self.uses, self.left, self.plain, self.order):
            met.clear()

    def status(self, path: str) -> str:
        """``"leave"``, ``"descend"`` or ``"try"``."""
        if any(_matches(path, pattern) for pattern in self.leave) or path in self.plain:
            return "leave"
        if path in self.left or (self.only and not any(_matches(path, pattern) for pattern in self.only)):
            return "descend"
        return "try"

    def lookup(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionUse | None:
        """The planned region for this call, None if the module stays Python."""
        call = self.key(module, args, kwargs)
        key = (path, call.structure)  # with or without gradients from before, a region keeps its plan
        use = self.uses.get(key)
        if use is None:
            try:
                use = self.make(path, module, args, kwargs, call)
            except CaptureError as error:
                if error.reason in ("nothing requires grad", "too small"):
                    self.plain.add(path)
                else:
                    self.left[path] = LeftOut(path, error.reason, error.source)
                return None
            self._choose(use)
            use.settle()
            self.uses[key] = use
        if not self.settled:
            self.order.append(key)
        return use

    def _choose(self, use: RegionUse) -> None:
        """Choose a plan for a region just met: until the budget is shared out the smallest, then what is left."""
        limit = self.goal.limit
        if limit is None:
            return
        smallest = len(use.choices) - 1
        if self.settled:  # a call of another kind takes the place of the one that was planned for
            calls = [other for key in self.order if (other := self.uses[key]).path != use.path]
            while use.chosen < smallest and _peak([*calls, use], *self.outside_bytes) > limit:
                use.chosen += 1
        else:
            use.chosen = smallest

    def allocate(self, base_bytes: int, gradient_bytes: int) -> int:
        """Choose a plan for every region so that the step fits; the predicted peak in bytes.

        Args:
            base_bytes: fixed memory of the whole step.
            gradient_bytes: parameter gradients that do not exist yet.

        Raises:
            BudgetInfeasibleError: even the smallest plans do not fit.
        """
        uses = [self.uses[key] for key in dict.fromkeys(self.order)]
        calls = [self.uses[key] for key in self.order]
        self.settled, self.outside_bytes = True, (base_bytes, gradient_bytes)
        limit = self.goal.limit
        if limit is None:
            return _peak(calls, base_bytes, gradient_bytes)
        for use in uses:
            use.chosen = len(use.choices) - 1
        smallest = _peak(calls, base_bytes, gradient_bytes)
        if smallest > limit and not self.goal.best_effort:
            smallest += self.goal.reserve_bytes
            budget = self.goal.budget_bytes or 0
            raise BudgetInfeasibleError(
                f"no plan fits {format_bytes(budget)} for {self.goal.name}: its {len(uses)} regions reach "
                f"{format_bytes(smallest)} at the least.\n  Try: budget_gb={-(-smallest * 1000 // GIB) / 1000:g}",
                budget_bytes=budget, min_peak_bytes=smallest, fixed_bytes=base_bytes + gradient_bytes,
            )  # fmt: skip
        for use in uses:
            use.chosen = 0
        while _peak(calls, base_bytes, gradient_bytes) > limit:
            able = [use for use in uses if use.chosen + 1 < len(use.choices)]
            if not able:
                break
            max(able, key=_gain).chosen += 1
        for use in uses:
            use.settle()
        return _peak(calls, base_bytes, gradient_bytes)

    def plain_peak(self, base_bytes: int, gradient_bytes: int) -> int:
        """Predicted peak in bytes of the step without recomputation; arguments as in :meth:`allocate`."""
        return _peak([self.uses[key] for key in self.order], base_bytes, gradient_bytes, plain=True)


class _Run:
    """One pass through a model: which forwards are replaced right now."""

    def __init__(self, regions: Regions, stack: contextlib.ExitStack, paths: dict[int, str]) -> None:
        self.regions, self.stack, self.paths = regions, stack, paths
        self.thread = threading.get_ident()
        self.patched: set[int] = set()

    def patch_children(self, module: nn.Module) -> None:
        """Put dispatchers on the children of a module that stays Python."""
        for child in module.children():
            path = self.paths.get(id(child), "")
            if id(child) in self.patched or not path:
                continue
            status = self.regions.status(path)
            if status == "try" and type(child).forward is not nn.Module.forward:
                self.patched.add(id(child))
                self.stack.enter_context(_replaced(child, self._dispatcher(path, child)))
            elif status != "leave":
                self.patch_children(child)

    def _dispatcher(self, path: str, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            with _replaced(module, original):  # a capture sees the module as it is
                use = self.regions.lookup(path, module, args, kwargs)
                if use is not None:
                    return use.entry.call(args, kwargs)
                if path in self.regions.left:
                    self.patch_children(module)
                return original(*args, **kwargs)

        return forward


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """``module.forward`` is ``forward`` for the time being; a bound method of the class is restored by deletion."""
    entries = module.__dict__
    before = entries.get("forward")
    if getattr(forward, "__func__", None) is type(module).forward:
        entries.pop("forward", None)
    else:
        entries["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            entries.pop("forward", None)
        else:
            entries["forward"] = before


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def _numbers(use: RegionUse, timeline: Timeline) -> tuple[int, int, int]:
    """Beyond the region's own inputs: peak of forward, bytes after it, peak of backward."""
    fixed = use.options.graph.fixed_bytes
    backward = next((i for i, label in enumerate(timeline.labels) if label[1] == "backward"), len(timeline.labels))
    forward_peak = max(timeline.total_bytes[:backward], default=fixed) - fixed
    incoming = sum(use.options.graph.slots[slot].bytes for slot in use.options.tangents)
    after = (timeline.total_bytes[backward] - incoming if backward < len(timeline.labels) else fixed) - fixed
    backward_peak = max(timeline.total_bytes[backward:], default=fixed) - fixed
    return forward_peak, after, backward_peak


def _peak(calls: list[RegionUse], base_bytes: int, gradient_bytes: int, plain: bool = False) -> int:
    """Peak of a step that runs the regions in this order. Python in between is taken to hold nothing of its own."""
    numbers = [_numbers(use, use.options.plain if plain else use.candidate()[2]) for use in calls]
    live = peak = base_bytes
    held = []
    for forward_peak, after, _ in numbers:
        peak = max(peak, live + forward_peak)
        held.append(live)
        live += after
    grown = 0
    for use, before, (_, _, backward_peak) in zip(calls[::-1], held[::-1], numbers[::-1], strict=True):
        peak = max(peak, before + grown + backward_peak)
        own = sum(s.bytes for s in use.options.graph.slots if s.owner == -1)
        grown = min(gradient_bytes, grown + own) if use.options.graph.fresh_gradients else 0
    return max(peak, base_bytes + gradient_bytes)


def _gain(use: RegionUse) -> float:
    """Bytes that the next smaller plan of a region gives back per second that it costs."""
    before = use.candidate()[2]
    after = use.options.search.at(use.choices[use.chosen + 1])[2]
    freed = _numbers(use, before)[1] - _numbers(use, after)[1]
    return freed / max(after.recompute_seconds - before.recompute_seconds, 1e-9)


def combined_plan(regions: Regions, peak_bytes: int) -> Plan:
    """What every region runs, as one plan."""
    if not regions.uses:
        raise FxckptError("no region was planned")
    parts = tuple((use.path, use.decision.plan) for use in regions.uses.values() if use.decision is not None)
    budget = regions.goal.budget_bytes or 0
    seconds = sum(plan.extra_seconds for _, plan in parts)
    return Plan(
        regions.goal.strategy, (), budget_bytes=budget, peak_bytes=peak_bytes, extra_seconds=seconds, regions=parts
    )


def thin(count: int) -> list[int]:
    """At most ``MAX_CHOICES`` of ``count`` candidates, first and last among them."""
    if count <= MAX_CHOICES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MAX_CHOICES - 1)) for i in range(MAX_CHOICES)})
