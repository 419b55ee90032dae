"""Menus at other sizes of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from fxckpt.moments import Growth
from fxckpt.plan import Graph, MenuPoint

__all__ = ["resized_menus"]


def resized_menus(
    before: Graph, after: Graph, menus: Sequence[Sequence[MenuPoint]]
) -> tuple[tuple[MenuPoint, ...], ...]:
    """``menus`` of ``before`` for ``after``, the same graph at other sizes.

    What is kept stays the same; bytes and times are exact, but for peaks at moments that were far from the highest.

    Args:
        before: the graph that the menus were made for.
        after: the graph at other sizes.
        menus: points of the windows that start with each stage.
    """
    old, new = _Amounts(before), _Amounts(after)
    result: list[tuple[MenuPoint, ...]] = []
    for points in menus:
        resized: list[MenuPoint] = []
        for growth, group in groupby(points, attrgetter("growth")):
            window = list(group)
            numbers = zip(window, *new.numbers(growth), old.numbers(growth)[0], strict=True)
            for point, kept, extra, forward, backward, idle, before_kept in numbers:
                more = kept - before_kept
                resized.append(
                    MenuPoint(point.kept, point.kept_bytes + more, extra, forward, backward, point.stages, idle, growth)
                )
        result.append(tuple(resized))
    return tuple(result)


_Numbers = tuple[list[int], list[float], list[int], list[int], list[float]]


class _Amounts:
    """Bytes and seconds of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.bytes: Any = np.array(graph.part_bytes())
        self.seconds: Any = np.array([*(node.seconds for node in graph.nodes), 0.0])
        self.known: dict[Any, _Numbers] = {}

    def numbers(self, growth: Growth) -> _Numbers:
        """For each point bytes kept, seconds of recomputation, peaks of forward and backward, idle seconds."""
        recipe = growth.recipe
        sizes, times = self.bytes[[*growth.parts, -1]], self.seconds[[*growth.operations, -1]]
        key = id(recipe), sizes.tobytes(), times.tobytes()
        if key not in self.known:
            self.known[key] = (
                recipe.kept.of(sizes).tolist(), recipe.again.of(times).tolist(), recipe.forward.of(sizes).tolist(),
                recipe.backward.of(sizes).tolist(), recipe.idle.of(times).tolist(),
            )  # fmt: skip
        return self.known[key]
