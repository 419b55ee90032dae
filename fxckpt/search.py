"""Candidate plans in order of their price, and the search for the cheapest one that fits."""

from __future__ import annotations

import copy
from typing import Any

from fxckpt.passes.schedule import schedule
from fxckpt.passes.simulate import simulate
from fxckpt.plan import Graph, Plan, Program, Timeline

__all__ = ["Candidate", "Search", "simulated"]


Candidate = tuple[Plan, Program, Timeline]


def simulated(graph: Graph, plan: Plan, tangents: frozenset[int], known: dict[Any, Any]) -> tuple[Program, Timeline]:
    """``plan`` lowered, and the timeline of that; ``known`` as for the schedule pass."""
    program = schedule(graph, plan, tangents, known)
    return program, simulate(graph, program, tangents)


class Search:
    """Finds the cheapest of the candidates that fits, simulating few of them.

    Candidates come cheapest first, and with falling price the simulated peak rises, all but exactly: the search halves
    the list and then looks at the neighbours on both sides. The last few candidates are always looked at before a
    budget is refused, so that the smallest peak among them is a budget that succeeds.
    """

    AROUND = 4
    LAST = 8

    def __init__(
        self, graph: Graph, plans: tuple[Plan, ...], tangents: frozenset[int], lowered: dict[Any, Any],
        ordered: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            graph: the joint graph with costs.
            plans: the candidates.
            tangents: slots of outputs that get a gradient.
            lowered: what the schedule pass knows of this graph.
            ordered: the cheapest comes first; else in no order.
        """
        self.graph, self.plans, self.tangents = graph, plans, tangents
        self.lowered, self.ordered = lowered, ordered
        self.programs: dict[int, Program] = {}
        self.known: dict[int, Candidate] = {}
        self.peaks: dict[int, int] = {}  # beyond what is fixed

    def at(self, index: int) -> Candidate:
        """Candidate ``index``, simulated."""
        if index not in self.known:
            plan = self.plans[index]
            if index not in self.programs:
                self.programs[index] = schedule(self.graph, plan, self.tangents, self.lowered)
            program = self.programs[index]
            self.give(index, (plan, program, simulate(self.graph, program, self.tangents)))
        return self.known[index]

    def give(self, index: int, candidate: Candidate) -> None:
        """Candidate ``index`` is known already."""
        self.programs[index], self.known[index] = candidate[1], candidate
        self.peaks[index] = candidate[2].peak_bytes - self.graph.fixed_bytes

    def at_sizes(self, graph: Graph) -> Search:
        """The same candidates for the same graph at other sizes."""
        return _Carried(graph, self)

    def rescored(self, graph: Graph) -> Search:
        """The same candidates for the same graph with other scratch memory."""
        other = copy.copy(self)
        other.graph, other.known, other.peaks = graph, {}, {}
        return other

    def fits(self, index: int, limit: int) -> bool:
        """Whether the peak of candidate ``index`` is at most ``limit`` bytes."""
        return self.at(index)[2].peak_bytes <= limit

    def first(self, _: int) -> Candidate:
        """The candidate that the strategy prefers."""
        return self.at(0)

    def cheapest_within(self, limit: int) -> Candidate | None:
        """The cheapest candidate found whose peak is at most ``limit`` bytes."""
        if self.ordered and self._first_fits(limit):
            return self.at(0)
        if not self.ordered:
            fitting = [self.at(index) for index in range(len(self.plans)) if self.fits(index, limit)]
            return min(fitting, key=lambda c: (c[2].recompute_seconds, c[2].peak_bytes), default=None)
        low, high = 0, len(self.plans)
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle, limit):
                high = middle
            else:
                low = middle + 1
        near = range(max(0, low - self.AROUND), min(len(self.plans), low + self.AROUND + 1))
        last = range(max(0, len(self.plans) - self.LAST), len(self.plans))
        for group in (near, last):
            fitting = [self.at(index) for index in group if self.fits(index, limit)]
            if fitting:
                return min(fitting, key=lambda c: (c[2].recompute_seconds, c[2].peak_bytes))
        return None

    def _first_fits(self, limit: int) -> bool:
        """Whether the first candidate has been simulated and fits."""
        return 0 in self.known and self.fits(0, limit)

    def smallest(self) -> Candidate:
        """The candidate with the smallest peak among the last ones (among all, if they come in no order)."""
        last = range(max(0, len(self.plans) - self.LAST) if self.ordered else 0, len(self.plans))
        return min((self.at(index) for index in last), key=lambda c: (c[2].peak_bytes, c[2].recompute_seconds))


class _Carried(Search):
    """A search that costs little: lowering a plan does not depend on sizes, and the first search lowered many."""

    LAST = 1
    WORTH = 0.02  # one more is lowered between two plans whose prices differ by this part of the plain step

    def __init__(self, graph: Graph, first: Search) -> None:
        super().__init__(graph, first.plans, first.tangents, first.lowered, first.ordered)
        self.programs, self.first_peaks = first.programs, {**first.peaks}

    def cheapest_within(self, limit: int) -> Candidate | None:
        """The cheapest candidate found whose peak is at most ``limit`` bytes, among those that were lowered before."""
        if not self.ordered or self._first_fits(limit):
            return super().cheapest_within(limit)
        lowered = sorted(self.programs)
        place = self._guess(lowered, limit)
        while place and self.fits(lowered[place - 1], limit):
            place -= 1
        while place < len(lowered) and not self.fits(lowered[place], limit):
            place += 1
        if place == len(lowered):
            return None
        low, high = lowered[place - 1] if place else 0, lowered[place]
        middle = (low + high) // 2
        if low < middle and self._price(high) - self._price(low) > self.WORTH and self.fits(middle, limit):
            return self.at(middle)
        return self.at(high)

    def _guess(self, lowered: list[int], limit: int) -> int:
        """Place of the first that may fit: peaks are taken to grow all alike, as that of a plan that is known does."""
        if lowered[0] not in self.first_peaks or not self.first_peaks[lowered[0]]:
            return 0
        self.at(lowered[0])
        growth = self.peaks[lowered[0]] / self.first_peaks[lowered[0]]
        room = (limit - self.graph.fixed_bytes) / growth
        return sum(self.first_peaks.get(index, 0) > room for index in lowered)

    def _price(self, index: int) -> float:
        timeline = self.at(index)[2]
        return timeline.recompute_seconds / timeline.plain_seconds


class Predicted(Search):
    """A search among plans made for these sizes, cheapest first, whose peaks are predicted well.

    The prediction is mended by what the last simulation was off, so that few plans are looked at.
    """

    LAST = 1
    MOST = 5
    WORTH = 0.002  # one more is looked at if it is cheaper by this part of the plain step

    def cheapest_within(self, limit: int) -> Candidate | None:
        """The cheapest candidate found whose peak is at most ``limit`` bytes."""
        best, off, low, high = None, 0, 0, len(self.plans)
        for _ in range(self.MOST):
            index = next((i for i in range(low, high) if self.plans[i].peak_bytes + off <= limit), None)
            if index is None:
                if best is not None or low == high:
                    break
                index = high - 1
            if best is not None:
                cheaper = self.plans[high].extra_seconds - self.plans[index].extra_seconds
                if cheaper < self.WORTH * best[2].plain_seconds:
                    break
            candidate = self.at(index)
            off = candidate[2].peak_bytes - self.plans[index].peak_bytes
            if candidate[2].peak_bytes <= limit:
                best, high = candidate, index
            else:
                low = index + 1
        return best
