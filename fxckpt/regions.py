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

from fxckpt.decide import Decision, Options
from fxckpt.errors import BudgetInfeasibleError, CaptureError, FxckptError
from fxckpt.goal import Goal
from fxckpt.ledger import Ledger, Stretch
from fxckpt.plan import Graph, Plan, Program
from fxckpt.search import Candidate
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
        ledger: what the Python in between holds, while the first pass runs.
        stretches: what it was found to hold, for each of ``order`` and the end.
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
    ledger: Ledger | None = None
    stretches: list[Stretch] = field(default_factory=list)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of ``model`` with its regions planned."""
        with contextlib.ExitStack() as stack:
            run = _Run(self, stack, {id(module): path for path, module in model.named_modules()})
            run.patch_children(model)
            return type(model).forward(model, *args, **kwargs)

    def try_out(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first pass: meets the regions, and what the Python in between holds."""
        for met in (self.uses, self.left, self.plain, self.order):
            met.clear()
        ledger = self.ledger = Ledger()
        try:
            with ledger:
                output = self.run(model, args, kwargs)  # noqa: F841  held to the end, as a caller would
            ledger.mark()
        finally:
            self.ledger, self.stretches = None, ledger.close()

    def status(self, path: str) -> str:
        """``"leave"``, ``"descend"`` or ``"try"``."""
        if any(_matches(path, pattern) for pattern in self.leave) or path in self.plain:
            return "leave"
        if path in self.left or (self.only and not any(_matches(path, pattern) for pattern in self.only)):
            return "descend"
        return "try"

    def lookup(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionUse | None:
        """The planned region for this call, None if the module stays Python."""
        try:
            call = self.key(module, args, kwargs)
            key = (path, call.structure)  # with or without gradients from before, a region keeps its plan
            use = self.uses.get(key)
            if use is None:
                use = self.make(path, module, args, kwargs, call)
                self._choose(use)
                use.settle()
                self.uses[key] = use
        except CaptureError as error:
            if error.reason in ("nothing requires grad", "too small"):
                self.plain.add(path)
            else:
                self.left[path] = LeftOut(path, error.reason, error.source)
            return None
        if self.ledger is not None:
            self.order.append(key)
            self.ledger.mark()
        return use

    def _choose(self, use: RegionUse) -> None:
        """Choose a plan for a region just met: until the budget is shared out the smallest, then what is left."""
        limit = self.goal.limit
        if limit is None:
            return
        smallest = len(use.choices) - 1
        if self.settled:  # a call of another kind takes the place of the one that was planned for
            calls = [use if (other := self.uses[key]).path == use.path else other for key in self.order]
            calls = calls if use in calls else [*calls, use]
            while use.chosen < smallest and _peak(calls, *self.outside_bytes, self.stretches) > limit:
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
            return _peak(calls, base_bytes, gradient_bytes, self.stretches)
        for use in uses:
            use.chosen = len(use.choices) - 1
        smallest = _peak(calls, base_bytes, gradient_bytes, self.stretches)
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
        while _peak(calls, base_bytes, gradient_bytes, self.stretches) > limit:
            able = [use for use in uses if use.chosen + 1 < len(use.choices)]
            if not able:
                break
            max(able, key=_gain).chosen += 1
        for use in uses:
            use.settle()
        return _peak(calls, base_bytes, gradient_bytes, self.stretches)

    def plain_peak(self, base_bytes: int, gradient_bytes: int) -> int:
        """Predicted peak in bytes of the step without recomputation; arguments as in :meth:`allocate`."""
        calls = [self.uses[key] for key in self.order]
        return _peak(calls, base_bytes, gradient_bytes, self.stretches, plain=True)


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
            if isinstance(child, torch.jit.ScriptModule):
                self.regions.left[path] = LeftOut(path, "TorchScript runs no Python", "")
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
            ledger = self.regions.ledger
            with _replaced(module, original):  # a capture sees the module as it is
                with contextlib.nullcontext() if ledger is None else ledger.region():
                    use = self.regions.lookup(path, module, args, kwargs)
                    if use is not None:
                        output = use.entry.call(args, kwargs)
                        if ledger is not None:
                            ledger.made(output)
                        return output
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


def _numbers(use: RegionUse, plain: bool = False) -> tuple[int, int, int, int]:
    """Beyond the region's own inputs: peak of forward, bytes after it, peak of backward; and kept bytes of outputs."""
    graph, timeline = use.options.graph, use.options.plain if plain else use.candidate()[2]
    fixed = graph.fixed_bytes
    backward = next((i for i, label in enumerate(timeline.labels) if label[1] == "backward"), len(timeline.labels))
    forward_peak = max(timeline.total_bytes[:backward], default=fixed) - fixed
    incoming = sum(graph.slots[slot].bytes for slot in use.options.tangents)
    after = (timeline.total_bytes[backward] - incoming if backward < len(timeline.labels) else fixed) - fixed
    backward_peak = max(timeline.total_bytes[backward:], default=fixed) - fixed
    return forward_peak, after, backward_peak, 0 if plain else _kept_outputs(graph, use.candidate()[1])


def _kept_outputs(graph: Graph, program: Program) -> int:
    """Bytes of outputs that backward needs: they stay, whether or not the Python behind lets go of them."""
    saved = {value for segment in program.segments for value in segment.saved}
    kept = {storage for value in saved.intersection(graph.outputs) for storage in graph.nodes[value].storages}
    return sum(graph.storage_bytes[storage] for storage in kept)


def _peak(
    calls: list[RegionUse], base_bytes: int, gradient_bytes: int, stretches: list[Stretch], plain: bool = False
) -> int:
    """Peak of a step that runs the regions in this order.

    Of the Python in between it is known what it holds in forward. Its backward is taken to hold two gradients on top,
    one that comes in and one that goes out, as large as its largest tensor.
    """
    numbers = [_numbers(use, plain) for use in calls]
    between = [*stretches, *[Stretch()] * (len(calls) + 1)][: len(calls) + 1]
    regions, live = base_bytes, []  # held by regions; by all, where each region starts, and at the end
    peak = 0
    for (forward_peak, after, _, kept), before, behind in zip(numbers, between[:-1], between[1:], strict=True):
        live.append(regions + before.held_bytes)
        peak = max(peak, regions + before.peak_bytes, live[-1] + forward_peak)
        regions += after - max(0, behind.freed_bytes - kept)
    live.append(regions + between[-1].held_bytes)
    peak = max(peak, regions + between[-1].peak_bytes)
    grown = 0
    for index in range(len(calls), -1, -1):
        peak = max(peak, live[index] + grown + 2 * between[index].largest_bytes)
        if index:
            use = calls[index - 1]
            peak = max(peak, live[index - 1] + grown + numbers[index - 1][2])
            parameters = sum(slot.bytes for slot in use.options.graph.slots if slot.owner == -1)
            grown = min(gradient_bytes, grown + parameters) if use.options.graph.fresh_gradients else 0
    return max(peak, base_bytes + gradient_bytes)


def _gain(use: RegionUse) -> float:
    """Bytes that the next smaller plan of a region gives back per second that it costs."""
    before, kept = use.candidate()[2], _numbers(use)[1]
    use.chosen += 1
    after, freed = use.candidate()[2], kept - _numbers(use)[1]
    use.chosen -= 1
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
