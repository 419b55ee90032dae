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


class _Overwrites:
    """Finds the steps that may write their result over an input that dies with them, as eager's in-place operators do.

    Only storages that the program itself allocated, and that no other live value refers to, are written to: never an
    argument, a saved value or a gradient that came in.
    """

    def __init__(self, graph: Graph, tangents: Iterable[int]) -> None:
        self.graph = graph
        self.place: dict[int, tuple[int, ...]] = {graph.total(slot): (-1,) for slot in tangents}
        self.users: dict[int, int] = {-1: 1}
        self.own: set[int] = set()
        self.dense: dict[int, bool] = {}
        self.fresh = len(graph.storage_bytes)

    def mark(self, steps: list[Step]) -> tuple[Step, ...]:
        """``steps`` with ``inplace`` set where that is safe."""
        result = []
        for step in steps:
            if step.op == "run" and self._run(step):
                step = dataclasses.replace(step, inplace=True)
            elif step.op == "replay":
                self._define(step.value, self.graph.nodes[step.value].storages, True)
            elif step.op in ("add", "zero") and self._add(step):
                step = dataclasses.replace(step, inplace=True)
            for value in step.frees:
                self._forget(value)
            result.append(step)
        return tuple(result)

    def _run(self, step: Step) -> bool:
        node = self.graph.nodes[step.value]
        first = node.inputs[0] if node.inputs else -1
        inplace = (
            node.inplace and bool(node.allocates) and not node.container and first in step.frees
            and node.inputs.count(first) == 1 and self._free_to_write(first)
        )  # fmt: skip
        if inplace:
            self._define(step.value, self.place[first], False)
            self.dense[step.value] = True
            return True
        storages = node.storages
        if not node.allocates:  # a view may look at storage that went from one value to another
            held = [storage for source in node.inputs for storage in self.place.get(source, ())]
            storages = storages if set(storages) <= set(held) else tuple(dict.fromkeys(held)) or storages
        self._define(step.value, storages, bool(node.allocates))
        self.dense[step.value] = node.dense
        return False

    def _add(self, step: Step) -> bool:
        total = self.graph.total(step.slot)
        if step.op == "add" and total not in self.place:
            self._define(total, self.place.get(step.value, self._given(step.value)), False)
            self.dense[total] = self.dense.get(step.value, False)
            return False
        inplace = step.op == "add" and self._free_to_write(total) and self.dense.get(total, False)
        if not inplace:
            self.fresh += 1
            self._define(total, (self.fresh,), True)
            self.dense[total] = True
        return inplace

    def _given(self, value: int) -> tuple[int, ...]:
        return self.graph.nodes[value].storages if value < len(self.graph.nodes) else (-1,)

    def _free_to_write(self, value: int) -> bool:
        place = self.place.get(value, ())
        return len(place) == 1 and place[0] in self.own and self.users.get(place[0], 0) == 1

    def _define(self, value: int, storages: tuple[int, ...], allocated: bool) -> None:
        for storage in storages:
            self.users[storage] = self.users.get(storage, 0) + 1
        if allocated:
            self.own.update(storages)
        self._forget(value)
        self.place[value] = storages

    def _forget(self, value: int) -> None:
        for storage in self.place.pop(value, ()):
            self.users[storage] -= 1
