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


SMALL = 50_000  # a storage this many times smaller than all of forward does not decide where to cut
NARROW = 0.9  # share of one storage in what crosses a needle's eye
DEAR = 1.1  # a cut point this much dearer than both of its neighbours ...
LARGE = 8  # ... goes, unless the stage without it makes more than this part of all memory


class _Place(NamedTuple):
    """A clean position: the bytes that cross it, those that backward does not read twice; ``narrow`` if one storage."""

    position: int
    price: int
    narrow: bool
    signature: int


def cuts(graph: Graph, max_stages: int = 256) -> Chain:
    """Cut the forward into at most ``max_stages`` stages at clean, narrow positions.

    The price of a position is the bytes that cross it, those that backward does not read counted twice; results of
    the region are free, since they stay in memory anyway. Cut points are the positions at which the price has a local
    minimum, and those that little but one storage crosses, as far as they are not much dearer than the cut points
    around them. Of positions that the same storages cross the first is taken. While there are too many stages, the
    one that creates the fewest bytes is merged with a neighbour. O(n log n) in the size of the graph.
    """
    spans = _spans(graph)
    held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    grown = [0]
    for value in graph.forward:
        created = graph.nodes[value].allocates
        grown.append(grown[-1] + sum(graph.storage_bytes[storage] for storage in created))
    places = _worthwhile(_clean_places(graph, spans, held, grown[-1] // SMALL), grown)
    positions = _merge([0, *(place.position for place in places), len(graph.forward)], grown, max_stages)
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


def _clean_places(graph: Graph, spans: dict[int, tuple[int, int]], held: set[int], small: int) -> list[_Place]:
    """Clean positions in order, each with what crosses it; storages of up to ``small`` bytes are left out."""
    size, count = len(graph.forward), len(graph.nodes)
    reads = [read for grad in graph.grad_nodes for value in grad.nodes for read in graph.nodes[value].inputs]
    needed = {storage for read in reads if read < count for storage in graph.nodes[read].storages}
    place = {value: position for position, value in enumerate(graph.forward)}
    closed = [0] * (size + 2)
    ranges = list(graph.forbidden)
    for position, value in enumerate(graph.forward):
        sources = (read for read in graph.nodes[value].inputs if graph.nodes[read].container and read in place)
        ranges += [(place[read], position) for read in sources]
    for low, high in ranges:
        closed[min(max(low + 1, 0), size + 1)] += 1
        closed[min(max(high + 1, 0), size + 1)] -= 1
    born: list[list[int]] = [[] for _ in range(size)]
    for storage, (birth, last) in spans.items():
        if last > birth and storage not in held and graph.storage_bytes[storage] > small:
            born[birth].append(storage)
    places: list[_Place] = []
    crossing: dict[int, int] = {}  # storage: price
    blocked = closed[0]
    for position in range(1, size):
        for storage in born[position - 1]:
            crossing[storage] = graph.storage_bytes[storage] * (1 if storage in needed else 2)
        crossing = {storage: price for storage, price in crossing.items() if spans[storage][1] >= position}
        blocked += closed[position]
        if not blocked:
            price = sum(crossing.values())
            largest = max((graph.storage_bytes[storage] for storage in crossing), default=0)
            places.append(_Place(position, price, largest >= NARROW * price, hash(frozenset(crossing))))
    return places


def _worthwhile(places: Sequence[_Place], grown: Sequence[int]) -> list[_Place]:
    """The positions worth a cut: valleys of the price and needles' eyes, without those that cost too much."""
    distinct = [next(group) for _, group in groupby(places, key=lambda place: place.signature)]
    runs = [list(group) for _, group in groupby(distinct, key=lambda place: place.price)]
    prices = [0, *(run[0].price for run in runs), 0]
    chosen: list[_Place] = []
    for index, run in enumerate(runs, start=1):
        valley = prices[index - 1] > prices[index] < prices[index + 1]
        chosen += [place for place in run if valley or place.narrow]
    kept: list[_Place] = []
    for index, place in enumerate(chosen):
        if kept and place.signature == kept[-1].signature:
            continue
        before = kept[-1] if kept else _Place(0, 0, True, 0)
        after = next((p for p in chosen[index + 1 :] if p.price * DEAR < place.price), None)
        behind = after.position if after else len(grown) - 1
        whole = grown[behind] - grown[before.position]
        dear = before.price * DEAR < place.price and (after is not None or index + 1 == len(chosen))
        if not (dear and whole * LARGE <= grown[-1]):
            kept.append(place)
    return kept


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
