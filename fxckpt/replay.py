"""What backward of one segment runs: recomputation right before the first use, replays of nested segments."""

from __future__ import annotations

import bisect

from fxckpt.plan import Graph, Segment, Step

__all__ = ["Backward", "Context"]


class Context:
    """Indexes of the graph that every segment needs."""

    def __init__(self, graph: Graph, tangents: frozenset[int]) -> None:
        self.graph = graph
        self.position = {value: index for index, value in enumerate(graph.forward)}
        self.by_name = {node.name: index for index, node in enumerate(graph.nodes)}
        self.required = set(graph.required)
        given = {storage for node in graph.nodes if node.phase == "input" for storage in node.storages}
        self.input_views = {
            value
            for value in graph.forward
            if graph.nodes[value].view and given.issuperset(graph.nodes[value].storages)
        }  # made again from the input itself, whose version autograd watches; a saved view would hide a change
        self.first_total = len(graph.nodes)
        self.items: dict[int, list[int]] = {}
        for value in graph.forward:
            for source in graph.nodes[value].inputs:
                if source < self.first_total and graph.nodes[source].container:
                    self.items.setdefault(source, []).append(value)
        arrived = set(tangents)
        self.active: list[bool] = []
        for grad_node in graph.grad_nodes:
            runs = any(slot in arrived for slot in grad_node.reads)
            self.active.append(runs)
            if runs:
                arrived.update(slot for slot, _ in grad_node.contributes)
        # By identity of a plan's chain, which is kept alive for that.
        self.targets: dict[int, tuple[tuple[Segment, ...], list[set[int]], dict[int, None]]] = {}
        self.known_parts: dict[tuple[int, int], tuple[frozenset[int], frozenset[int]]] = {}
        running = [index for index, runs in enumerate(self.active) if runs]
        self.by_position = sorted((graph.grad_nodes[index].position, index) for index in running)

    def grad_nodes(self, start: int, stop: int) -> list[int]:
        """Indices of the autograd nodes that run and belong to positions ``start`` to ``stop``, in execution order."""
        first, last = bisect.bisect_left(self.by_position, (start,)), bisect.bisect_left(self.by_position, (stop,))
        return sorted(index for _, index in self.by_position[first:last])

    def parts(self, start: int, stop: int) -> tuple[frozenset[int], frozenset[int]]:
        """Forward values at positions ``start`` to ``stop``, and the slots that their backward reads or adds to."""
        if (start, stop) not in self.known_parts:
            grad_nodes = [self.graph.grad_nodes[index] for index in self.grad_nodes(start, stop)]
            slots = {slot for node in grad_nodes for slot in (*node.reads, *(slot for slot, _ in node.contributes))}
            self.known_parts[start, stop] = frozenset(self.graph.forward[start:stop]), frozenset(slots)
        return self.known_parts[start, stop]


class Backward:
    """Emits the backward of one segment, nested replays included."""

    def __init__(self, context: Context, start: int, stop: int) -> None:
        self.context, self.graph = context, context.graph
        self.start, self.stop = start, stop
        self.steps: list[Step] = []
        self.available: set[int] = set()
        self.external: dict[int, None] = {}
        self.read: set[int] = set()
        self.made: set[int] = set()
        self.states: dict[int, None] = {}
        self.forced: dict[int, None] = {}
        self.totals: set[int] = set()
        self.wanted: set[int] = set()

    def inside(self, value: int, start: int, stop: int) -> bool:
        """Whether ``value`` is a forward value at positions ``start`` to ``stop``."""
        return start <= self.context.position.get(value, -1) < stop

    def run(self, segment: Segment) -> None:
        """Backward of ``segment``; with inner segments replay their forwards first."""
        if not segment.inner:
            self._leaf(segment)
            return
        kept = {self.context.by_name[name] for name in segment.kept}
        self.available = {v for v in self.available if v in kept or not self.inside(v, segment.start, segment.stop)}
        targets = self._targets(segment.inner)
        for inner, values in zip(segment.inner, targets, strict=True):
            self._replay(inner, values)
        for inner in reversed(segment.inner):
            self.run(inner)
            self.available = {v for v in self.available if self.context.position.get(v, -1) < inner.start}

    def _targets(self, chain: tuple[Segment, ...]) -> list[set[int]]:
        """For each inner segment the values that its replay must leave: those it keeps and those that others read.

        The answer depends on the chain alone. It is remembered, for every level above asks for it, once to look ahead
        and once to run: without that the time would double with each level of nesting.
        """
        context = self.context
        if id(chain) in context.targets:
            _, result, forced = context.targets[id(chain)]
            self.forced.update(forced)
            return result
        before, self.forced = self.forced, {}
        result = []
        asked: set[int] = set()
        for inner in reversed(chain):
            probe = Backward(context, inner.start, inner.stop)
            kept = {context.by_name[name] for name in inner.kept} - context.input_views
            outgoing = {value for value in asked if self.inside(value, inner.start, inner.stop)}
            probe.available = kept | outgoing
            probe.run(inner)
            self.forced.update(probe.forced)
            leave = (kept & probe.read) | outgoing
            asked |= set(probe.external)
            for value in self._closure(leave, inner):
                asked.update(s for s in self.graph.nodes[value].inputs if not self.inside(s, inner.start, inner.stop))
            result.append(leave)
        result.reverse()
        context.targets[id(chain)] = chain, result, self.forced
        self.forced = before | self.forced
        return result

    def _closure(self, targets: set[int], inner: Segment) -> list[int]:
        """What a replay of ``inner`` runs to make ``targets``; values that cannot be made again are saved instead."""
        needed: set[int] = set()
        stack = list(targets)
        while stack:
            value = stack.pop()
            if value in needed or value in self.forced or not self.inside(value, inner.start, inner.stop):
                continue
            if not self.graph.nodes[value].recomputable:
                self.forced[value] = None
                continue
            needed.add(value)
            stack += self.graph.nodes[value].inputs
        return sorted(needed, key=self.context.position.__getitem__)

    def _replay(self, inner: Segment, leave: set[int]) -> None:
        closure = self._closure(leave, inner)
        self.wanted = set(closure)
        for value in closure:
            if value not in self.available:
                for source in self.graph.nodes[value].inputs:
                    self._note(source)
                self._emit(value)
        self.available = {v for v in self.available if v in leave or not self.inside(v, inner.start, inner.stop)}

    def _leaf(self, segment: Segment) -> None:
        self.wanted = self._wanted(segment)
        for index in self.context.grad_nodes(segment.start, segment.stop):
            self._grad_node(index)

    def _wanted(self, segment: Segment) -> set[int]:
        """Forward values of the segment that its backward will read or recompute."""
        stack = [
            source
            for index in self.context.grad_nodes(segment.start, segment.stop)
            for node in self.graph.grad_nodes[index].nodes
            for source in self.graph.nodes[node].inputs
        ]
        wanted: set[int] = set()
        while stack:
            value = stack.pop()
            if (
                value in wanted
                or value in self.available
                or value in self.forced
                or not self.inside(value, self.start, self.stop)
            ):
                continue
            wanted.add(value)
            stack += self.graph.nodes[value].inputs
        return wanted

    def _grad_node(self, index: int) -> None:
        grad_node = self.graph.grad_nodes[index]
        read = {source for node in grad_node.nodes for source in self.graph.nodes[node].inputs}
        for slot in grad_node.reads:
            if slot not in self.totals and self.graph.total(slot) in read:
                self.steps.append(Step("zero", self.graph.slots[slot].value, slot))
                self.totals.add(slot)
        for node in grad_node.nodes:
            for source in self.graph.nodes[node].inputs:
                self._need(source)
            self.steps.append(Step("run", node))
        for slot, value in grad_node.contributes:
            if self.graph.slots[slot].owner != -2:
                self.steps.append(Step("add", value, slot))
                self.totals.add(slot)

    def _need(self, value: int) -> None:
        """Make ``value`` available, recomputing what it is made of (an explicit stack: chains can be long)."""
        stack = [(value, False)]
        while stack:
            value, ready = stack.pop()
            if self._note(value):
                continue
            node = self.graph.nodes[value]
            if not node.recomputable:
                self.forced[value] = None
                self.read.add(value)
            elif ready:
                self._emit(value)
            else:
                stack.append((value, True))
                stack += [(source, False) for source in reversed(node.inputs)]

    def _note(self, value: int) -> bool:
        """Whether ``value`` is at hand; remembers that it was read."""
        if value in self.available or value in self.forced:
            if value not in self.made:
                self.read.add(value)
            return True
        if value >= self.context.first_total or self.graph.nodes[value].phase == "backward":
            return True
        if not self.inside(value, self.start, self.stop):
            self.external[value] = None
            return True
        return False

    def _emit(self, value: int) -> None:
        node = self.graph.nodes[value]
        if node.random:
            self.states[value] = None
        self.steps.append(Step("replay" if node.random else "run", value))
        self.available.add(value)
        self.made.add(value)
        if node.container:  # take the results apart at once, so that the rest of the tuple is freed
            for item in self.context.items.get(value, ()):
                if item in self.wanted and item not in self.available:
                    self.steps.append(Step("run", item))
                    self.available.add(item)
                    self.made.add(item)
