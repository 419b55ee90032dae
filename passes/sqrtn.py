"""Segments of equal size, recomputed: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

With n equal layers and k segments, n / k layers are alive while a segment is recomputed and k boundaries are kept, so
that k = sqrt(n) needs O(sqrt(n)) memory for one more forward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from fxckpt.plan import Chain, Frontier, Graph, Plan, Segment

__all__ = ["sqrtn"]


def sqrtn(graph: Graph, chain: Chain) -> Frontier:
    """Plans with 1 to n segments, the one with about sqrt(n) first, where n is the number of stages.

    Segments hold about the same number of bytes. All but the last keep nothing inside but what cannot be recomputed;
    the last keeps all that backward reads, which comes right after it. The first plan is the one to take without a
    budget; with one, the cheapest of those that fit.
    O(n) plans, each found in the time of one walk over the graph.
    """
    count = len(chain.stages)
    preferred = max(1, round(math.sqrt(count)))
    segments = _Segments(graph, chain)
    partitions = [segments.partition(number) for number in (preferred, *range(1, count + 1))]
    return Frontier(tuple(segments.plan(partition) for partition in dict.fromkeys(partitions)))


class _Segments:
    """Segments of the chain and what each has to keep."""

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self.graph = graph
        self.chain = chain
        self.place = {value: position for position, value in enumerate(graph.forward)}
        self.makers: dict[int, int] = {}
        self.keepers: dict[int, int] = {}
        for value in graph.forward:
            for storage in graph.nodes[value].allocates:
                self.makers.setdefault(storage, value)
            if not graph.nodes[value].container:
                for storage in graph.nodes[value].storages:
                    self.keepers.setdefault(storage, value)
        self.reads: list[list[int]] = [[] for _ in graph.forward]
        for grad in graph.grad_nodes:
            for value in grad.nodes:
                self.reads[grad.position] += self._storages(graph.nodes[value].inputs)
        self.known: dict[tuple[int, int], tuple[Segment, float]] = {}

    def _storages(self, values: Iterable[int]) -> list[int]:
        nodes = self.graph.nodes
        return [storage for value in values if value < len(nodes) for storage in nodes[value].storages]

    def partition(self, number: int) -> tuple[int, ...]:
        """Numbers of the stages with which up to ``number`` segments of about equal bytes end."""
        grown = [0]
        for stage in self.chain.stages:
            created = self._created(stage.start, stage.stop)
            grown.append(grown[-1] + created)
        ends: list[int] = []
        for index in range(1, number):
            aim = grown[-1] * index / number
            right = bisect_left(grown, aim)
            nearer = right if right < len(grown) and grown[right] - aim <= aim - grown[right - 1] else right - 1
            ends.append(nearer)
        return tuple(sorted({end for end in ends if 0 < end < len(self.chain.stages)} | {len(self.chain.stages)}))

    def _created(self, start: int, stop: int) -> int:
        values = self.graph.forward[start:stop]
        return sum(self.graph.storage_bytes[s] for value in values for s in self.graph.nodes[value].allocates)

    def plan(self, ends: Sequence[int]) -> Plan:
        """The plan whose segments end with these stages."""
        pairs = [self._segment(first, last) for first, last in zip((0, *ends), ends, strict=False)]
        return Plan("sqrtn", tuple(segment for segment, _ in pairs), extra_seconds=sum(price for _, price in pairs))

    def _segment(self, first: int, last: int) -> tuple[Segment, float]:
        """Stages ``first`` to ``last`` (exclusive) as one segment, and the time that recomputing it takes."""
        if (first, last) not in self.known:
            start, end = self.chain.stages[first].start, self.chain.stages[last - 1]
            kept, price = self._kept(start, end.stop, set(end.boundary), whole=last == len(self.chain.stages))
            names = tuple(self.graph.nodes[value].name for value in kept)
            self.known[first, last] = Segment(start, end.stop, names), price
        return self.known[first, last]

    def _kept(self, start: int, stop: int, boundary: set[int], whole: bool) -> tuple[list[int], float]:
        """Values to keep: results that leave, what cannot be recomputed, with ``whole`` all that backward reads."""
        nodes = self.graph.nodes
        stack = [storage for position in range(start, stop) for storage in self.reads[position]]
        seen: set[int] = set()
        kept: list[int] = []
        again: set[int] = set()
        while stack:
            storage = stack.pop()
            maker = self.makers.get(storage, -1)
            if storage in seen or maker < 0 or not start <= self.place[maker] < stop:
                continue
            seen.add(storage)
            keeper = self.keepers.get(storage, maker)
            leaves = whole or storage in boundary
            if not nodes[maker].recomputable or (leaves and nodes[keeper].keepable):
                kept.append(keeper)
            elif maker not in again:
                again.add(maker)
                stack += self._storages(nodes[maker].inputs)
        return sorted(kept, key=self.place.__getitem__), sum(nodes[value].seconds for value in sorted(again))
