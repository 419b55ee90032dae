"""Least recomputation for every amount of memory: nested dynamic programming over the stages.

The recurrence is that of Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019 (rotor), with a menu of kept sets for each stage
(Zhao et al., Rockmate, 2023) and with windows of several stages that need not keep the boundaries inside them.

Cut ``c`` lies before stage ``c``; ``X(c)`` are the storages that cross it. ``C(a, b, m)`` is the least extra time of
stages ``a`` to ``b - 1``, forward and backward, when ``X(a)`` is resident and ``m`` bytes hold all that is not:

    keep     extra(k) + C(a + w, b, m - kept(k) - new X(a + w))           if both peaks of point k fit into m
    redo     forward seconds of a .. p - 1
             + C(p, b, m - new X(p)) + C(a, p, m)                          if running forward alone fits into m

Backward of a stage runs once, after those of all later stages, however the plan is nested. So the gradients that are
alive at a cut, of parameters and of what crosses it, depend on the cut alone and are added to the peaks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fxckpt.plan import Chain, Frontier, Graph, MenuPoint, Plan, Segment

__all__ = ["dp"]

Floats = Any  # arrays: numpy's types are not checked, see pyproject.toml
Ints = Any

GOLDEN = 0.6180339887498949


class _Costs(NamedTuple):
    """What the recurrence needs to know of the chain; bytes, and indexed by cuts.

    Attributes:
        seconds: time of forward up to a cut.
        boundary: ``boundary[a, p]`` are the storages of ``X(p)`` that are not in ``X(a)``.
        forward: ``forward[a, j]`` is the highest memory beyond ``X(a)`` while forward, started at ``a``, runs stage
            ``j`` and keeps nothing.
        gradients: alive when the backward of all later stages is done; 0 at the end in forward.
        tangents: gradients that come from outside.
        piled: parameter gradients of all later stages, if they live until their segment is done.
        results: results of the region created before a cut.
    """

    seconds: Floats
    boundary: Ints
    forward: Ints
    gradients: Ints
    tangents: int
    piled: Ints
    results: Ints


class _Move(NamedTuple):
    """Part of a plan: a window with a menu point, or a nested run of stages up to cut ``stop``."""

    start: int
    stop: int
    point: int
    inner: tuple[_Move, ...]


def dp(graph: Graph, chain: Chain, menus: Sequence[Sequence[MenuPoint]], slots: int = 0) -> Frontier:
    """Plans for all amounts of memory, the cheapest first; they do not depend on any budget.

    Memory is cut into ``slots`` (by default 500, fewer for long chains), once from nothing to what keeping
    everything takes and once more finely near the least that a plan can do with. Bytes are rounded to the nearest
    slot, so peaks are close but not exact: whoever chooses among the plans has to simulate them.
    O(L^2 (L + K) S) time and O(L^2 S) memory for L stages, K menu points per stage and S slots.

    Assumes that a stage's backward reads nothing of earlier stages that does not cross its first cut.
    """
    costs = _costs(graph, chain)
    count = len(chain.stages)
    solver = _Solver(costs, menus, slots or max(120, min(500, 32_000 // max(count, 1))))
    widest = tuple(_Move(a, a + 1, 0, ()) for a in range(count))
    top = solver.peak(widest, count)
    moves = {widest: None, **dict.fromkeys(solver.solve(top))}
    least = min(solver.peak(move, count) for move in moves)
    if least * 3 < top:
        moves.update(dict.fromkeys(solver.solve(least * 2)))
    rows = sorted((solver.price(move), solver.peak(move, count), index) for index, move in enumerate(moves))
    plans: list[Plan] = []
    names = [node.name for node in graph.nodes]
    lowest = None
    for price, peak, index in rows:
        if lowest is None or peak < lowest:
            lowest = peak
            segments = _segments(list(moves)[index], chain, menus, names)
            plans.append(Plan("dp", segments, extra_seconds=price))
    return Frontier(tuple(plans))


def _segments(
    moves: Sequence[_Move], chain: Chain, menus: Sequence[Sequence[MenuPoint]], names: Sequence[str]
) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for move in moves:
        start, stop = chain.stages[move.start].start, chain.stages[move.stop - 1].stop
        if move.inner:
            found.append(Segment(start, stop, inner=_segments(move.inner, chain, menus, names)))
        else:
            kept = menus[move.start][move.point].kept
            found.append(Segment(start, stop, tuple(names[value] for value in kept)))
    return tuple(found)


def _costs(graph: Graph, chain: Chain) -> _Costs:
    cuts = [0, *(stage.stop for stage in chain.stages)]
    count, size = len(cuts), len(graph.forward)
    cut_of = np.searchsorted(np.array(cuts), np.arange(size), side="right")  # first cut behind a position
    held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    runs = _runs(graph)
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, value in enumerate(graph.forward):
        for storage in graph.nodes[value].allocates:
            birth[storage] = last[storage] = position
        if value in runs:
            for read in graph.nodes[value].inputs:
                for storage in graph.nodes[read].storages:
                    last[storage] = position
    crossing: Any = np.zeros((count + 1, count), dtype=np.int64)
    results: Any = np.zeros(count, dtype=np.int64)
    for storage in birth:
        if storage in held:
            results[cut_of[birth[storage]] :] += graph.storage_bytes[storage]
    for cut, stage in enumerate(chain.stages, start=1):
        for storage in stage.boundary:
            if storage not in held:
                crossing[cut_of[birth[storage]], cut] += graph.storage_bytes[storage]
    boundary = np.cumsum(crossing[::-1], axis=0)[::-1][1:]  # born behind cut a, crossing cut p
    forward = _forward_peaks(graph, cuts, birth, last, held, runs)
    seconds: Any = np.zeros(count)
    for position, value in enumerate(graph.forward):
        if value in runs:
            seconds[cut_of[position]] += graph.nodes[value].seconds
    gradients, tangents, piled = _gradients(graph, cuts)
    return _Costs(np.cumsum(seconds), boundary, forward, gradients, tangents, piled, results)


def _runs(graph: Graph) -> set[int]:
    """Forward nodes that outputs and mutations need."""
    seen: set[int] = set()
    stack = [*graph.outputs, *graph.required]
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            stack += graph.nodes[value].inputs
    return seen


def _forward_peaks(
    graph: Graph, cuts: Sequence[int], birth: dict[int, int], last: dict[int, int], held: set[int], runs: set[int]
) -> Ints:
    """``[a, j]``: highest memory beyond ``X(a)`` while stage ``j`` runs in a forward that began at ``a``."""
    size = len(graph.forward)
    change: Any = np.zeros(size + 1, dtype=np.int64)
    extra: Any = np.zeros(size, dtype=np.int64)
    for position, value in enumerate(graph.forward):
        node = graph.nodes[value]
        if value not in runs:
            continue
        extra[position] = node.workspace_bytes
        for storage in node.allocates:
            if storage not in held:
                change[position] += graph.storage_bytes[storage]
                change[last[storage] + 1] -= graph.storage_bytes[storage]
        first = graph.nodes[node.inputs[0]].storages if node.inplace and node.inputs else ()
        if len(first) == 1 and first[0] in birth and last[first[0]] == position and first[0] not in held:
            extra[position] -= graph.storage_bytes[first[0]]
    live = np.cumsum(change)[:size] + extra
    peaks: Any = np.zeros((len(cuts), len(cuts) - 1), dtype=np.int64)
    for a, start in enumerate(cuts[:-1]):
        # What crosses cut a is counted as resident already, for as long as forward needs it.
        resident: Any = np.zeros(size + 1, dtype=np.int64)
        for storage, born in birth.items():
            if born < start <= last[storage] and storage not in held:
                resident[start] += graph.storage_bytes[storage]
                resident[last[storage] + 1] -= graph.storage_bytes[storage]
        beyond = live - np.cumsum(resident)[:size]
        for j in range(a, len(cuts) - 1):
            peaks[a, j] = beyond[cuts[j] : cuts[j + 1]].max()
    return peaks


def _gradients(graph: Graph, cuts: Sequence[int]) -> tuple[Ints, int, Ints]:
    """Bytes of gradients alive at each cut in backward, those from outside, and parameter gradients that pile up."""
    places = np.array(cuts)
    size = len(graph.forward)
    highest = [size if slot.tangent >= 0 else -1 for slot in graph.slots]
    lowest = list(highest)
    for grad in graph.grad_nodes:
        for slot, _ in grad.contributes:
            highest[slot] = max(highest[slot], grad.position)
            lowest[slot] = grad.position if lowest[slot] < 0 else min(lowest[slot], grad.position)
    alive: Any = np.zeros(len(cuts), dtype=np.int64)
    piled: Any = np.zeros(len(cuts), dtype=np.int64)
    for entry, high, low in zip(graph.slots, highest, lowest, strict=True):
        if high < 0 or entry.owner == -2:
            continue
        if entry.owner >= 0:
            alive += entry.bytes * ((graph.grad_nodes[entry.owner].position < places) & (places <= high))
        elif graph.fresh_gradients:
            alive += entry.bytes * (places <= high)
        else:
            alive += entry.bytes * ((low < places) & (places <= high))
            piled += entry.bytes * (places <= low)
    tangents = int(alive[-1])
    alive[-1] = 0
    return alive, tangents, piled


class _Solver:
    """The recurrence for one chain."""

    def __init__(self, costs: _Costs, menus: Sequence[Sequence[MenuPoint]], slots: int) -> None:
        self.costs, self.menus, self.slots = costs, menus, slots
        self.count = len(menus)

    def _needs(self, point: MenuPoint, a: int, ends: Ints) -> Ints:
        """Memory that the window needs when its context ends at one of ``ends``."""
        costs, stop = self.costs, a + point.stages
        whole = ends == self.count
        gradients = costs.gradients[stop] + (costs.tangents if stop == self.count else 0)
        backward = point.backward_peak_bytes + gradients + costs.results[-1]
        backward = backward + np.where(whole, 0, costs.piled[stop] - costs.piled[ends])
        results: Any = np.where(whole, costs.results[a], costs.results[-1])
        forward = point.forward_peak_bytes + costs.gradients[ends] + results
        return np.maximum(forward, backward)

    def _redo_needs(self, a: int, p: Ints, b: int) -> Ints:
        """Memory that forward from ``a`` to each of ``p`` needs when stages from ``b`` on are done."""
        costs = self.costs
        results = costs.results[p] if b == self.count else costs.results[-1]
        return np.maximum.accumulate(costs.forward[a, a : a + len(p)]) + costs.gradients[b] + results

    def _pile(self, p: Ints, b: int) -> Ints:
        costs = self.costs
        return costs.piled[p] - costs.piled[b] if b < self.count else np.zeros_like(p)

    def solve(self, top: int) -> list[tuple[_Move, ...]]:
        """The best plan for each of ``slots`` amounts of memory up to ``top`` bytes, if there is one."""
        count, slots = self.count, self.slots
        unit = max(top / slots, 1.0)
        value: Any = np.full((count + 1, count + 1, slots + 1), np.inf)
        choice: Any = np.zeros((count + 1, count + 1, slots + 1), dtype=np.int32)
        charges: dict[tuple[int, int], int] = {}
        value[np.arange(count + 1), np.arange(count + 1)] = 0.0
        for a in range(count - 1, -1, -1):
            for index, point in enumerate(self.menus[a]):
                stop = a + point.stages
                exact = (point.kept_bytes + int(self.costs.boundary[a, stop])) / unit
                # Rounded up or down in turn, so that the errors of neighbouring stages cancel.
                charge = charges[a, index] = int(exact + (a * GOLDEN + index * GOLDEN * GOLDEN) % 1.0)
                ends = np.arange(stop, count + 1)
                needs = np.ceil(self._needs(point, a, ends) / unit - 0.5).astype(np.int64)
                offer = np.full((len(ends), slots + 1), np.inf)
                if charge <= slots:
                    offer[:, charge:] = value[stop, stop:, : slots + 1 - charge] + point.extra_seconds
                offer[0] = point.extra_seconds
                offer[np.arange(slots + 1) < needs[:, None]] = np.inf
                better = offer < value[a, stop:]
                value[a, stop:][better] = offer[better]
                choice[a, stop:][better] = index
            self._redo(a, unit, value, choice)
        found: dict[tuple[_Move, ...], None] = {}
        for slot in range(slots, -1, -1):
            if np.isfinite(value[0, count, slot]):
                found[self._read(choice, charges, unit, 0, count, slot)] = None
        return list(found)

    def _redo(self, a: int, unit: float, value: Floats, choice: Ints) -> None:
        """Improve all ``C(a, b)`` by running forward up to some ``p`` and coming back to it later."""
        count, slots = self.count, self.slots
        shifts = self._shifts(a, unit)
        # right[i, b] is C(p, b) with the boundary at p = a + 1 + i stored
        right: Any = np.full((count - a - 1, count + 1 - a, slots + 1), np.inf)
        for index, shift in enumerate(shifts):
            if shift <= slots:
                right[index, index + 2 :, shift:] = value[a + 1 + index, a + 2 + index :, : slots + 1 - shift]
        grid = np.arange(slots + 1)
        for b in range(a + 2, count + 1):
            p = np.arange(a + 1, b)
            offer = right[: len(p), b - a] + (self.costs.seconds[p] - self.costs.seconds[a])[:, None]
            pile = np.rint(self._pile(p, b) / unit).astype(np.int64)
            if pile.any():
                index = grid[None, :] - pile[:, None]
                left = np.where(index >= 0, np.take_along_axis(value[a, a + 1 : b], np.maximum(index, 0), 1), np.inf)
            else:
                left = value[a, a + 1 : b]
            offer += left
            needs = np.ceil(self._redo_needs(a, p, b) / unit - 0.5)
            offer[grid < needs[:, None]] = np.inf
            best = offer.argmin(axis=0)
            least = offer[best, grid]
            better = least < value[a, b] * (1 - 1e-12)
            value[a, b][better] = least[better]
            choice[a, b][better] = -p[best[better]]

    def _shifts(self, a: int, unit: float) -> Ints:
        dither = (np.arange(a + 1, self.count) * GOLDEN) % 1.0
        return (self.costs.boundary[a, a + 1 : self.count] / unit + dither).astype(np.int64)

    def _read(
        self, choice: Ints, charges: dict[tuple[int, int], int], unit: float, a: int, b: int, slot: int
    ) -> tuple[_Move, ...]:
        """The plan that gave ``C(a, b, slot)``."""
        moves: list[_Move] = []
        while a < b:
            chosen = int(choice[a, b, slot])
            if chosen >= 0:
                stop = a + self.menus[a][chosen].stages
                moves.append(_Move(a, stop, chosen, ()))
                slot -= charges[a, chosen] if stop < b else 0
            else:
                stop = -chosen
                left = slot - int(np.rint(self._pile(np.array([stop]), b)[0] / unit))
                moves.append(_Move(a, stop, -1, self._read(choice, charges, unit, a, stop, left)))
                slot -= int(self._shifts(a, unit)[stop - a - 1])
            a = stop
        return tuple(moves)

    def peak(self, moves: Sequence[_Move], b: int) -> int:
        """Highest memory of a plan of stages up to ``b`` beyond what crosses its first cut, without rounding."""
        highest, stored = 0, 0
        for move in moves:
            a, stop = move.start, move.stop
            if move.inner:
                p = np.arange(a + 1, stop + 1)
                inner = self.peak(move.inner, stop) + int(self._pile(np.array([stop]), b)[0])
                needs = max(inner, int(self._redo_needs(a, p, b)[-1]))
                kept = 0
            else:
                point = self.menus[a][move.point]
                needs, kept = int(self._needs(point, a, np.array([b]))[0]), point.kept_bytes
            highest = max(highest, stored + needs)
            stored += kept + int(self.costs.boundary[a, stop])
        return highest

    def price(self, moves: Sequence[_Move]) -> float:
        """Extra seconds of a plan."""
        total = 0.0
        for move in moves:
            if move.inner:
                total += float(self.costs.seconds[move.stop] - self.costs.seconds[move.start]) + self.price(move.inner)
            else:
                total += self.menus[move.start][move.point].extra_seconds
        return total
