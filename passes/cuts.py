"""Where the forward can be cut, and into which stages it is cut.

A position is *clean* when no forbidden range holds it and no tuple is handed across it. Of the clean positions those
make good cut points that few bytes cross, and only bytes that backward reads anyway, because a checkpoint has to keep
what crosses it. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, cut between the layers of a
network; here the narrow places of the data flow play that part.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from fxckpt.plan import Chain, Graph, Stage

__all__ = ["cuts"]


class _Place(NamedTuple):
    """A clean position: bytes and storages that cross it; ``waste`` is the part that backward does not read."""

    position: int
    price: int
    waste: int
    storages: int
    signature: int


def cuts(graph: Graph, max_stages: int = 256) -> Chain:
    """Cut the forward into at most ``max_stages`` stages at clean, narrow positions.

    The price of a position is the bytes that cross it, those that backward does not read counted twice; results of
    the region are free, since they stay in memory anyway. Cut points are the positions at which the price has a local
    minimum, and those that one storage crosses. Of positions that the same storages cross the first is taken. While
    there are too many stages, the one that creates the fewest bytes is merged with a neighbour.
    O(n log n) in the size of the graph.
    """
    spans = _spans(graph)
    held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    positions = [place.position for place in _chosen(_clean_places(graph, spans, held))]
    grown = [0]
    for value in graph.forward:
        created = graph.nodes[value].allocates
        grown.append(grown[-1] + sum(graph.storage_bytes[storage] for storage in created))
    positions = _merge([0, *positions, len(graph.forward)], grown, max_stages)
    born: list[list[int]] = [[] for _ in graph.forward]
    for storage, (birth, _) in spans.items():
        born[birth].append(storage)
    keys = _keys(graph, positions)
    stages: list[Stage] = []
    crossing: list[int] = []
    for (start, stop), key in zip(pairwise(positions), keys, strict=True):
        crossing += [storage for position in range(start, stop) for storage in born[position]]
        crossing = [storage for storage in crossing if spans[storage][1] >= stop or storage in held]
        stages.append(Stage(start, stop, tuple(sorted(crossing)), key))
    return Chain(tuple(stages))


def _spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """For each storage that forward creates the position that creates it and the last that reads it."""
    spans: dict[int, tuple[int, int]] = {}
    for position, value in enumerate(graph.forward):
        for read in graph.nodes[value].inputs:
            for storage in graph.nodes[read].storages:
                if storage in spans:
                    spans[storage] = (spans[storage][0], position)
        for storage in graph.nodes[value].allocates:
            spans.setdefault(storage, (position, position))
    return spans


def _clean_places(graph: Graph, spans: dict[int, tuple[int, int]], held: set[int]) -> list[_Place]:
    """Clean positions in order, each with what crosses it."""
    size, count = len(graph.forward), len(graph.nodes)
    reads = [read for grad in graph.grad_nodes for value in grad.nodes for read in graph.nodes[value].inputs]
    needed = {storage for read in reads if read < count for storage in graph.nodes[read].storages}
    place = {value: position for position, value in enumerate(graph.forward)}
    # A range (low, high] of positions adds to the sums of low + 1 .. high.
    ranges = [(low, high, (1, 0, 0, 0, 0)) for low, high in graph.forbidden]
    for position, value in enumerate(graph.forward):
        for read in graph.nodes[value].inputs:
            if graph.nodes[read].container and read in place:
                ranges.append((place[read], position, (1, 0, 0, 0, 0)))
    for storage, (birth, last) in spans.items():
        size_bytes = 0 if storage in held else graph.storage_bytes[storage]
        waste = 0 if storage in needed else size_bytes
        ranges.append((birth, last, (0, size_bytes + waste, waste, int(size_bytes > 0), (storage + 1) ** 3)))
    changes = [[0] * 5 for _ in range(size + 2)]
    for low, high, amounts in ranges:
        for kind, amount in enumerate(amounts):
            changes[min(max(low + 1, 0), size + 1)][kind] += amount
            changes[min(max(high + 1, 0), size + 1)][kind] -= amount
    places: list[_Place] = []
    sums = [0] * 5
    for position in range(size):
        sums = [total + change for total, change in zip(sums, changes[position], strict=True)]
        if position and not sums[0]:
            places.append(_Place(position, *sums[1:]))
    return places


def _chosen(places: Sequence[_Place]) -> list[_Place]:
    """The positions worth a cut: valleys of the price, and the needles' eyes that one storage passes."""
    distinct = [next(group) for _, group in groupby(places, key=lambda place: place[1:])]
    runs = [list(group) for _, group in groupby(distinct, key=lambda place: place.price)]
    prices = [0, *(run[0].price for run in runs), 0]
    chosen: list[_Place] = []
    for index, run in enumerate(runs, start=1):
        valley = prices[index - 1] > prices[index] < prices[index + 1]
        chosen += [place for place in run if valley or (place.storages <= 1 and not place.waste)]
    return chosen


def _merge(positions: list[int], grown: Sequence[int], max_stages: int) -> list[int]:
    """Drop inner positions, each time the one between the pair of stages that creates the fewest bytes."""
    before = {right: left for left, right in pairwise(positions)}
    after = dict(pairwise(positions))
    heap = [(grown[after[cut]] - grown[before[cut]], cut) for cut in positions[1:-1]]
    heapq.heapify(heap)
    left = len(positions) - 1
    while left > max(max_stages, 1):
        created, cut = heapq.heappop(heap)
        if cut not in after or created != grown[after[cut]] - grown[before[cut]]:
            continue  # dropped before, or its stages have grown since
        low, high = before.pop(cut), after.pop(cut)
        after[low], before[high] = high, low
        for neighbour in (low, high):
            if neighbour in before and neighbour in after:
                heapq.heappush(heap, (grown[after[neighbour]] - grown[before[neighbour]], neighbour))
        left -= 1
    return [positions[0], *sorted(before)]


def _keys(graph: Graph, positions: Sequence[int]) -> list[str]:
    """A digest of each stage's operations, sizes, costs and wiring, numbered relative to the stage."""
    stage_of = [0] * len(graph.forward)
    for index, (start, stop) in enumerate(pairwise(positions)):
        stage_of[start:stop] = [index] * (stop - start)
    grads: list[list[int]] = [[] for _ in positions[1:]]
    for index, grad in enumerate(graph.grad_nodes):
        grads[stage_of[grad.position]].append(index)
    keys: list[str] = []
    for index, (start, stop) in enumerate(pairwise(positions)):
        numbers: dict[object, int] = {}

        def number(thing: object, numbers: dict[object, int] = numbers) -> int:
            return numbers.setdefault(thing, len(numbers))

        def describe(value: int, number=number) -> tuple[object, ...]:  # type: ignore[no-untyped-def]
            node = graph.nodes[value]
            sizes = [(number(("storage", s)), graph.storage_bytes[s]) for s in node.storages]
            costs = (node.seconds, node.workspace_bytes, node.view, node.random, node.recomputable, node.keepable)
            return node.op, costs, [number(v) for v in node.inputs], sizes, number(value)

        digest = hashlib.sha256()
        for value in graph.forward[start:stop]:
            digest.update(repr(describe(value)).encode())
        for grad_index in grads[index]:
            grad = graph.grad_nodes[grad_index]
            slots = [(number(("slot", s)), graph.slots[s].bytes) for s in grad.reads]
            given = [(number(("slot", s)), number(value)) for s, value in grad.contributes]
            rows = (slots, [describe(value) for value in grad.nodes], given, grad.position - start)
            digest.update(repr(rows).encode())
        keys.append(digest.hexdigest()[:16])
    return keys
