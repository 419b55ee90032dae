"""Memory while a window runs: the moments that may be its highest, and what is alive in them.

Which moment is the highest depends on the sizes of the inputs. What is alive in it does not, so that the peaks of a
window at other sizes are sums over the lists that are made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Course", "Growth", "Recipe", "Step"]

FOREVER = 10**9  # later than any step
MOST = 12  # moments of one course that are remembered
SCALES = (1 / 8, 1 / 4, 1 / 2, 2, 4, 8)  # of all that grows with the inputs
NEAR = 0.5  # of the peak; a moment below is the highest at hardly any sizes


class Step(NamedTuple):
    """One instruction: ``needs`` are forward storages, ``reads`` other memory; it makes ``size`` bytes in all.

    ``makes`` are pairs of name and size; ``over`` is memory that the result replaces if this is its last use.
    ``workspace`` are bytes that it needs while it runs: its scratch memory, which goes by the name ``scratch``, and
    those of its results that are there already, ``twice``.
    """

    needs: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    size: int
    workspace: int
    over: int
    scratch: int
    twice: tuple[int, ...] = ()


class Course:
    """Steps that run one after the other. Memory dies with its last use unless it stays.

    Attributes:
        highs: bytes before the first step, and at most while each step runs.
    """

    def __init__(self, steps: Sequence[Step], ready: dict[int, int], stays: set[int]) -> None:
        """
        Args:
            steps: in order.
            ready: names and sizes of what is there at the beginning.
            stays: names of what outlives the steps.
        """
        self.steps, self.ready = steps, ready
        last: dict[int, int] = {}
        sizes = dict(ready)
        for index, step in enumerate(steps):
            for name in step.needs:
                last[name] = index
            for name in step.reads:
                last[name] = index
            for name, size in step.makes:
                last[name] = index
                sizes[name] = size
        self.last = {name: index for name, index in last.items() if name not in stays}
        dying: list[int] = [0] * len(steps)
        for name, index in self.last.items():
            dying[index] += sizes.get(name, 0)
        self.replaced: list[int] = []
        live = sum(ready.values())
        self.highs = [live]
        for index, step in enumerate(steps):
            live += step.size
            over = step.over if step.over in sizes and self.last.get(step.over) == index else -1
            self.replaced.append(over)
            self.highs.append(live + step.workspace - sizes.get(over, 0))
            live -= dying[index]

    def alive(self, moments: Sequence[int]) -> list[list[int]]:
        """Names of all that makes up :attr:`highs` at each of ``moments``."""
        spans = [(name, 0) for name in self.ready]
        spans += [(name, index) for index, step in enumerate(self.steps, start=1) for name, _ in step.makes]
        last = self.last
        names: Any = np.array([name for name, _ in spans], dtype=np.int64)
        born: Any = np.array([index for _, index in spans])
        dies: Any = np.array([last.get(name, FOREVER) + 1 for name, _ in spans])
        found: list[list[int]] = []
        for moment in moments:
            alive = names[(born <= moment) & (moment <= dies)].tolist()
            if moment:
                step = self.steps[moment - 1]
                if self.replaced[moment - 1] >= 0:
                    alive.remove(self.replaced[moment - 1])
                alive += [*step.twice, *([step.scratch] if step.scratch >= 0 else [])]
            found.append(alive)
        return found

    def moments(self, settled: Sequence[int] = ()) -> list[int]:
        """Those that can be the highest: that come near the peak, or are the highest where all but ``settled`` grows.

        Args:
            settled: bytes at each moment that do not grow with the inputs.
        """
        highs: Any = np.array(self.highs)
        around: Any = np.pad(highs, 1, constant_values=-1)
        found = {int(highs.argmax()): None}
        if settled:
            fixed: Any = np.array(settled)
            found |= {int((fixed + scale * (highs - fixed)).argmax()): None for scale in SCALES}
        tops = np.flatnonzero((around[:-2] <= highs) & (highs > around[2:]) & (highs >= NEAR * highs.max()))
        found |= dict.fromkeys(tops[highs[tops].argsort()[::-1]].tolist())
        return list(found)[:MOST]


class Recipe:
    """What the numbers of a window's menu points are sums of, for all of its points."""

    def __init__(self, kept: Sequence[Any], forward: Sequence[Any], backward: Sequence[Any], again: Sequence[Any],
                 idle: Sequence[Any]) -> None:  # fmt: skip
        """
        Args:
            kept: for each point, names of what it keeps beyond what is kept anyway.
            forward, backward: for each point, names of what is alive at each of its moments.
            again: for each point, numbers of the operations that backward runs again.
            idle: for each point, numbers of the operations that make nothing of what is kept.
        """
        self.kept, self.again, self.idle = _Sums(kept), _Sums(again), _Sums(idle)
        self.forward, self.backward = _Highest(forward), _Highest(backward)


class Growth(NamedTuple):
    """A window's recipe, with what its names stand for.

    Attributes:
        recipe: shared by windows of equal structure.
        parts: for each name of memory the entry in :meth:`fxckpt.plan.Graph.part_bytes`.
        operations: for each operation its value.
    """

    recipe: Recipe
    parts: tuple[int, ...]
    operations: tuple[int, ...]


class _Sums:
    """Sums over groups of entries of a vector; a group may be empty."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        # Each group starts with the entry behind the last one, which is zero.
        self.entries: Any = np.array(list(chain.from_iterable([-1, *group] for group in groups)), dtype=np.int64)
        self.starts: Any = np.cumsum([0, *(len(group) + 1 for group in groups)])[:-1]

    def of(self, vector: Any) -> Any:
        """The sum of each group; the last entry of ``vector`` is zero."""
        return np.add.reduceat(vector[self.entries], self.starts)


class _Highest:
    """The highest of several sums, for each point."""

    def __init__(self, points: Sequence[Sequence[Sequence[int]]]) -> None:
        self.sums = _Sums([moment for moments in points for moment in moments])
        self.starts: Any = np.cumsum([0, *(len(moments) for moments in points)])[:-1]

    def of(self, vector: Any) -> Any:
        return np.maximum.reduceat(self.sums.of(vector), self.starts)
