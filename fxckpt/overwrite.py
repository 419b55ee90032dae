"""Which steps of a program may write their result over an input that dies with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fxckpt.plan import Graph, Step

__all__ = ["mark_overwrites"]


def mark_overwrites(graph: Graph, steps: list[Step], tangents: Iterable[int]) -> tuple[Step, ...]:
    """``steps`` with ``inplace`` set where eager's in-place operators would do the same.

    Args:
        graph: the joint graph.
        steps: a straight-line program whose steps say what they free.
        tangents: slots whose totals come in from outside.
    """
    return _Overwrites(graph, tangents).mark(steps)


Place = tuple[object, ...]


class _Overwrites:
    """Only storages that the program itself allocated, and that no other live value refers to, are written to: never an
    argument, a saved value or a gradient that came in, nor a view of one.
    """

    def __init__(self, graph: Graph, tangents: Iterable[int]) -> None:
        self.graph = graph
        self.place: dict[int, Place] = {graph.total(slot): (("given", graph.total(slot)),) for slot in tangents}
        self.users: dict[object, int] = {place[0]: 1 for place in self.place.values()}
        self.own: set[object] = set()
        self.dense: dict[int, bool] = {}
        self.fresh = 0

    def mark(self, steps: list[Step]) -> tuple[Step, ...]:
        """``steps`` with ``inplace`` set where that is safe."""
        result = []
        for step in steps:
            if step.op == "run" and self._run(step):
                step = dataclasses.replace(step, inplace=True)
            elif step.op == "replay":
                self._define(step.value, self._new(step.value), True)
            elif step.op in ("add", "zero") and self._add(step):
                step = dataclasses.replace(step, inplace=True)
            for value in step.frees:
                self._forget(value)
            result.append(step)
        return tuple(result)

    def _run(self, step: Step) -> bool:
        node = self.graph.nodes[step.value]
        first = node.inputs[0] if node.inputs else -1
        if node.inplace and node.allocates and not node.container and first in step.frees and self._writable(first):
            self._define(step.value, self.place[first], False)
            self.dense[step.value] = True
            return True
        if node.allocates:
            self._define(step.value, self._new(step.value), True)
        else:
            self._define(step.value, self._viewed(step.value), False)
        self.dense[step.value] = node.dense
        return False

    def _new(self, value: int) -> Place:
        """Storages of a result that its operator allocates; a value computed twice has other ones each time."""
        self.fresh += 1
        return tuple((storage, self.fresh) for storage in self.graph.nodes[value].storages)

    def _viewed(self, value: int) -> Place:
        """Storages that a view looks at: those of its inputs, of a tuple only the one that it takes out."""
        node = self.graph.nodes[value]
        held = dict.fromkeys(storage for source in node.inputs for storage in self._place_of(source))
        exact = [storage for storage in held if isinstance(storage, tuple) and storage[0] in node.storages]
        return tuple(exact or held)

    def _place_of(self, value: int) -> Place:
        if value in self.place:
            return self.place[value]
        storages = self.graph.nodes[value].storages if value < len(self.graph.nodes) else (value,)
        return tuple(("given", storage) for storage in storages)

    def _add(self, step: Step) -> bool:
        total = self.graph.total(step.slot)
        if step.op == "add" and total not in self.place:
            self._define(total, self._place_of(step.value), False)
            self.dense[total] = self.dense.get(step.value, False)
            return False
        inplace = step.op == "add" and self._writable(total) and self.dense.get(total, False)
        if not inplace:
            self.fresh += 1
            self._define(total, (("total", self.fresh),), True)
            self.dense[total] = True
        return inplace

    def _writable(self, value: int) -> bool:
        place = self.place.get(value, ())
        return len(place) == 1 and place[0] in self.own and self.users.get(place[0], 0) == 1

    def _define(self, value: int, storages: Place, allocated: bool) -> None:
        for storage in storages:
            self.users[storage] = self.users.get(storage, 0) + 1
        if allocated:
            self.own.update(storages)
        self._forget(value)
        self.place[value] = storages

    def _forget(self, value: int) -> None:
        for storage in self.place.pop(value, ()):
            self.users[storage] -= 1
