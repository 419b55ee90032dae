"""Lower a plan to straight-line programs: what each segment runs forward, saves, and runs backward.

Recomputation is placed right before the first use. What a backward reads from outside its segment is saved without
being asked for, and so is every value that cannot be made again; a plan can therefore never be wrong, only dear.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from fxckpt.overwrite import mark_overwrites
from fxckpt.plan import Graph, Plan, Program, Segment, SegmentProgram, Step

__all__ = ["schedule"]


def schedule(graph: Graph, plan: Plan, tangents: frozenset[int] | None = None) -> Program:
    """Lower ``plan``.

    Args:
        graph: the joint graph with costs.
        plan: segments that partition the forward positions.
        tangents: slots of outputs whose gradient is expected from outside; None means all of them. The backwards are
            made for these; autograd nodes that get no gradient are left out, so that what lies behind them gets None
            as in eager. What is saved serves every other pattern of gradients too.

    Returns:
        One program per segment, in forward order.
    """
    possible = frozenset(index for index, slot in enumerate(graph.slots) if slot.tangent >= 0)
    expected = possible if tangents is None else tangents
    context = _Context(graph, possible)
    likely = context if expected == possible else _Context(graph, expected)
    programs: list[SegmentProgram] = []
    later = _Later(set(graph.outputs), set(), set(possible), set(expected))
    for segment in reversed(plan.segments):
        programs.append(_SegmentLowering(context, likely, segment, later).lower())
    return Program(tuple(reversed(programs)))


class _Context:
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
        self.targets: dict[int, tuple[list[set[int]], dict[int, None]]] = {}  # by identity of a plan's chain
        running = [index for index, runs in enumerate(self.active) if runs]
        self.by_position = sorted((graph.grad_nodes[index].position, index) for index in running)

    def grad_nodes(self, start: int, stop: int) -> list[int]:
        """Indices of the autograd nodes that run and belong to positions ``start`` to ``stop``, in execution order."""
        first, last = bisect.bisect_left(self.by_position, (start,)), bisect.bisect_left(self.by_position, (stop,))
        return sorted(index for _, index in self.by_position[first:last])


class _Later:
    """What the segments behind the present one ask for.

    Attributes:
        forward: values that they read in forward, or that leave the region.
        backward: values that their backwards read.
        slots: gradients that they may contribute to.
        arriving: gradients that they contribute to if the expected ones come from outside.
    """

    def __init__(self, forward: set[int], backward: set[int], slots: set[int], arriving: set[int]) -> None:
        self.forward, self.backward, self.slots, self.arriving = forward, backward, slots, arriving


class _Backward:
    """Emits the backward of one segment, nested replays included."""

    def __init__(self, context: _Context, start: int, stop: int) -> None:
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
            result, forced = context.targets[id(chain)]
            self.forced.update(forced)
            return result
        before, self.forced = self.forced, {}
        result = []
        asked: set[int] = set()
        for inner in reversed(chain):
            probe = _Backward(context, inner.start, inner.stop)
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
        context.targets[id(chain)] = result, self.forced
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


def _closure(context: _Context, targets: set[int], start: int, stop: int) -> set[int]:
    """``targets`` and everything between ``start`` and ``stop`` that they are computed from."""
    needed: set[int] = set()
    stack = list(targets)
    while stack:
        value = stack.pop()
        if value in needed or not start <= context.position.get(value, -1) < stop:
            continue
        needed.add(value)
        stack += context.graph.nodes[value].inputs
    return needed


class _SegmentLowering:
    def __init__(self, context: _Context, likely: _Context, segment: Segment, later: _Later) -> None:
        self.context, self.likely, self.graph = context, likely, context.graph
        self.segment, self.later = segment, later
        self.start, self.stop = segment.start, segment.stop

    def _inside(self, value: int) -> bool:
        return self.start <= self.context.position.get(value, -1) < self.stop

    def lower(self) -> SegmentProgram:
        graph, later = self.graph, self.later
        outputs = {value for value in later.forward | later.backward if self._inside(value)}
        kept = {self.context.by_name[name] for name in self.segment.kept} - self.context.input_views
        free = {v for v in outputs - self.context.input_views if v in later.backward or graph.nodes[v].keepable}
        tangents = self._tangents(outputs)
        backward = self._backward(self.context, (kept | free) - {v for v in kept if graph.nodes[v].container}, tangents)
        saved = (backward.read & (kept | free)) | set(backward.forced)
        forward = self._forward(outputs | saved, set(backward.states))
        inputs = self._inputs(forward, backward)
        returned, passed = self._gradients(backward)
        inputs += [value for value in returned if value not in inputs]
        for value, slot in passed.items():
            outputs.add(value)
            tangents.append(slot)
        gradients = tuple(returned.get(value, -1) for value in inputs)
        arriving = [slot for slot in tangents if slot in later.arriving]
        steps = backward.steps if self.likely is self.context else self._backward(self.likely, saved, arriving).steps
        program = SegmentProgram(
            name=self.segment.name, inputs=tuple(inputs), outputs=tuple(sorted(outputs)),
            forward=_finish(graph, forward, outputs | saved, ()),
            saved=tuple(sorted(saved)) + tuple(backward.external), states=tuple(backward.states),
            tangents=tuple(tangents), expected=tuple(slot in later.arriving for slot in tangents),
            backward=_finish(graph, steps, {graph.total(slot) for slot in gradients if slot >= 0}, arriving),
            gradients=gradients,
        )  # fmt: skip
        self._update_later(inputs, backward, returned)
        self.later.arriving.update(step.slot for step in steps if step.op == "add")
        return program

    def _backward(self, context: _Context, available: set[int], tangents: list[int]) -> _Backward:
        backward = _Backward(context, self.start, self.stop)
        backward.available, backward.totals = set(available), set(tangents)
        backward.run(self.segment)
        return backward

    def _update_later(self, inputs: list[int], backward: _Backward, returned: dict[int, int]) -> None:
        self.later.forward.update(inputs)
        self.later.backward.update(backward.external)
        self.later.slots.update(returned.values())

    def _tangents(self, outputs: set[int]) -> list[int]:
        """Slots owned by this segment that later segments or the caller contribute to."""
        result = []
        for index in self.context.grad_nodes(self.start, self.stop):
            for slot in self.graph.grad_nodes[index].reads:
                if slot in self.later.slots and slot not in result:
                    result.append(slot)
                    outputs.add(self.graph.slots[slot].value)
        return result

    def _forward(self, targets: set[int], states: set[int]) -> list[Step]:
        required = {value for value in self.context.required if self._inside(value)}
        needed = _closure(self.context, targets | required, self.start, self.stop)
        steps: list[Step] = []
        for value in sorted(needed, key=self.context.position.__getitem__):
            if value in states:
                steps.append(Step("record", value))
            steps.append(Step("run", value))
        return steps

    def _inputs(self, forward: list[Step], backward: _Backward) -> list[int]:
        found: dict[int, None] = {}
        for step in forward:
            node = self.graph.nodes[step.value]
            found.update((source, None) for source in node.inputs + node.state_inputs if not self._inside(source))
        found.update(backward.external)
        return list(found)

    def _gradients(self, backward: _Backward) -> tuple[dict[int, int], dict[int, int]]:
        """Input -> slot that is returned for it; and the inputs that are passed through.

        The engine adds contributions one by one. Where this segment contributes twice to a sum that later segments
        have begun, the partial sum must come in first: the value goes through this segment, its gradient comes back.
        """
        counts: dict[int, int] = {}
        own = {slot for i in self.context.grad_nodes(self.start, self.stop) for slot in self.graph.grad_nodes[i].reads}
        for step in backward.steps:
            if step.op == "add" and step.slot not in own:
                counts[step.slot] = counts.get(step.slot, 0) + 1
        returned: dict[int, int] = {}
        passed: dict[int, int] = {}
        for slot, count in counts.items():
            value = self.graph.slots[slot].value
            if value < 0:
                continue
            returned[value] = slot
            if count > 1 and slot in self.later.slots:
                passed[value] = slot
        return returned, passed


def _finish(graph: Graph, steps: list[Step], results: set[int], tangents: Iterable[int]) -> tuple[Step, ...]:
    """Add to each step the values whose last use it is; ``results`` live on."""
    total = graph.total
    reads: list[tuple[int, ...]] = []
    started = {total(slot) for slot in tangents}
    for step in steps:
        if step.op == "add":
            reads.append((step.value, total(step.slot)) if total(step.slot) in started else (step.value,))
            started.add(total(step.slot))
        elif step.op == "zero":
            reads.append(())
            started.add(total(step.slot))
        elif step.op == "record":
            reads.append(())
        else:
            reads.append(graph.nodes[step.value].inputs)
    last: dict[int, int] = {}
    frees: list[list[int]] = [[] for _ in steps]
    live_out = results
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        defined = total(step.slot) if step.op in ("add", "zero") else step.value
        if step.op != "record" and defined not in last and defined not in live_out:
            frees[index].append(defined)
        redefined = step.op != "record" and not (step.op == "add" and defined in reads[index])
        if redefined:
            last.pop(defined, None)
            live_out = live_out - {defined}
        for value in reads[index]:
            if value not in last and value not in live_out:
                frees[index].append(value)
            last[value] = index
    found = [
        Step(step.op, step.value, step.slot, False, tuple(dict.fromkeys(frees[index])))
        for index, step in enumerate(steps)
    ]
    return mark_overwrites(graph, found, tangents)
