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
        pinned: what cannot be recomputed, created before a cut.
        forward: ``forward[a, j]`` is the highest memory beyond ``X(a)`` while forward, started at ``a``, runs stage
            ``j`` and keeps nothing.
        gradients: alive when the backward of all later stages is done; 0 at the end in forward.
        tangents: gradients that come from outside.
        piled: ``piled[b, p]`` are gradients that a segment ending at cut ``b`` holds when it has come back to cut
            ``p``, although nothing reads them any more: those it was given, and those it will return when it is done.
        results: results of the region created before a cut.
    """

    seconds: Floats
    boundary: Ints
    pinned: Ints
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

    Memory is cut into ``slots`` (by default 600, fewer for long chains), once from nothing to what keeping
    everything takes and once more finely near the least that a plan can do with. Bytes are rounded to the nearest
    slot, so peaks are close but not exact: whoever chooses among the plans has to simulate them.
    O(L^2 (L + K) S) time and O(L^2 S) memory for L stages, K menu points per stage and S slots.

    Assumes that a stage's backward reads nothing of earlier stages that does not cross its first cut.
    """
    costs = _costs(graph, chain)
    count = len(chain.stages)
    solver = _Solver(costs, menus, slots or max(200, min(600, 60_000 // max(count, 1))))
    widest = tuple(_Move(a, a + 1, 0, ()) for a in range(count))
    top = solver.peak(widest, count)
    moves = {widest: None, **dict.fromkeys(solver.solve(top))}
    least = min(solver.peak(move, count) for move in moves)
    if least * 3 < top:
        moves.update(dict.fromkeys(solver.solve(least * 2)))
    ranked = ((max(solver.price(move, count), 0.0), solver.peak(move, count)) for move in moves)
    rows = sorted((price, peak, index) for index, (price, peak) in enumerate(ranked))
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
    cut_of: Any = np.searchsorted(np.array(cuts), np.arange(size), side="right")  # first cut behind a position
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
    pinned: Any = np.zeros(count, dtype=np.int64)
    for storage, position in birth.items():
        kind = results if storage in held else pinned
        if storage in held or not graph.nodes[graph.forward[position]].recomputable:
            kind[cut_of[position] :] += graph.storage_bytes[storage]
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
    return _Costs(np.cumsum(seconds), boundary, pinned, forward, gradients, tangents, piled, results)


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
    """Gradients alive at each cut in backward, those from outside, and those that segments hold on to."""
    places = np.array(cuts)
    alive: dict[object, Any] = {}  # what holds a gradient: its bytes at each cut
    piled: Any = np.zeros((len(cuts), len(cuts)), dtype=np.int64)
    for slot, held in enumerate(_holders(graph)):
        owner = graph.slots[slot].owner
        if not held or owner < -1:
            continue
        # Consumed below the owner; a leaf's stays, or is added to the old one when its last part has come.
        end = graph.grad_nodes[owner].position if owner >= 0 else -1 if graph.fresh_gradients else held[-1][0]
        for (high, key, size), low in zip(held, [*(entry[0] for entry in held[1:]), end], strict=True):
            there = (max(low, end) < places) & (places <= high)
            alive[key] = np.maximum(alive.get(key, 0), size * there)
            if owner >= 0:
                piled[there] += size * (places <= end)
        if owner < 0 and not graph.fresh_gradients:
            piled[places > end] += held[-1][2] * (places <= end)
    total: Any = sum(alive.values(), np.zeros(len(cuts), dtype=np.int64))
    tangents = int(total[-1])
    total[-1] = 0
    piled[-1] = 0  # the whole is not a segment
    return total, tangents, piled


def _holders(graph: Graph) -> list[list[tuple[int, object, int]]]:
    """For each slot ``(position, key, bytes)``: what holds its total at cuts from there down to the next entry.

    The engine adds a further contribution in place, unless the memory is shared with another gradient.
    """
    found: list[list[tuple[int, object, int]]] = [[] for _ in graph.slots]
    users: dict[object, set[int]] = {}

    def hold(slot: int, place: int, key: object, size: int) -> None:
        found[slot].append((place, key, size))
        users.setdefault(key, set()).add(slot)

    for slot, entry in enumerate(graph.slots):
        if entry.tangent >= 0:
            hold(slot, len(graph.forward), ("tangent", slot), entry.bytes)
    for grad in graph.grad_nodes:
        for slot, value in grad.contributes:
            place, alone, size = grad.position, ("sum", slot), graph.slots[slot].bytes
            if found[slot]:
                last, key, _ = found[slot][-1]
                if len(users[key]) > 1:
                    users[key].discard(slot)
                    hold(slot, min(place, last), alone, size)
            elif value >= len(graph.nodes) and found[value - len(graph.nodes)]:
                hold(slot, place, *found[value - len(graph.nodes)][-1][1:])
            elif value < len(graph.nodes) and graph.nodes[value].storages:
                storage = graph.nodes[value].storages[0]  # a view keeps all of the memory that it shows a part of
                hold(slot, place, ("storage", storage), graph.storage_bytes[storage])
            else:
                hold(slot, place, alone, size)
        for slot in grad.reads:
            for _, key, _ in found[slot][-1:]:
                users[key].discard(slot)
    return found


class _Solver:
    """The recurrence for one chain.

    Attributes:
        value: ``value[a, b, m]`` is ``C(a, b, m)``, with ``m`` in units of ``unit`` bytes.
        choice: the number of the menu point that gave it, or ``-p`` for a nested run up to cut ``p``.
        charges: units that a menu point takes until its backward, by stage and point.
    """

    def __init__(self, costs: _Costs, menus: Sequence[Sequence[MenuPoint]], slots: int) -> None:
        self.costs, self.menus, self.slots = costs, menus, slots
        self.count, self.aim = len(menus), slots
        self.ends: Any = np.arange(self.count + 1)

    def solve(self, top: int) -> list[tuple[_Move, ...]]:
        """The best plan for each of ``slots`` amounts of memory up to ``top`` bytes, if there is one."""
        self.unit = self._best_unit(top)
        self.slots = slots = -int(-top // self.unit)
        self.grid: Any = np.arange(slots + 1)
        count = self.count
        self.value: Any = np.full((count + 1, count + 1, slots + 1), np.inf, dtype=np.float32)
        self.value[self.ends, self.ends] = 0.0
        self.choice: Any = np.zeros((count + 1, count + 1, slots + 1), dtype=np.int32)
        self.charges: list[list[int]] = [[] for _ in range(count)]
        stored = self.costs.boundary + np.maximum(self.costs.pinned - self.costs.pinned[:, None], 0)
        self.shifts = self._rounded(stored, np.arange(count + 1) * GOLDEN % 1.0)
        self.piles: Any = self._rounded(self.costs.piled, 0.5)
        for a in range(count - 1, -1, -1):
            for index in range(len(self.menus[a])):
                self._keep(a, index)
            costly = (self.value[a] > self.value[a, :, -1:]).sum(axis=1)  # slots below which memory is worth something
            for p in range(a + 1, count):
                self._redo(a, p, int(costly[p + 1 :].max()))
        amounts = [slot for slot in range(slots, -1, -1) if np.isfinite(self.value[0, count, slot])]
        return list(dict.fromkeys(self._read(0, count, slot) for slot in amounts))

    def _best_unit(self, top: int) -> float:
        """A size of slots near ``top / aim`` of which most charges are nearly multiples: models repeat few sizes."""
        units = top / self.aim * np.linspace(0.75, 1.25, 201)
        charges = [
            point.kept_bytes + int(self.costs.boundary[a, a + point.stages])
            for a, points in enumerate(self.menus)
            for point in points
        ]
        sizes, counts = np.unique(charges, return_counts=True)
        parts = sizes / np.maximum(units, 1.0)[:, None]
        return float(np.maximum(units, 1.0)[(np.abs(parts - np.rint(parts)) * counts).sum(axis=1).argmin()])

    def _rounded(self, size: Any, offset: Any) -> Any:
        """Bytes in units. With offsets from 0 to 1 that differ from cut to cut, errors along the chain cancel."""
        return np.floor(np.asarray(size) / self.unit + offset).astype(np.int64)

    def _needs(self, a: int, point: MenuPoint, b: Any) -> Any:
        """Memory that the window needs when its context ends at ``b``."""
        costs, stop = self.costs, a + point.stages
        gradients = costs.gradients[stop] + (costs.tangents if stop == self.count else 0)
        backward = point.backward_peak_bytes + gradients + costs.results[-1] + costs.piled[b, stop]
        results = np.where(b == self.count, costs.results[a], costs.results[-1])
        return np.maximum(point.forward_peak_bytes + costs.gradients[b] + results, backward)

    def _forward_needs(self, a: int, p: int, b: Any) -> Any:
        """Memory that running forward from ``a`` to ``p`` needs when stages from ``b`` on are done."""
        results = np.where(b == self.count, self.costs.results[p], self.costs.results[-1])
        return self.costs.forward[a, a:p].max() + self.costs.gradients[b] + results

    def _offer(self, a: int, first: int, low: int, offer: Any, needs: Any, chosen: int) -> None:
        """Take ``offer`` for ``C(a, b, m)``, ``b`` from ``first`` and ``m`` from ``low`` on, where it is better."""
        span = slice(low, low + offer.shape[1])
        target = self.value[a, first:, span]
        better = offer * np.float32(1 + 1e-6) < target
        better &= self.grid[span] >= self._rounded(needs, 0.5)[:, None]
        np.copyto(target, offer, where=better)
        np.copyto(self.choice[a, first:, span], chosen, where=better)

    def _keep(self, a: int, index: int) -> None:
        """Treat the window as menu point ``index`` says."""
        point = self.menus[a][index]
        stop = a + point.stages
        kept = point.kept_bytes + int(self.costs.boundary[a, stop])
        charge = int(self._rounded(kept, (a * GOLDEN + index * GOLDEN**2) % 1.0))
        self.charges[a].append(charge)
        needs = self._needs(a, point, self.ends[stop:])
        last: Any = np.full((1, self.slots + 1), self._extra(point, stop, stop), dtype=np.float32)
        target, choice = self.value[a, stop], self.choice[a, stop]
        better = (last[0] < target) & (self.grid >= self._rounded(needs[0], 0.5))
        np.copyto(target, last[0], where=better)
        np.copyto(choice, index, where=better)
        if stop < self.count and charge <= self.slots:
            behind = self.value[stop, stop + 1 :, : self.slots + 1 - charge]
            self._offer(a, stop + 1, charge, behind + np.float32(point.extra_seconds), needs[1:], index)

    def _extra(self, point: MenuPoint, stop: int, b: int) -> float:
        """Extra time of a menu point; the last window of a nested run need not make what nobody reads again."""
        return point.extra_seconds - (point.idle_seconds if stop == b < self.count else 0.0)

    def _redo(self, a: int, p: int, high: int) -> None:
        """Run forward from ``a`` to ``p`` keeping nothing, and come back to it later; for slots below ``high``."""
        left, shift = self.value[a, p], int(self.shifts[a, p])
        if shift >= high or not np.isfinite(left[high - 1]):
            return
        piles = self.piles[p + 1 :, p]
        pad = int(piles.max())
        padded = np.concatenate([np.full(pad, np.inf, dtype=np.float32), left])
        left = padded[self.grid[shift:high] + pad - piles[:, None]] if pad else left[shift:high]
        seconds = np.float32(self.costs.seconds[p] - self.costs.seconds[a])
        offer = self.value[p, p + 1 :, : high - shift] + left + seconds
        self._offer(a, p + 1, shift, offer, self._forward_needs(a, p, self.ends[p + 1 :]), -p)

    def _read(self, a: int, b: int, slot: int) -> tuple[_Move, ...]:
        """The plan that gave ``C(a, b, slot)``."""
        moves: list[_Move] = []
        while a < b:
            chosen = int(self.choice[a, b, slot])
            if chosen >= 0:
                stop = a + self.menus[a][chosen].stages
                moves.append(_Move(a, stop, chosen, ()))
                slot -= self.charges[a][chosen] if stop < b else 0
            else:
                stop = -chosen
                inner = self._read(a, stop, slot - int(self.piles[b, stop]))
                moves.append(_Move(a, stop, -1, inner))
                slot -= int(self.shifts[a, stop])
            a = stop
        return tuple(moves)

    def peak(self, moves: Sequence[_Move], b: int) -> int:
        """Highest memory of a plan of stages up to ``b`` beyond what crosses its first cut, without rounding."""
        highest, stored = 0, 0
        for move in moves:
            a, stop = move.start, move.stop
            if move.inner:
                kept = int(self.costs.pinned[stop] - self.costs.pinned[a])
                inner = self.peak(move.inner, stop) + int(self.costs.piled[b, stop])
                needs = max(inner, int(self._forward_needs(a, stop, b)))
            else:
                point = self.menus[a][move.point]
                needs, kept = int(self._needs(a, point, b)), point.kept_bytes
            highest = max(highest, stored + needs)
            stored += kept + int(self.costs.boundary[a, stop])
        return highest

    def price(self, moves: Sequence[_Move], b: int) -> float:
        """Extra seconds of a plan of stages up to ``b``."""
        total = 0.0
        for move in moves:
            if move.inner:
                total += float(self.costs.seconds[move.stop] - self.costs.seconds[move.start])
                total += self.price(move.inner, move.stop)
            else:
                total += self._extra(self.menus[move.start][move.point], move.stop, b)
        return total
