"""Programs are run by a machine that knows nothing of how they were made: every read must find a valid value."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from fxckpt import replay
from fxckpt.passes.cuts import cuts
from fxckpt.passes.schedule import schedule
from fxckpt.plan import Graph, Plan, Program, Segment, SegmentProgram, Step
from tests.oracle import Builder, mlp, random_graph


class Memory:
    """One allocation; a write in place makes all earlier values that lie in it invalid."""

    def __init__(self) -> None:
        self.version = 0


Value = dict[int, tuple[Memory, int]]
"""Storage number: where it is, and the version that holds this value."""


class Machine:
    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph, self.program = graph, program
        self.held: dict[int, Value] = {}
        for index, node in enumerate(graph.nodes):
            if node.phase == "input":
                self.held[index] = {storage: (Memory(), 0) for storage in node.storages}
        self.saved: list[dict[int, Value]] = []
        self.again: list[int] = []
        self.added: dict[int, list[int]] = {}
        self.ran: list[int] = []
        self.totals: dict[int, Value] = {}
        self.env: dict[int, Value] = {}
        self.states: set[int] = set()

    def step(self) -> None:
        """Forward, then backward; what the caller and autograd hold must be valid to the end."""
        for segment in self.program.segments:
            self._forward(segment)
        for value in self.graph.outputs:
            _check(self.held[value], f"output {value}")
        tangents = {slot: {-1: (Memory(), 0)} for slot, s in enumerate(self.graph.slots) if s.tangent >= 0}
        self.totals.update(tangents)
        for segment, saved in zip(self.program.segments[::-1], self.saved[::-1], strict=True):
            self._backward(segment, saved)
        for kept in [self.held, tangents, *self.saved]:
            for name, value in kept.items():
                _check(value, f"{name}, which is held from outside,")

    def _forward(self, segment: SegmentProgram) -> None:
        self.env = {value: self.held[value] for value in segment.inputs}
        self.states = set()
        self._run(segment.forward, forward=True)
        self.held.update({value: self._read(value) for value in segment.outputs})
        given = {value: self.held[value] for value in segment.inputs}  # lives on after its last use in forward
        self.env = {**given, **self.env}
        self.saved.append({value: self._read(value) for value in segment.saved})
        assert set(segment.states) <= self.states

    def _backward(self, segment: SegmentProgram, saved: dict[int, Value]) -> None:
        self.env, self.states = dict(saved), set(segment.states)
        for slot in segment.tangents:
            self.env[self.graph.total(slot)] = self.totals.pop(slot)
        self._run(segment.backward, forward=False)
        for value, slot in zip(segment.inputs, segment.gradients, strict=True):
            if slot >= 0:
                assert self.graph.slots[slot].value == value
                total = self._read(self.graph.total(slot))
                assert slot not in self.totals or len(self.added[slot]) > 1
                self.totals[slot] = total

    def _read(self, value: int) -> Value:
        assert value in self.env, f"{value} is read and not there"
        _check(self.env[value], str(value))
        return self.env[value]

    def _run(self, steps: Iterable[Step], forward: bool) -> None:
        for step in steps:
            if step.op in ("add", "zero"):
                self._add(step)
            elif step.op == "record":
                self.states.add(step.value)
            else:
                self._execute(step, forward)
            for value in step.frees:
                assert value in self.env, f"{value} is freed and not there"
                del self.env[value]

    def _execute(self, step: Step, forward: bool) -> None:
        node = self.graph.nodes[step.value]
        sources: Value = {}
        for source in node.inputs:
            sources |= self._read(source)
        if node.phase == "forward" and not forward:
            assert node.recomputable
            assert (step.op == "replay") == node.random
            assert not node.random or step.value in self.states
            self.again.append(step.value)
        elif node.phase == "backward":
            self.ran.append(step.value)
        value = {storage: sources[storage] for storage in node.storages if storage not in node.allocates}
        if step.inplace:
            memory, _ = next(iter(self._read(node.inputs[0]).values()))
            memory.version += 1
            value = dict.fromkeys(node.allocates, (memory, memory.version))
        else:
            value |= {storage: (Memory(), 0) for storage in node.allocates}
        self.env[step.value] = value

    def _add(self, step: Step) -> None:
        total = self.graph.total(step.slot)
        if step.op == "zero":
            self.env[total] = {-1: (Memory(), 0)}
            return
        part = self._read(step.value)
        self.added.setdefault(step.slot, []).append(step.value)
        if total not in self.env:
            self.env[total] = part
        elif step.inplace:
            memory, _ = next(iter(self._read(total).values()))
            memory.version += 1
            self.env[total] = {-1: (memory, memory.version)}
        else:
            self._read(total)
            self.env[total] = {-1: (Memory(), 0)}


def _check(value: Value, name: str) -> None:
    assert all(memory.version == version for memory, version in value.values()), f"{name} was written over"


def _graph(seed: int) -> Graph:
    """A random graph, half of whose operations may write over their first input."""
    graph = random_graph(seed, 14, reach=4)
    draw = random.Random(seed)
    nodes = tuple(
        dataclasses.replace(node, inplace=draw.random() < 0.6 and len(node.allocates) == 1 and bool(node.inputs))
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes)


def _plan(graph: Graph, seed: int, nested: bool) -> Plan:
    """Random cuts, random values kept; ``nested`` replays what lies between some of them."""
    draw = random.Random(seed)
    stages = cuts(graph).stages
    names = [node.name for node in graph.nodes if not node.container]

    def group(first: int, last: int, depth: int) -> tuple[Segment, ...]:
        ends = [i for i in range(first + 1, last) if draw.random() < 0.4] + [last]
        segments = []
        for low, high in zip([first, *ends], ends, strict=False):
            start, stop = stages[low].start, stages[high - 1].stop
            own = {graph.nodes[value].name for value in graph.forward[start:stop]}
            kept = tuple(name for name in names if name in own and draw.random() < 0.3)
            deeper = depth and high - low > 1 and draw.random() < 0.7
            segments.append(Segment(start, stop, () if deeper else kept, group(low, high, depth - 1) if deeper else ()))
        return tuple(segments)

    return Plan("dp", group(0, len(stages), 2 if nested else 0))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_program_of_a_random_graph_runs(seed: int, nested: bool) -> None:
    graph = _graph(seed)
    program = schedule(graph, _plan(graph, seed, nested))
    machine = Machine(graph, program)
    machine.step()
    assert sorted(machine.ran) == sorted(node for grad in graph.grad_nodes for node in grad.nodes)
    wanted: dict[int, list[int]] = {}
    for grad in graph.grad_nodes:
        for slot, value in grad.contributes:
            if graph.slots[slot].owner != -2:
                wanted.setdefault(slot, []).append(value)
    assert machine.added == wanted  # in the order in which the engine adds
    if not nested:
        assert len(set(machine.again)) == len(machine.again)
        kept = {value for saved in machine.saved for value in saved}
        assert not kept & {value for value in machine.again if not graph.nodes[value].view}


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_saved_that_backward_does_not_read(seed: int) -> None:
    graph = _graph(seed)
    for segment in schedule(graph, _plan(graph, seed, False)).segments:
        read = {v for step in segment.backward if step.op != "add" for v in graph.nodes[step.value].inputs}
        assert set(segment.saved) <= read
        assert not set(segment.states) - {step.value for step in segment.backward if step.op == "replay"}


def _names(graph: Graph, steps: Iterable[Step]) -> list[str]:
    return [graph.nodes[step.value].name for step in steps if step.op in ("run", "replay")]


def test_recomputation_comes_right_before_the_first_use() -> None:
    builder = Builder()
    x = builder.input()
    a = builder.op(x, reads=(-1,), weight=1)
    b = builder.op(a, reads=(-1,), weight=1)
    c = builder.op(b, reads=(b,), weight=1)
    graph = builder.build(c)
    (segment,) = schedule(graph, Plan("dp", (Segment(0, 3),))).segments
    forward = [graph.nodes[value].name for value in (a, b, c)]
    assert _names(graph, segment.forward) == forward
    backward = _names(graph, segment.backward)
    again = [name for name in backward if name in forward]
    assert again == forward[:2]
    first_reader = next(i for i, name in enumerate(backward) if name.startswith("b"))
    assert backward[:first_reader] == again
    keeping = schedule(graph, Plan("dp", (Segment(0, 3, tuple(forward)),))).segments[0]
    assert not [name for name in _names(graph, keeping.backward) if name in forward]
    assert set(keeping.saved) >= {a, b}


def test_values_that_cannot_be_made_again_are_saved_unasked() -> None:
    builder = Builder()
    x = builder.input()
    a = builder.op(x, reads=(-1,), weight=1, recomputable=False)
    b = builder.op(a, reads=(a,), weight=1, random=True)
    c = builder.op(b, reads=(b,), weight=1)
    graph = builder.build(c)
    (segment,) = schedule(graph, Plan("dp", (Segment(0, 3),))).segments
    assert a in segment.saved
    assert segment.states == (b,)
    ops = [(step.op, step.value) for step in segment.forward]
    assert ops.index(("record", b)) == ops.index(("run", b)) - 1
    assert ("replay", b) in [(step.op, step.value) for step in segment.backward]


def test_gradients_that_do_not_come_leave_out_what_is_behind_them() -> None:
    builder = Builder()
    x = builder.input()
    trunk = builder.op(x, reads=(x,), weight=1)
    left, right = builder.op(trunk, reads=(trunk,), weight=1), builder.op(trunk, reads=(trunk,), weight=2)
    graph = builder.build(left, right)
    slots = {s.value: index for index, s in enumerate(graph.slots)}
    plan = Plan("dp", (Segment(0, 3, ("op2", "op4", "op6")),))
    program = schedule(graph, plan, frozenset({slots[left]}))
    (segment,) = program.segments
    assert segment.expected == tuple(slot == slots[left] for slot in segment.tangents)
    owner = {node: grad.name for grad in graph.grad_nodes for node in grad.nodes}
    ran = {owner[step.value] for step in segment.backward if step.op == "run" and step.value in owner}
    assert ran == {graph.nodes[trunk].name, graph.nodes[left].name}
    assert schedule(graph, plan, frozenset()).segments[0].backward == ()
    assert schedule(graph, plan).segments[0].saved == segment.saved  # serves other patterns too


def test_a_chain_of_many_stages_is_lowered_without_recursion() -> None:
    graph = mlp(2000)
    (segment,) = schedule(graph, Plan("dp", (Segment(0, len(graph.forward)),))).segments
    assert len(segment.forward) == 4000


def test_a_saved_view_of_what_is_recomputed_is_not_written_over() -> None:
    builder = Builder()
    a = builder.op(builder.input(3), weight=1, size=3)
    saved = builder.view(a)
    b = builder.op(builder.view(saved), reads=(-1,), size=3, inplace=True)
    graph = builder.build(builder.op(a, b, reads=(a,), weight=1, size=3))
    plan = Plan("dp", (Segment(0, len(graph.forward), (graph.nodes[saved].name,)),))
    Machine(graph, schedule(graph, plan)).step()


def test_deeply_nested_plans_are_lowered_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp(40)
    visits = []
    run = replay.Backward.run
    monkeypatch.setattr(replay.Backward, "run", lambda self, segment: (visits.append(segment), run(self, segment)))
    inner: tuple[Segment, ...] = ()
    end = len(graph.forward)
    free = [position for position in range(1, end) if not any(low < position <= high for low, high in graph.forbidden)]
    for start in reversed(free[:-1]):  # each level holds one stage and the rest
        rest = Segment(start, end, inner=inner)
        before = max((position for position in free if position < start), default=0)
        inner = (Segment(before, start), rest)
    plan = Plan("dp", (Segment(0, end, inner=inner),))
    machine = Machine(graph, schedule(graph, plan))
    machine.step()
    depth = len(free) - 1
    assert depth > 20
    assert len(visits) < 4 * depth**2


@pytest.mark.parametrize("seed", range(20))
def test_segments_that_were_lowered_before_are_those_of_a_fresh_start(seed: int) -> None:
    graph = _graph(seed)
    tangents = frozenset(slot for slot, entry in enumerate(graph.slots) if entry.tangent >= 0 and slot % 2 == seed % 2)
    for some in (None, tangents):
        known: dict[Any, Any] = {}
        for number in range(12):
            plan = _plan(graph, number % 7, nested=number % 2 == 0)
            assert schedule(graph, plan, some, known) == schedule(graph, plan, some)
        assert any(key != "contexts" for key in known)
