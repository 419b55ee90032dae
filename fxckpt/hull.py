"""Keep or recompute: all best compromises between kept bytes and extra time, by parametric minimum cuts.

For a price per byte, choosing what to keep so that backward finds or can recompute all it reads is a minimum cut. An
operation has a node that lies on the source side if it runs again, a storage one that lies there if it is needed:

    source --> operation          price * bytes     of its results that backward reads: they are kept
    storage --> its operation     price * bytes     needed for something else, but not made again: it is kept
    operation --> sink            seconds           run again
    operation --> what it reads   without limit     run again, so its inputs are needed

What backward reads is there in any case, kept or recomputed, so nothing that only reads such results ties two
operations together: the problem falls apart into small components. Sweeping the price gives the lower convex hull of
(kept bytes, extra time) of each: where the lines of two neighbouring points meet lies the only price at which a point
between them can win, so one cut there finds it or proves that there is none. The hull of the whole is the sum of the
hulls. Prices are ratios of integers and capacities integers: no point is lost to rounding.

Parametric cuts: Gallo, Grigoriadis & Tarjan, "A fast parametric maximum flow algorithm", 1989.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov, build_residual_network

__all__ = ["Hull", "Operation", "Storage", "hull"]

SOURCE, SINK = -1, -2

_Edge = tuple[int, int, int, int]
"""Tail, head, ticks and bytes; -1 ticks if the edge cannot be cut."""

_Point = tuple[int, int, tuple[int, ...]]
"""Bytes and ticks of the edges that are cut, and which they are."""


class Operation(NamedTuple):
    """What can run again: it reads and makes storages, takes ``ticks`` and needs ``state_bytes`` of saved state."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    ticks: int
    state_bytes: int = 0
    recomputable: bool = True


class Storage(NamedTuple):
    """Memory that can be kept; ``needed`` if backward reads it."""

    size: int
    keepable: bool = True
    needed: bool = False


class Hull:
    """Points from the fastest to the smallest, each the best compromise at some price.

    Attributes:
        points: pairs of kept bytes and ticks; bytes fall, ticks rise.
    """

    def __init__(self, parts: Sequence[tuple[tuple[_Point, ...], Sequence[tuple[int, ...]]]]) -> None:
        self._parts = parts
        steps = [
            (Fraction(right[1] - left[1], left[0] - right[0]), part, index)
            for part, (points, _) in enumerate(parts)
            for index, (left, right) in enumerate(pairwise(points))
        ]
        self._steps = [(part, index) for _, part, index in sorted(steps)]
        kept_bytes, ticks = sum(points[0][0] for points, _ in parts), sum(points[0][1] for points, _ in parts)
        self.points = [(kept_bytes, ticks)]
        for part, index in self._steps:
            left, right = parts[part][0][index : index + 2]
            kept_bytes, ticks = kept_bytes + right[0] - left[0], ticks + right[1] - left[1]
            self.points.append((kept_bytes, ticks))

    def kept(self, index: int) -> list[int]:
        """The storages kept at point ``index``."""
        chosen = [0] * len(self._parts)
        for part, _ in self._steps[:index]:
            chosen[part] += 1
        found: list[int] = []
        for (points, storages), point in zip(self._parts, chosen, strict=True):
            found += (storage for edge in points[point][2] for storage in storages[edge])
        return sorted(found)

    def select(self, most: int) -> list[int]:
        """Indices of up to ``most`` corners that follow the hull best; first and last are among them."""
        chosen = {0, len(self.points) - 1}
        while len(chosen) < most:
            area, middle = max(
                (self._area(left, middle, right), -middle)
                for left, right in (*pairwise(sorted(chosen)), (0, 0))
                for middle in range(left + 1, max(right, left + 2))
            )
            if area <= 0:
                break
            chosen.add(-middle)
        return sorted(chosen)

    def _area(self, left: int, middle: int, right: int) -> int:
        """Twice the area of the triangle of three points; 0 if one of them lies between the others."""
        (a, b), (c, d), (e, f) = (self.points[min(index, len(self.points) - 1)] for index in (left, middle, right))
        return (a - c) * (f - b) - (d - b) * (a - e)


def hull(operations: Sequence[Operation], storages: Sequence[Storage], known: dict[object, object]) -> Hull:
    """The hull of one problem.

    Args:
        operations: in an order in which they can run; each storage is made by one of them, or is not read here.
        storages: by number.
        known: hulls of components that were solved before; share it between calls.
    """
    network = _Network(operations, storages)
    parts: list[tuple[tuple[_Point, ...], Sequence[tuple[int, ...]]]] = []
    for edges, kept in network.components():
        if edges not in known:
            known[edges] = _component(edges)
        parts.append((known[edges], kept))  # type: ignore[arg-type]
    return Hull(parts)


class _Network:
    """The cut problem of a whole, before it falls apart.

    A result that backward does not read and that one operation reads is not worth keeping if the only result of that
    operation is no larger; an operation of which nothing is worth keeping runs together with its only reader.

    Attributes:
        limited: edges ``(tail, head, ticks, bytes, storages that are kept if it is cut)``; operation ``i`` is node
            ``-3 - i``.
        endless: edges that cannot be cut.
    """

    def __init__(self, operations: Sequence[Operation], storages: Sequence[Storage]) -> None:
        self.operations, self.storages = operations, storages
        self.limited: list[tuple[int, int, int, int, tuple[int, ...]]] = []
        self.endless: list[tuple[int, int]] = []
        self.maker = {storage: index for index, operation in enumerate(operations) for storage in operation.makes}
        self.readers: dict[int, list[int]] = {}
        wanted = self._wanted()
        self.joined = {index: index for index in wanted}
        self.worth: dict[int, bool] = {}
        for index in reversed(wanted):
            self._simplify(index)
        for index in wanted:
            self._add(index)

    def _results(self, index: int) -> list[int]:
        """Storages that the operation makes and that anything reads."""
        return [storage for storage in self.operations[index].makes if storage in self.readers]

    def _wanted(self) -> list[int]:
        """Operations that may have to run again, in order."""
        stack = [storage for storage, index in self.maker.items() if self.storages[storage].needed]
        self.readers = {storage: [] for storage in stack}
        found: set[int] = set()
        while stack:
            index = self.maker[stack.pop()]
            if index not in found:
                found.add(index)
                for read in self.operations[index].reads:
                    if read in self.maker:
                        self.readers.setdefault(read, []).append(index)
                        stack.append(read)
        return sorted(found)

    def _simplify(self, index: int) -> None:
        """Decide which results of the operation are worth keeping, and whether it runs with its reader."""
        results = self._results(index)
        for storage in results:
            entry = self.storages[storage]
            behind = {self.joined[reader] for reader in self.readers[storage]}
            self.worth[storage] = entry.keepable and (entry.needed or not self._beaten(entry.size, behind))
        behind = {self.joined[reader] for storage in results for reader in self.readers[storage]}
        if len(behind) == 1 and not any(self.worth[s] or self.storages[s].needed for s in results):
            self.joined[index] = behind.pop()

    def _beaten(self, size: int, behind: set[int]) -> bool:
        """Whether keeping the result of the only reader takes no more than ``size``."""
        results = [made for index in behind for made in self._results(index)]
        single = len(behind) == 1 and len(results) == 1
        return single and self.worth[results[0]] and self.storages[results[0]].size <= size

    def _add(self, index: int) -> None:
        """Edges of an operation and of those of its results that are worth keeping."""
        operation, node = self.operations[index], -3 - self.joined[index]
        if operation.recomputable:
            self.limited.append((node, SINK, operation.ticks, operation.state_bytes, ()))
        else:
            self.endless.append((node, SINK))
        results = self._results(index)
        needed = tuple(storage for storage in results if self.storages[storage].needed)
        if not all(self.worth[storage] for storage in needed):
            self.endless.append((SOURCE, node))
        elif needed:
            self.limited.append((SOURCE, node, 0, sum(self.storages[s].size for s in needed), needed))
        for storage in results:
            if not self.storages[storage].needed:
                tail = node
                if self.worth[storage]:
                    tail = storage
                    self.limited.append((storage, node, 0, self.storages[storage].size, (storage,)))
                readers = {-3 - self.joined[reader] for reader in self.readers[storage]} - {node}
                self.endless += [(reader, tail) for reader in sorted(readers)]

    def components(self) -> list[tuple[tuple[_Edge, ...], list[tuple[int, ...]]]]:
        """Edges of each component, numbered from 0 so that equal ones compare equal, and what each edge keeps."""
        graph = nx.Graph()
        edges = [*self.limited, *((tail, head, -1, -1, ()) for tail, head in self.endless)]
        ends = (SOURCE, SINK)
        for tail, head, *_ in edges:
            graph.add_nodes_from(node for node in (tail, head) if node not in ends)
            if tail != SOURCE and head != SINK:
                graph.add_edge(tail, head)
        part: dict[int, int] = {}
        for number, nodes in enumerate(nx.connected_components(graph)):
            part.update(dict.fromkeys(nodes, number))
        groups: dict[int, list[tuple[int, int, int, int, tuple[int, ...]]]] = {}
        for edge in edges:
            groups.setdefault(part[edge[1] if edge[0] == SOURCE else edge[0]], []).append(edge)
        found: list[tuple[tuple[_Edge, ...], list[tuple[int, ...]]]] = []
        for group in groups.values():
            names = {SOURCE: SOURCE, SINK: SINK}
            for edge in group:
                for node in edge[:2]:
                    names.setdefault(node, len(names) - 2)
            found.append(
                (
                    tuple((names[tail], names[head], ticks, size) for tail, head, ticks, size, _ in group),
                    [storages for *_, storages in group],
                )
            )
        return found


def _component(edges: Sequence[_Edge]) -> tuple[_Point, ...]:
    """All corners of the hull of one component, from the fastest to the smallest."""
    ticks, size = 1 + sum(max(edge[2], 0) for edge in edges), 1 + sum(max(edge[3], 0) for edge in edges)
    cut = _Cutter(edges)
    first, last = cut(1, size), cut(ticks, 1)
    points = {first[:2]: first, last[:2]: last}
    gaps = [(first, last)]
    while gaps:
        left, right = gaps.pop()
        price, scale = right[1] - left[1], left[0] - right[0]
        if price <= 0 or scale <= 0:
            continue
        middle = cut(price, scale)
        if scale * middle[1] + price * middle[0] < scale * left[1] + price * left[0]:
            points[middle[:2]] = middle
            gaps += [(left, middle), (middle, right)]
    return tuple(sorted(points.values(), key=lambda point: point[1]))


class _Cutter:
    """Minimum cuts of one component; the residual network is built once and gets new capacities for each price."""

    def __init__(self, edges: Sequence[_Edge]) -> None:
        self.edges = edges
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from((SOURCE, SINK))
        self.graph.add_edges_from((tail, head) for tail, head, _, _ in edges)
        self.residual = build_residual_network(self.graph, "capacity")

    def __call__(self, price: int, scale: int) -> _Point:
        """The point with the least ``scale * ticks + price * bytes``."""
        capacities: dict[tuple[int, int], int] = {}
        for tail, head, ticks, size in self.edges:  # joined operations share their edge to the sink
            if ticks >= 0:
                capacities[tail, head] = capacities.get((tail, head), 0) + scale * ticks + price * size
        endless = 3 * sum(capacities.values()) + 1
        capacities.update(((tail, head), endless) for tail, head, ticks, _ in self.edges if ticks < 0)
        for (tail, head), capacity in capacities.items():
            self.residual[tail][head]["capacity"] = capacity
        self.residual.graph["inf"] = endless
        boykov_kolmogorov(self.graph, SOURCE, SINK, residual=self.residual)
        reached = self.residual.graph["trees"][0]
        cut = [index for index, (tail, head, *_) in enumerate(self.edges) if tail in reached and head not in reached]
        return sum(self.edges[i][3] for i in cut), sum(self.edges[i][2] for i in cut), tuple(cut)
