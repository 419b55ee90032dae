"""Menus at other sizes of the inputs, in proportion to how memory and time of their windows have grown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fxckpt.plan import Chain, Graph, MenuPoint

__all__ = ["resized_menus"]


def resized_menus(
    before: Graph, after: Graph, chain: Chain, menus: Sequence[Sequence[MenuPoint]]
) -> tuple[tuple[MenuPoint, ...], ...]:
    """``menus`` of ``before`` for ``after``, the same graph at other sizes.

    What is kept stays the same; its bytes are exact. Times grow like that of the window's forward, peaks but for the
    gradients of parameters like all memory that the window creates: whoever chooses among plans has to simulate them.

    Args:
        before: the graph that the menus were made for.
        after: the graph at other sizes.
        chain: the stages of both.
        menus: points of the windows that start with each stage.
    """
    old, new = _Sums(before), _Sums(after)
    grown = [wide - narrow for narrow, wide in zip(before.storage_bytes, after.storage_bytes, strict=True)]
    made = {storage: i for i, value in enumerate(after.forward) for storage in after.nodes[value].allocates}
    kept_storages = {v: [s for s in after.nodes[v].storages if s in made and grown[s]] for v in after.forward}
    result: list[tuple[MenuPoint, ...]] = []
    for first, points in enumerate(menus):
        start = chain.stages[first].start
        resized: list[MenuPoint] = []
        growth: dict[int, tuple[float, float, frozenset[int]]] = {}
        for point in points:
            if point.stages not in growth:
                end = chain.stages[first + point.stages - 1]
                ratios = old.ratios(new, start, end.stop)
                growth[point.stages] = *ratios, frozenset(end.boundary)
            seconds, memory, boundary = growth[point.stages]
            more = sum(
                grown[storage]
                for value in point.kept
                for storage in kept_storages[value]
                if made[storage] >= start and storage not in boundary
            )
            moments = tuple([(round(growing * memory), fixed) for growing, fixed in point.moments])
            resized.append(
                MenuPoint(
                    point.kept, point.kept_bytes + more, point.extra_seconds * seconds,
                    round(point.forward_peak_bytes * memory), max(map(sum, moments)), point.stages,
                    point.idle_seconds * seconds, moments,
                )
            )  # fmt: skip
        result.append(tuple(resized))
    return tuple(result)


class _Sums:
    """Seconds and bytes of all positions before each position, without gradients of parameters."""

    def __init__(self, graph: Graph) -> None:
        size = len(graph.forward)
        made = [0] * size
        for position, value in enumerate(graph.forward):
            made[position] = sum(graph.storage_bytes[storage] for storage in graph.nodes[value].allocates)
        given = {v for grad in graph.grad_nodes for slot, v in grad.contributes if graph.slots[slot].owner == -1}
        fixed = {storage for v in given if v < len(graph.nodes) for storage in graph.nodes[v].storages}
        for grad in graph.grad_nodes:
            for value in grad.nodes:
                storages = (storage for storage in graph.nodes[value].allocates if storage not in fixed)
                made[grad.position] += sum(graph.storage_bytes[storage] for storage in storages)
        self.bytes = list(accumulate(made, initial=0))
        self.seconds = list(accumulate((graph.nodes[value].seconds for value in graph.forward), initial=0.0))

    def ratios(self, other: _Sums, start: int, stop: int) -> tuple[float, float]:
        """How much more seconds and bytes the window takes in ``other``."""
        seconds, memory = self.seconds[stop] - self.seconds[start], self.bytes[stop] - self.bytes[start]
        return (
            (other.seconds[stop] - other.seconds[start]) / seconds if seconds > 0 else 1.0,
            (other.bytes[stop] - other.bytes[start]) / memory if memory else 1.0,
        )
