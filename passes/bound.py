"""The recomputation that no schedule can avoid at a budget.

While a backward node runs, some forward results are in memory. Those that later nodes read and that are not there must
be computed once more, with all that this takes. So the lower convex hull of (kept bytes, extra seconds) over the whole
graph (:mod:`fxckpt.hull`), read off at the memory that is left for forward results at that moment, is a lower bound:
it is the best Lagrangian bound over all prices per byte (Geoffrion 1974).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from fxckpt.hull import Operation, Storage, hull
from fxckpt.plan import GradNode, Graph

__all__ = ["bound"]

TICKS = 10**12  # per second; times are integers inside the cuts


class _Moment(NamedTuple):
    """While a backward node runs.

    Attributes:
        step: number of the node in the order of backward.
        used: bytes that are in memory whatever the schedule; of forward results those that the node reads.
        demand: bytes of the forward results that later nodes read and that are not counted in ``used``.
    """

    step: int
    used: int
    demand: int


def bound(graph: Graph, budget_bytes: int, moments: int = 6, enough: float = math.inf) -> float:
    """Seconds of recomputation that every schedule with a peak of at most ``budget_bytes`` pays at least.

    A schedule runs the backward nodes once, in the recorded order, after all of forward. Counted as in memory are the
    fixed bytes and the results of the region, and while a backward node runs the gradients that exist then, what the
    node reads and what it makes. The bound is the best of those of the ``moments`` at which memory is shortest if
    all is kept, taken from different parts of backward. One hull for each moment, until ``enough`` seconds are reached.
    """
    problem = _Problem(graph)
    short = [moment for moment in problem.moments() if moment.used + moment.demand > budget_bytes]
    chosen: list[_Moment] = []
    near = len(problem.steps) // 10
    for moment in sorted(short, key=lambda moment: (-moment.used - moment.demand, moment.step)):
        if len(chosen) < moments and all(abs(moment.step - other.step) > near for other in chosen):
            chosen.append(moment)
    best = 0.0
    for moment in chosen:
        best = max(best, problem.least(moment.step, budget_bytes - moment.used) / TICKS)
        if best >= enough:
            break
    return best


class _Problem:
    """The graph as storages and the operations that make them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs = graph.executed()
        self.maker: dict[int, int] = {}
        for value in graph.forward:
            for storage in graph.nodes[value].allocates:
                self.maker.setdefault(storage, value)
        self.held = {s for value in graph.outputs for s in graph.nodes[value].storages if s in self.maker}
        self.base = graph.fixed_bytes + sum(graph.storage_bytes[storage] for storage in self.held)
        self.steps = [(index, value) for index, grad in enumerate(graph.grad_nodes) for value in grad.nodes]
        self.reads = [self._storages(graph.nodes[value].inputs) for _, value in self.steps]
        self.operations = [self._operation(value) for value in graph.forward if graph.nodes[value].allocates]
        self.known: dict[object, object] = {}

    def _operation(self, value: int) -> tuple[list[int], tuple[int, ...], int, bool]:
        node = self.graph.nodes[value]
        ticks = round(node.seconds * TICKS) if value in self.runs else 0
        return self._storages(node.inputs), node.allocates, ticks, node.recomputable

    def _storages(self, values: Iterable[int]) -> list[int]:
        """Storages of forward that ``values`` live in."""
        nodes = self.graph.nodes
        found = (storage for value in values if value < len(nodes) for storage in nodes[value].storages)
        return [storage for storage in dict.fromkeys(found) if storage in self.maker]

    def moments(self) -> list[_Moment]:
        """What is in memory while each backward node runs."""
        graph = self.graph
        last_read = {storage: step for step, reads in enumerate(self.reads) for storage in reads}
        dying: list[int] = [0] * len(self.steps)
        for storage, step in last_read.items():
            dying[step] += 0 if storage in self.held else graph.storage_bytes[storage]
        demand = sum(dying)
        gradients = _Gradients(graph)
        found: list[_Moment] = []
        done = -1
        for step, (index, value) in enumerate(self.steps):
            while done < index - 1:
                done += 1
                gradients.finish(graph.grad_nodes[done])
            reads = sum(graph.storage_bytes[storage] for storage in self.reads[step] if storage not in self.held)
            used = self.base + gradients.bytes + reads + graph.nodes[value].workspace_bytes
            if not graph.nodes[value].inplace:
                used += sum(graph.storage_bytes[storage] for storage in graph.nodes[value].allocates)
            found.append(_Moment(step, used, demand - reads))
            demand -= dying[step]
        return found

    def least(self, step: int, room: int) -> float:
        """Least ticks of recomputation if, with what node ``step`` reads, ``room`` more bytes of forward are there."""
        free = self.held | set(self.reads[step])
        needed = {storage for reads in self.reads[step + 1 :] for storage in reads} - free
        storages = [Storage(size, True, storage in needed) for storage, size in enumerate(self.graph.storage_bytes)]
        operations = [
            Operation(
                tuple(read for read in reads if read not in free),
                tuple(storage for storage in makes if storage not in free),
                ticks,
                0,
                recomputable,
            )
            for reads, makes, ticks, recomputable in self.operations
        ]
        points = hull(operations, storages, self.known).points
        for left, right in pairwise(points):
            if left[0] > room >= right[0]:
                return left[1] + (right[1] - left[1]) * (left[0] - room) / (left[0] - right[0])
        return points[0][1] if room >= points[0][0] else points[-1][1]


class _Gradients:
    """Bytes of the gradients that exist while backward advances; those that share memory are counted once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bytes = 0
        self.holders: dict[int, tuple[str, int]] = {}
        self.sharing: dict[tuple[str, int], int] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        for slot, entry in enumerate(graph.slots):
            if entry.tangent >= 0:
                self._add(slot, ("slot", slot), entry.bytes)

    def _add(self, slot: int, holder: tuple[str, int], size: int) -> None:
        self.holders[slot] = holder
        self.sharing[holder] = self.sharing.get(holder, 0) + 1
        if self.sharing[holder] == 1:
            self.sizes[holder] = size
            self.bytes += size

    def finish(self, grad: GradNode) -> None:
        """Add what the autograd node contributes, drop what it consumed."""
        graph, count = self.graph, len(self.graph.nodes)
        for slot, value in grad.contributes:
            owner = graph.slots[slot].owner
            if slot in self.holders or owner < -1 or (owner == -1 and not graph.fresh_gradients):
                continue
            if value >= count and value - count in self.holders:
                holder = self.holders[value - count]
                self._add(slot, holder, self.sizes[holder])
            elif value < count and graph.nodes[value].phase == "backward" and graph.nodes[value].storages:
                storage = graph.nodes[value].storages[0]
                self._add(slot, ("storage", storage), min(graph.slots[slot].bytes, graph.storage_bytes[storage]))
        for slot in grad.reads:
            holder = self.holders.pop(slot, ("none", -1))
            if holder in self.sharing:
                self.sharing[holder] -= 1
                if not self.sharing[holder]:
                    self.bytes -= self.sizes[holder]
