"""Chooses the plan: candidates of a strategy, the exact simulation as the judge, the cheapest that fits."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxckpt.clock import Clock
from fxckpt.errors import PlanMismatchError
from fxckpt.goal import Goal, infeasible
from fxckpt.menus import resized_menus
from fxckpt.passes.bound import bound
from fxckpt.passes.cuts import cuts
from fxckpt.passes.dp import dp
from fxckpt.passes.menu import menu
from fxckpt.passes.simulate import simulate
from fxckpt.passes.sqrtn import sqrtn
from fxckpt.plan import Chain, Frontier, Graph, MenuPoint, Plan, Program, Timeline
from fxckpt.search import Candidate, Predicted, Search, simulated
from fxckpt.segments import check, keep_everything, named, output_ends, split
from fxckpt.units import format_bytes

__all__ = ["Decision", "Options", "fingerprint"]

SLOTS = {False: 400, True: 600}  # of the dynamic program at other sizes, without nesting and with it
NEAR = 0.005  # of the plain step; recomputation beyond the bound for which no nested plan is looked for
SLACK = 0.02  # plans from other sizes may be this much dearer, as a fraction of the plain step

Measured = Callable[[Timeline, int], Graph | None]
"""The graph with measured scratch memory where a timeline may exceed so many bytes by it, None if it is what it was."""


@dataclass(slots=True)
class Decision:
    """A plan with all that led to it."""

    options: Options
    graph: Graph
    plan: Plan
    program: Program
    timeline: Timeline

    @property
    def tangents(self) -> frozenset[int]:
        """Slots of outputs that get a gradient."""
        return self.options.tangents

    @property
    def plain(self) -> Timeline:
        """The step without recomputation."""
        return self.options.plain

    def refine(self) -> None:
        """Measure the scratch memory that may be the peak, where estimates were good enough to decide by.

        Then the predicted peaks are as exact as those of a new capture.
        """
        options = self.options
        while True:
            timelines = self.timeline, options.plain
            graph = next(filter(None, (options.measured(one, one.peak_bytes) for one in timelines)), None)
            if graph is None:
                break
            options.rescore(graph)
            self.graph, self.timeline = graph, simulate(graph, self.program, self.tangents)
        self.plan = dataclasses.replace(self.plan, peak_bytes=self.timeline.peak_bytes)

    def min_peak_bytes(self) -> int:
        """Smallest peak that the strategy reaches; computed now."""
        return self.options.smallest()[2].peak_bytes

    def bound_seconds(self) -> float | None:
        """Seconds of recomputation that no schedule avoids, None if unknown; computed now."""
        return self.options.least(self.timeline)

    def seconds(self) -> list[tuple[str, float]]:
        """What each pass took so far."""
        return self.options.clock.seconds


class Options:
    """The candidate plans of one region.

    Attributes:
        search: finds among them.
        plain: the step without recomputation.
    """

    def __init__(
        self, graph: Graph, goal: Goal, tangents: frozenset[int], first: Options | None = None,
        measured: Measured = lambda timeline, limit: None,
    ) -> None:  # fmt: skip
        """
        Args:
            graph: the joint graph with costs.
            goal: strategy and budget.
            tangents: slots of outputs that get a gradient.
            first: options of the same graph at other sizes, whose candidates are to be taken over.
            measured: of a graph whose scratch memory is estimated.

        Raises:
            PlanMismatchError: ``goal.plan`` belongs to another graph.
        """
        self.goal, self.tangents, self.first, self.measured = goal, tangents, first, measured
        self.moments = 6 if first is None else 2  # of backward that the bound looks at
        clock = self.clock = Clock()
        self.gap = 0.0  # of what was decided
        self.fingerprint = fingerprint(graph)
        self.menus: tuple[tuple[MenuPoint, ...], ...] = ()
        self.chain: Chain
        self.ends: tuple[int, ...]
        self.plain_plan: Plan
        self.plain_program: Program
        self.plain: Timeline
        self.search: Search
        self.lowered: dict[Any, Any] = {} if first is None else first.lowered
        self._set_graph(graph)
        if first is not None:
            self.chain, self.ends = first.chain, first.ends
            self.plain_plan, self.plain_program = first.plain_plan, first.plain_program
            self.plain = clock.run("simulate", simulate, graph, self.plain_program, tangents)
            self.search = first.search.at_sizes(graph)
            self._share_plain()
            return
        self.chain = clock.run("cuts", cuts, self.held)
        self.ends = output_ends(graph)
        keep_all = self.plain_plan = split(graph, keep_everything(graph, self.chain), self.ends)
        self.plain_program, self.plain = clock.run("simulate", simulated, graph, keep_all, tangents, self.lowered)
        self._solve()

    def _set_graph(self, graph: Graph) -> None:
        self.graph, self.held = graph, _without_unused_outputs(graph, self.tangents)
        self.bounds: dict[tuple[int, float], float] = {}
        self.resized: tuple[tuple[MenuPoint, ...], ...] = ()

    def _solve(self) -> None:
        """Find the candidates."""
        plan, goal = self.goal.plan, self.goal
        if plan is not None:
            if plan.fingerprint not in ("", self.fingerprint):
                raise PlanMismatchError("the plan was made for another model or another input signature")
            check(self.graph, plan.segments, 0, len(self.graph.forward))
            frontier = Frontier((plan,))
        else:
            frontier = self.clock.run(goal.strategy, self._candidates, self.plain_plan)
        plans = tuple(split(self.graph, plan, self.ends) for plan in frontier.plans)
        self.search = Search(self.graph, plans, self.tangents, self.lowered, ordered=goal.strategy != "sqrtn")
        self._share_plain()

    def _share_plain(self) -> None:
        """The step without recomputation has been lowered and simulated, and may be a candidate."""
        plan = self.search.plans[0]
        if plan.segments == self.plain_plan.segments:
            self.search.give(0, (plan, self.plain_program, self.plain))

    def _candidates(self, keep_all: Plan) -> Frontier:
        if self.goal.strategy == "none":
            return Frontier((keep_all,))
        if self.goal.strategy == "sqrtn":
            return sqrtn(self.held, self.chain)
        self.menus = menu(self.held, self.chain, ends=self.ends)
        frontier = dp(self.held, self.chain, self.menus)
        return Frontier((dataclasses.replace(keep_all, strategy="dp"), *frontier.plans))

    def decide(self) -> Decision:
        """The cheapest plan whose simulated peak is within the budget.

        Raises:
            BudgetInfeasibleError: no plan fits.
        """
        while (chosen := self._chosen_measured()) is None:
            if self._measured_near(self.smallest) is None:
                chosen = self._best_effort(self.smallest())
                break
            self._solve()  # with other scratch memory, other plans may be the smallest
        self.gap = self._gap(chosen)
        return self.settle(chosen)

    def take_over(self) -> Decision | None:
        """Like :meth:`decide`, among plans with the kept sets of the first sizes; None if none of these fits."""
        first = self.first
        assert first is not None
        if first.menus:
            best = self._carried(first) or self._for_these_sizes(first)
        else:
            best = self._chosen_measured() or (self._chosen_measured() if self._measuring_helps(first) else None)
        if best is None:
            return None
        self.search.known.clear()  # timelines are large
        return self.settle(best)

    def rescore(self, graph: Graph) -> None:
        """Go on with other scratch memory."""
        self._set_graph(graph)
        self.plain = simulate(graph, self.plain_program, self.tangents)
        self.search = self.search.rescored(graph)

    def _measured_near(self, find: Callable[[], Candidate]) -> Candidate | None:
        """What ``find`` finds when the scratch memory that may exceed the budget there is measured; None if all was."""
        known, found = self.graph, find()
        while (graph := self.measured(found[2], self.goal.limit or 0)) is not None:
            self.rescore(graph)
            found = find()
        return found if self.graph is not known else None

    def _measuring_helps(self, first: Options) -> bool:
        """Whether scratch memory was estimated too high for the smallest plan of the first sizes, which does fit."""
        smallest = self._measured_near(lambda: first.search.at_sizes(self.graph).smallest())
        return smallest is not None and smallest[2].peak_bytes <= (self.goal.limit or 0)

    def _carried(self, first: Options) -> Candidate | None:
        """A candidate of the first sizes, if there is at least as much room as then and one is as good as then."""
        if self._room() < first._room():
            return None
        best = self._chosen_measured()
        return best if best is not None and self._is_near(best, first.gap + SLACK) else None

    def _room(self) -> float:
        """The budget as a part of what the plain step takes, what is fixed apart; at most 1."""
        limit, fixed = self.goal.limit, self.graph.fixed_bytes
        if limit is None or self.plain.peak_bytes <= limit:
            return 1.0
        return (limit - fixed) / (self.plain.peak_bytes - fixed)

    def _for_these_sizes(self, first: Options) -> Candidate | None:
        """The best plan with the kept sets of the first sizes.

        Nested plans are looked for where none else fits or is good, sooner if the first sizes have one for a budget as
        tight.
        """
        best = self._anew(first, nested=False)
        if best is None and self._measuring_helps(first):
            best = self._anew(first, nested=False)
        slack = NEAR if first.nests(self._room()) else SLACK
        if best is None or not self._is_near(best, first.gap + slack):
            found = (best, self._anew(first, nested=True))
            best = min(filter(None, found), key=lambda c: c[2].recompute_seconds, default=None)
        return best

    def nests(self, room: float) -> bool:
        """Whether the cheapest plan in a budget of so much of what is not fixed recomputes within recomputation."""
        limit = self.graph.fixed_bytes + room * (self.plain.peak_bytes - self.graph.fixed_bytes)
        plan = next((plan for plan in self.search.plans if plan.peak_bytes <= limit), self.search.plans[-1])
        return any(segment.inner for segment in plan.segments)

    def _chosen_measured(self) -> Candidate | None:
        """The cheapest candidate that fits when scratch memory near its peak is measured."""
        chosen, limit = self._chosen(), self.goal.limit
        while chosen is not None and limit is not None:
            graph = self.measured(chosen[2], limit)
            if graph is None:
                break
            self.rescore(graph)
            timeline = simulate(graph, chosen[1], self.tangents)
            chosen = (*chosen[:2], timeline) if timeline.peak_bytes <= limit else self._chosen()
        return chosen

    def _anew(self, first: Options, nested: bool) -> Candidate | None:
        """The best among plans made for these sizes from the kept sets of the first sizes."""
        assert self.goal.limit is not None
        menus = self._resized_menus(first)
        frontier = self.clock.run("dp", dp, self.held, self.chain, menus, SLOTS[nested], self.goal.limit, nested)
        plans = tuple(split(self.graph, plan, self.ends) for plan in frontier.plans)
        self.search = Predicted(self.graph, plans, self.tangents, self.lowered)
        return self._chosen_measured()

    def _resized_menus(self, first: Options) -> tuple[tuple[MenuPoint, ...], ...]:
        self.resized = self.resized or self.clock.run("dp", resized_menus, first.held, self.held, first.menus)
        return self.resized

    def _best_effort(self, smallest: Candidate) -> Candidate:
        """The smallest peak, if that will do."""
        if not self.goal.best_effort:
            raise infeasible(self.goal, self.graph, smallest[2])
        warnings.warn(
            f"no plan fits {format_bytes(self.goal.budget_bytes or 0)}; taking the smallest peak, "
            f"{format_bytes(smallest[2].peak_bytes)}", stacklevel=2,
        )  # fmt: skip
        return smallest

    def serve(self, goal: Goal, tangents: frozenset[int]) -> bool:
        """Whether the candidates are good for ``goal`` at other sizes."""
        same = self.tangents == tangents and self.goal.strategy == goal.strategy
        return same and self.goal.plan is None and goal.plan is None

    def _chosen(self) -> Candidate | None:
        limit = None if self.goal.plan is not None else self.goal.limit
        find = self.search.first if limit is None else self.search.cheapest_within
        return self.clock.run("schedule", find, limit or 0)

    def settle(self, candidate: Candidate) -> Decision:
        """The decision for one of the candidates."""
        graph, goal = self.graph, self.goal
        plan, program, timeline = candidate
        plan = dataclasses.replace(
            plan, fingerprint=self.fingerprint, budget_bytes=goal.budget_bytes or 0,
            segments=named(graph, plan.segments), peak_bytes=timeline.peak_bytes,
            extra_seconds=timeline.recompute_seconds,
        )  # fmt: skip
        pairs = zip(program.segments, plan.segments, strict=True)
        program = Program(tuple(dataclasses.replace(code, name=segment.name) for code, segment in pairs))
        return Decision(self, graph, plan, program, timeline)

    def smallest(self) -> Candidate:
        """The smallest peak that the strategy reaches."""
        first = self.first
        if first is None or not first.menus:
            return self.search.smallest()
        frontier = dp(self.held, self.chain, self._resized_menus(first))
        plans = tuple(split(self.graph, plan, self.ends) for plan in frontier.plans)
        return Search(self.graph, plans, self.tangents, self.lowered).smallest()

    def least(self, timeline: Timeline, enough: float = math.inf) -> float | None:
        """Seconds of recomputation that no schedule avoids, or ``enough`` of them; None if that was not asked for."""
        if self.goal.limit is None or self.goal.strategy != "dp":
            return None
        key = max(self.goal.limit, timeline.peak_bytes), enough
        if key not in self.bounds:
            self.bounds[key] = self.clock.run("bound", bound, self.held, key[0], self.moments, enough)
        return self.bounds[key]

    def _is_near(self, candidate: Candidate, gap: float) -> bool:
        """Whether recomputation beyond what no schedule can avoid takes at most ``gap`` of the plain step's time."""
        enough = candidate[2].recompute_seconds - gap * self.plain.plain_seconds
        least = None if enough <= 0 else self.least(candidate[2], enough)
        return least is None or least >= enough

    def _gap(self, candidate: Candidate) -> float:
        """Recomputation beyond what no schedule can avoid, as a fraction of the plain step's time; 0 if unknown."""
        return _beyond(candidate[2], self.least(candidate[2]), self.plain)


def _beyond(timeline: Timeline, bound_seconds: float | None, plain: Timeline) -> float:
    """Recomputation beyond ``bound_seconds`` as a fraction of the plain step; 0 if there is no bound."""
    if bound_seconds is None or not plain.plain_seconds:
        return 0.0
    return (timeline.recompute_seconds - bound_seconds) / plain.plain_seconds


def _without_unused_outputs(graph: Graph, tangents: frozenset[int]) -> Graph:
    """The graph with only those outputs that the caller holds through backward and that get a gradient."""
    idle = [index for index, slot in enumerate(graph.slots) if slot.tangent >= 0 and index not in tangents]
    if not idle:
        return graph
    unused = {graph.slots[index].value for index in idle}
    slots = list(graph.slots)
    for index in idle:
        slots[index] = dataclasses.replace(slots[index], tangent=-1)
    outputs = tuple(value for value in graph.outputs if value not in unused)
    arrived, grad_nodes = set(tangents), []
    for node in graph.grad_nodes:
        runs = any(slot in arrived for slot in node.reads)
        arrived.update(slot for slot, _ in node.contributes if runs)
        grad_nodes.append(node if runs else dataclasses.replace(node, reads=(), nodes=(), contributes=()))
    return dataclasses.replace(
        graph, outputs=outputs, passing=tuple(unused), slots=tuple(slots), grad_nodes=tuple(grad_nodes)
    )


def fingerprint(graph: Graph) -> str:
    """Of structure and input sizes, not of costs: a plan made for one device's speed may run on another's.

    Sizes of results follow from those of the inputs, and fake tensors do not always tell them alike (slice_scatter).
    """
    digest = hashlib.sha256()
    for node in graph.nodes:
        digest.update(repr((node.name, node.op, node.inputs, node.storages)).encode())
    given = [storage for node in graph.nodes if node.phase == "input" for storage in node.storages]
    digest.update(repr([graph.storage_bytes[storage] for storage in given]).encode())
    return digest.hexdigest()[:16]
