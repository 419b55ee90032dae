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

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fxckpt.chain_costs import ChainCosts, chain_costs
from fxckpt.plan import Chain, Frontier, Graph, MenuPoint, Plan, Segment

__all__ = ["dp"]


STEPS = 100  # at most so many plans below the last one of the recurrence
GOLDEN = 0.6180339887498949
ENOUGH = 0.8  # of the memory; plans for less are not needed if peaks come out as predicted
MOST_SECONDS = np.float32(1e30)  # more than any plan takes, less than what cannot be done


class _Move(NamedTuple):
    """Part of a plan: a window with a menu point, or a nested run of stages up to cut ``stop``."""

    start: int
    stop: int
    point: int
    inner: tuple[_Move, ...]


def dp(
    graph: Graph, chain: Chain, menus: Sequence[Sequence[MenuPoint]], slots: int = 0, most_bytes: int | None = None,
    nested: bool = True,
) -> Frontier:  # fmt: skip
    """Plans for all amounts of memory, the cheapest first; they do not depend on any budget.

    Memory is cut into ``slots`` (by default 600, fewer for long chains), once from nothing to what keeping
    everything takes and once more finely near the least that a plan can do with. Bytes are rounded to the nearest
    slot, so peaks are close but not exact: whoever chooses among the plans has to simulate them.
    O(L^2 (L + K) S) time and O(L^2 S) memory for L stages, K menu points per stage and S slots.

    With ``most_bytes`` there are only plans for this much memory, or a little less, from one solution. Without
    ``nested`` no plan runs forward twice to a later cut, which takes O(L K S) time.

    Assumes that a stage's backward reads nothing of earlier stages that does not cross its first cut.
    """
    costs = chain_costs(graph, chain)
    count = len(chain.stages)
    # The streams as the region found them are kept for double backward.
    always = graph.fixed_bytes + (graph.state_bytes if any(graph.nodes[v].random for v in graph.forward) else 0)
    solver = _Solver(costs, menus, slots or max(200, min(600, 60_000 // max(count, 1))), nested)
    if most_bytes is None:
        moves = _all_plans(solver)
    else:
        room = max(most_bytes - always, 1)
        moves = dict.fromkeys(solver.solve(min(room, solver.peak(solver.widest, count)), ENOUGH))
    ranked = ((max(solver.price(move, count), 0.0), solver.peak(move, count)) for move in moves)
    rows = sorted((price, peak, index) for index, (price, peak) in enumerate(ranked))
    plans: list[Plan] = []
    names = [node.name for node in graph.nodes]
    lowest = None
    for price, peak, index in rows:
        if lowest is None or peak < lowest:
            lowest = peak
            segments = _segments(list(moves)[index], chain, menus, names)
            plans.append(Plan("dp", segments, peak_bytes=peak + always, extra_seconds=price))
    return Frontier(tuple(plans))


def _all_plans(solver: _Solver) -> dict[tuple[_Move, ...], None]:
    """Plans for amounts of memory from the least that will do to what keeping everything takes."""
    widest, count = solver.widest, solver.count
    top = solver.peak(widest, count)
    moves = {widest: None, **dict.fromkeys(solver.solve(top))}
    least = min(solver.peak(move, count) for move in moves)
    if least * 3 < top:
        moves.update(dict.fromkeys(solver.solve(least * 2)))
    smallest = min(moves, key=lambda move: (solver.peak(move, count), solver.price(move, count)))
    moves.update(dict.fromkeys(solver.descend(smallest)))
    return moves


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


class _Solver:
    """The recurrence for one chain.

    Attributes:
        value: ``value[a, b, m]`` is ``C(a, b, m)``, with ``m`` in units of ``unit`` bytes.
        choice: the number of the menu point that gave it, or ``-p`` for a nested run up to cut ``p``.
        charges: units that a menu point takes until its backward, by stage and point.
    """

    def __init__(self, costs: ChainCosts, menus: Sequence[Sequence[MenuPoint]], slots: int, nested: bool) -> None:
        self.costs, self.menus, self.slots, self.nested = costs, menus, slots, nested
        self.count, self.aim = len(menus), slots
        self.ends: Any = np.arange(self.count + 1)
        self.needs: dict[tuple[int, int, int, int], int] = {}
        self.widest = tuple(_Move(a, a + 1, 0, ()) for a in range(self.count))

    def solve(self, top: int, least: float = 0.0) -> list[tuple[_Move, ...]]:
        """The best plan for each of ``slots`` amounts of memory up to ``top`` bytes, if there is one.

        With ``least`` only those for at least this part of ``top``, if there are any.
        """
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
            self._keep(a)
            if not self.nested:
                continue
            best = np.minimum(self.value[a, :, -1:], MOST_SECONDS)
            costly = (self.value[a] > best).sum(axis=1)  # slots below which memory is worth something
            useful = np.maximum.accumulate(costly[::-1])[::-1].tolist()
            needs = self._rounded(self._forward_needs(a), 0.5)
            for p in range(a + 1, count):
                self._redo(a, p, useful[p + 1], needs[p - a - 1, p + 1 :])
        amounts = np.flatnonzero(np.isfinite(self.value[0, count]))[::-1]
        amounts = amounts[: max(int((amounts >= least * slots).sum()), 1)].tolist()
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

    def _needs(self, points: Sequence[MenuPoint], a: int, stop: int) -> Any:
        """Bytes that each point of the window from ``a`` to ``stop`` needs, by point and by where its context ends."""
        costs, ends = self.costs, self.ends[stop:]
        gradients = costs.gradients[stop] + (costs.tangents if stop == self.count else 0)
        results = np.full(len(ends), costs.results[-1])
        results[-1] = costs.results[a] + costs.passing[a]  # the context ends with the region: this is forward proper
        forward = np.array([point.forward_peak_bytes for point in points])[:, None] + costs.gradients[ends] + results
        backward = np.array([point.backward_peak_bytes for point in points])[:, None] + costs.piled[ends, stop]
        return np.maximum(forward, backward + gradients + costs.results[-1])

    def _forward_needs(self, a: int) -> Any:
        """Bytes that running forward from ``a`` to each later cut needs, by cut and by where the context ends."""
        costs = self.costs
        highest = np.maximum.accumulate(costs.forward[a, a:])
        results = np.full((len(highest), self.count + 1), costs.results[-1])
        results[:, -1] = costs.results[a + 1 :] + costs.passing[a + 1 :]
        return highest[:, None] + costs.gradients + results

    def _offer(self, a: int, first: int, low: int, offer: Any, needs: Any, chosen: int) -> None:
        """Take ``offer`` for ``C(a, b, m)``, ``b`` from ``first`` and ``m`` from ``low`` on, where it is better.

        ``needs`` is the memory in units that it takes for each ``b``.
        """
        span = slice(low, low + offer.shape[1])
        target = self.value[a, first:, span]
        better = offer * np.float32(1 + 1e-6) < target
        better &= self.grid[span] >= needs[:, None]
        np.copyto(target, offer, where=better)
        np.copyto(self.choice[a, first:, span], chosen, where=better)

    def _keep(self, a: int) -> None:
        """Treat each window that starts with ``a`` as its menu points say."""
        points = self.menus[a]
        kept = [point.kept_bytes + int(self.costs.boundary[a, a + point.stages]) for point in points]
        charges = self._rounded(kept, (a * GOLDEN + np.arange(len(points)) * GOLDEN**2) % 1.0).tolist()
        self.charges[a] = charges
        for stages in sorted({point.stages for point in points}):
            stop = a + stages
            members = [index for index, point in enumerate(points) if point.stages == stages]
            needs = self._rounded(self._needs([points[index] for index in members], a, stop), 0.5)
            if self.nested or stop == self.count:
                last = np.array([self._extra(points[index], stop, stop) for index in members], dtype=np.float32)
                self._choose(a, stop, last[:, None], needs[:, :1], members)
            if not self.nested and stop < self.count:
                self._choose(a, self.count, self._behind(stop, points, charges, members), needs[:, -1:], members)
                continue
            for index, point_needs in zip(members, needs, strict=True):
                charge = charges[index]
                if stop < self.count and charge <= self.slots:
                    behind = self.value[stop, stop + 1 :, : self.slots + 1 - charge]
                    offer = behind + np.float32(points[index].extra_seconds)
                    self._offer(a, stop + 1, charge, offer, point_needs[1:], index)

    def _behind(self, stop: int, points: Sequence[MenuPoint], charges: Sequence[int], members: Sequence[int]) -> Any:
        """Extra time of points and of all that comes after them, by point and slot."""
        padded: Any = np.append(self.value[stop, self.count], np.float32(np.inf))  # the last one for less than nothing
        extra = np.array([points[index].extra_seconds for index in members], dtype=np.float32)
        left = self.grid - np.array([charges[index] for index in members])[:, None]
        return padded[np.maximum(left, -1)] + extra[:, None]

    def _choose(self, a: int, b: int, offers: Any, needs: Any, members: Sequence[int]) -> None:
        """Take the best of ``offers``, by point and slot, for ``C(a, b, m)`` where one is better."""
        possible: Any = np.where(self.grid >= needs, offers, np.float32(np.inf))
        best = possible.argmin(axis=0)
        better = possible[best, self.grid] < self.value[a, b]
        np.copyto(self.value[a, b], possible[best, self.grid], where=better)
        np.copyto(self.choice[a, b], np.array(members)[best], where=better)

    def _extra(self, point: MenuPoint, stop: int, b: int) -> float:
        """Extra time of a menu point; the last window of a nested run need not make what nobody reads again."""
        return point.extra_seconds - (point.idle_seconds if stop == b < self.count else 0.0)

    def _redo(self, a: int, p: int, high: int, needs: Any) -> None:
        """Run forward from ``a`` to ``p`` keeping nothing, and come back to it later; for slots below ``high``."""
        left, shift = self.value[a, p], int(self.shifts[a, p])
        if shift >= high or left[high - 1] == np.inf:
            return
        piles = self.piles[p + 1 :, p]
        pad = int(piles.max())
        if pad:
            padded = np.concatenate([np.full(pad, np.inf, dtype=np.float32), left])
            left = padded[self.grid[shift:high] + pad - piles[:, None]]
        else:
            left = left[shift:high]
        offer = self.value[p, p + 1 :, : high - shift] + left
        offer += np.float32(self.costs.seconds[p] - self.costs.seconds[a])
        self._offer(a, p + 1, shift, offer, needs, -p)

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
            needs = self._needs_of(move, b)
            if move.inner:
                needs = max(needs, self.peak(move.inner, move.stop) + int(self.costs.piled[b, move.stop]))
            highest = max(highest, stored + needs)
            stored += self._charge(move)
        return highest

    def _needs_of(self, move: _Move, b: int) -> int:
        """Bytes that a window, or the run forward of a nested run, needs in a context that ends at ``b``."""
        key = move.start, move.stop, move.point, b
        if key not in self.needs:
            a, stop = move.start, move.stop
            if move.inner:
                self.needs[key] = int(self._forward_needs(a)[stop - a - 1, b])
            else:
                self.needs[key] = int(self._needs([self.menus[a][move.point]], a, stop)[0, b - stop])
        return self.needs[key]

    def descend(self, moves: tuple[_Move, ...]) -> Iterator[tuple[_Move, ...]]:
        """Plans with ever smaller peaks, each with one menu point changed.

        The amounts of memory that the recurrence tells apart are rounded sums. Where another part of the plan stands in
        the way of smaller amounts, the peak of the last plan may lie a few units above what they are good for.
        """
        known: dict[_Move, tuple[int, int, float]] = {}
        for _ in range(STEPS):
            lower = self._step_down(moves, known)
            if lower is None:
                return
            moves = lower
            yield moves

    def _step_down(
        self, moves: tuple[_Move, ...], known: dict[_Move, tuple[int, int, float]]
    ) -> tuple[_Move, ...] | None:
        """``moves`` with the one change that lowers the peak for the least time per byte; None if none does."""

        def figures(move: _Move) -> tuple[int, int, float]:
            if move not in known:
                alone = (move,)
                known[move] = self.peak(alone, self.count), self._charge(move), self.price(alone, self.count)
            return known[move]

        stored = list(itertools.accumulate((figures(move)[1] for move in moves), initial=0))
        levels = [place + figures(move)[0] for place, move in zip(stored, moves, strict=False)]
        before = list(itertools.accumulate(levels, max, initial=0))
        behind = list(itertools.accumulate(reversed(levels), max, initial=0))[::-1]
        found: list[tuple[float, int, _Move]] = []
        for index, move in enumerate(moves[: levels.index(max(levels)) + 1]):
            for point, entry in () if move.inner else enumerate(self.menus[move.start]):
                if move.start + entry.stages == move.stop and point != move.point:
                    other = move._replace(point=point)
                    (_, charge, price), (needs, other_charge, other_price) = figures(move), figures(other)
                    after = behind[index + 1] - (charge - other_charge)
                    gain = before[-1] - max(before[index], stored[index] + needs, after)
                    if gain > 0:
                        found.append(((other_price - price) / gain, index, other))
        if not found:
            return None
        _, index, other = min(found)
        return (*moves[:index], other, *moves[index + 1 :])

    def _charge(self, move: _Move) -> int:
        """Bytes that a part of a plan holds on to while what comes behind it runs."""
        if move.inner:
            kept = int(self.costs.pinned[move.stop] - self.costs.pinned[move.start])
        else:
            kept = self.menus[move.start][move.point].kept_bytes
        return kept + int(self.costs.boundary[move.start, move.stop])

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
