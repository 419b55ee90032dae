"""Lower a plan to straight-line programs: what each segment runs forward, saves, and runs backward.

Recomputation is placed right before the first use. What a backward reads from outside its segment is saved without
being asked for, and so is every value that cannot be made again; a plan can therefore never be wrong, only dear.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fxckpt.overwrite import mark_overwrites
from fxckpt.plan import Graph, Plan, Program, Segment, SegmentProgram, Step
from fxckpt.replay import Backward, Context

__all__ = ["schedule"]

MOST_KNOWN = 3_000  # segments; some ten kilobytes each


def schedule(
    graph: Graph, plan: Plan, tangents: frozenset[int] | None = None, known: dict[Any, Any] | None = None
) -> Program:
    """Lower ``plan``.

    Args:
        graph: the joint graph with costs.
        plan: segments that partition the forward positions.
        tangents: slots of outputs whose gradient is expected from outside; None means all of them. The backwards are
            made for these; autograd nodes that get no gradient are left out, so that what lies behind them gets None
            as in eager. What is saved serves every other pattern of gradients too.
        known: what was lowered before of the same graph for the same tangents; filled here, to be passed again.
            Candidate plans have most of their segments in common.

    Returns:
        One program per segment, in forward order.
    """
    possible = frozenset(index for index, slot in enumerate(graph.slots) if slot.tangent >= 0)
    expected = possible if tangents is None else tangents
    known = {} if known is None else known
    if len(known) > MOST_KNOWN:
        known.clear()
    if "contexts" not in known:
        context = Context(graph, possible)
        known["contexts"] = context, context if expected == possible else Context(graph, expected)
    context, likely = known["contexts"]
    programs: list[SegmentProgram] = []
    later = _Later(set(graph.outputs), set(), set(possible), set(expected))
    for segment in reversed(plan.segments):
        key = segment, later.seen_from(context, segment)
        if key not in known:
            known[key] = _SegmentLowering(context, likely, segment, later).lower()
        later.add(known[key])
        programs.append(known[key].program)
    return Program(tuple(reversed(programs)))


class _Lowered(NamedTuple):
    """A segment's program, and what it asks of those before it beside its inputs; see :class:`_Later`."""

    program: SegmentProgram
    backward: tuple[int, ...]
    slots: tuple[int, ...]
    arriving: tuple[int, ...]


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

    def add(self, lowered: _Lowered) -> None:
        """One more segment."""
        self.forward.update(lowered.program.inputs)
        self.backward.update(lowered.backward)
        self.slots.update(lowered.slots)
        self.arriving.update(lowered.arriving)

    def seen_from(self, context: Context, segment: Segment) -> tuple[frozenset[int], ...]:
        """All of it that matters to ``segment``."""
        values, slots = context.parts(segment.start, segment.stop)
        return values & self.forward, values & self.backward, slots & self.slots, slots & self.arriving


def _closure(context: Context, targets: set[int], start: int, stop: int) -> set[int]:
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
    def __init__(self, context: Context, likely: Context, segment: Segment, later: _Later) -> None:
        self.context, self.likely, self.graph = context, likely, context.graph
        self.segment, self.later = segment, later
        self.start, self.stop = segment.start, segment.stop

    def _inside(self, value: int) -> bool:
        return self.start <= self.context.position.get(value, -1) < self.stop

    def lower(self) -> _Lowered:
        graph, later = self.graph, self.later
        values, _ = self.context.parts(self.start, self.stop)
        outputs = set(values & later.forward | values & later.backward)
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
        added = dict.fromkeys(step.slot for step in steps if step.op == "add")
        return _Lowered(program, tuple(backward.external), tuple(returned.values()), tuple(added))

    def _backward(self, context: Context, available: set[int], tangents: list[int]) -> Backward:
        backward = Backward(context, self.start, self.stop)
        backward.available, backward.totals = set(available), set(tangents)
        backward.run(self.segment)
        return backward

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

    def _inputs(self, forward: list[Step], backward: Backward) -> list[int]:
        found: dict[int, None] = {}
        for step in forward:
            node = self.graph.nodes[step.value]
            found.update((source, None) for source in node.inputs + node.state_inputs if not self._inside(source))
        found.update(backward.external)
        return list(found)

    def _gradients(self, backward: Backward) -> tuple[dict[int, int], dict[int, int]]:
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
    live_out = set(results)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        defined = total(step.slot) if step.op in ("add", "zero") else step.value
        if step.op != "record" and defined not in last and defined not in live_out:
            frees[index].append(defined)
        redefined = step.op != "record" and not (step.op == "add" and defined in reads[index])
        if redefined:
            last.pop(defined, None)
            live_out.discard(defined)
        for value in reads[index]:
            if value not in last and value not in live_out:
                frees[index].append(value)
            last[value] = index
    found = [
        Step(step.op, step.value, step.slot, False, tuple(dict.fromkeys(frees[index])))
        for index, step in enumerate(steps)
    ]
    return mark_overwrites(graph, found, tangents)
