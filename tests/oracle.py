"""Graphs to plan for and slow, obvious answers to check the solvers by; torch is not needed.

Sizes are small integers: one unit of memory is one byte, one unit of time one second.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fxckpt.plan import GradNode, Graph, Node, Plan, Segment, Slot

__all__ = ["Builder", "Replay", "checkmate", "choices", "corners", "mlp", "partitions", "random_graph", "replay"]


@dataclass
class _Op:
    """A forward operation: its results, and for backward what it reads and the weight that gets a gradient."""

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    reads: tuple[int, ...]
    weight: int
    seconds: float


class Builder:
    """Builds a joint graph. Values are numbered as they are made; each operation has one autograd node.

    Backward of an operation runs one node per gradient; each reads the gradients of the results and the forward
    values ``reads``, in which -1 stands for the (first) result.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.ops: list[_Op] = []
        self.forward: list[int] = []

    def _value(self, name: str, phase: str, inputs: Iterable[int], sizes: Iterable[int], **options: Any) -> int:
        first = len(self.sizes)
        self.sizes += sizes
        new = tuple(range(first, len(self.sizes)))
        node = Node(
            name, phase=phase, inputs=tuple(inputs), **{"op": phase, "storages": new, "allocates": new, **options}
        )
        self.nodes.append(node)
        if phase == "forward":
            self.forward.append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def input(self, size: int = 1) -> int:
        """An input of the region that gets no gradient."""
        return self._value(f"in{len(self.nodes)}", "input", (), (size,))

    def op(
        self,
        *inputs: int,
        size: int = 1,
        seconds: float = 1.0,
        reads: Iterable[int] = (),
        weight: int = 0,
        grad: bool = True,
        **options: Any,
    ) -> int:
        """An operation with a result of ``size`` and, if ``weight`` is not 0, a parameter of that size."""
        parameter = self._value(f"w{len(self.nodes)}", "input", (), (weight,)) if weight else -1
        read = (*inputs, parameter) if weight else inputs
        value = self._value(f"op{len(self.nodes)}", "forward", read, (size,), seconds=seconds, **options)
        if grad:
            reads = tuple(value if number == -1 else number for number in reads)
            self.ops.append(_Op(inputs, (value,), reads, parameter, seconds))
        return value

    def view(self, value: int) -> int:
        """The same memory under another name, outside of backward's sight."""
        storages = self.nodes[value].storages
        name = f"op{len(self.nodes)}"
        view = self._value(name, "forward", (value,), (), storages=storages, allocates=(), view=True)
        self.ops.append(_Op((value,), (view,), (), -1, 0.0))
        return view

    def pair(self, *inputs: int, sizes: tuple[int, int], reads: Iterable[int] = (), seconds: float = 1.0) -> list[int]:
        """An operation with two results; ``reads`` may hold 0 and 1 for them."""
        both = self._value(f"op{len(self.nodes)}", "forward", inputs, sizes, seconds=seconds, container=True)
        results = []
        for storage in self.nodes[both].storages:
            name = f"op{len(self.nodes)}"
            item = self._value(name, "forward", (both,), (), storages=(storage,), allocates=(), view=True)
            results.append(item)
        self.ops.append(_Op(inputs, tuple(results), tuple(results[index] for index in reads), -1, seconds))
        return results

    def build(self, *outputs: int) -> Graph:
        """The graph that returns ``outputs``; each gets a gradient from outside."""
        fixed = sum(self.sizes[s] for node in self.nodes if node.phase == "input" for s in node.allocates)
        place = {value: position for position, value in enumerate(self.forward)}
        slots: list[Slot] = []
        slot_of: dict[int, int] = {}
        order = list(reversed(self.ops))
        for index, op in enumerate(order):
            for value in op.results:
                slot_of[value] = len(slots)
                tangent = self._tangent(value) if value in outputs else -1
                slots.append(Slot(value, index, tangent, self._size(value)))
        for op in order:
            if op.weight >= 0:
                slot_of[op.weight] = len(slots)
                slots.append(Slot(op.weight, -1, -1, self._size(op.weight)))
        grads: list[tuple[_Op, list[tuple[int, int]]]] = []
        for op in order:
            given = []
            for target in dict.fromkeys((*op.inputs, op.weight)):
                if target in slot_of:
                    arrives = [-1 - slot_of[value] for value in op.results]
                    name, size = f"b{len(self.nodes)}", self._size(target)
                    node = self._value(name, "backward", (*arrives, *op.reads), (size,), seconds=op.seconds)
                    given.append((slot_of[target], node))
            grads.append((op, given))
        count = len(self.nodes)
        nodes = tuple(
            dataclasses.replace(node, inputs=tuple(v if v >= 0 else count - 1 - v for v in node.inputs))
            for node in self.nodes
        )
        records = tuple(
            GradNode(
                self.nodes[op.results[0]].name, place[op.results[-1]], tuple(slot_of[value] for value in op.results),
                tuple(node for _, node in given), tuple(given),
            )
            for op, given in grads
        )  # fmt: skip
        return Graph(
            nodes, tuple(self.forward), records, tuple(slots), tuple(self.sizes), tuple(outputs),
            fixed_bytes=fixed, fixed=(("inputs", fixed),), **self.options,
        )  # fmt: skip

    def _size(self, value: int) -> int:
        return sum(self.sizes[storage] for storage in self.nodes[value].storages)

    def _tangent(self, value: int) -> int:
        return self._value(f"t{value}", "input", (), (self._size(value),), op="tangent")


def mlp(layers: int, width: int = 1, hidden: int = 1, weight: int = 0, **options: Any) -> Graph:
    """A chain of pairs: a matmul that reads its input in backward, an activation that reads its own."""
    builder = Builder(**options)
    value = builder.input()
    for _ in range(layers):
        product = builder.op(value, size=hidden, seconds=4.0, reads=(value,), weight=weight)
        value = builder.op(product, size=width, seconds=1.0, reads=(product,))
    return builder.build(value)


def random_graph(
    seed: int, count: int, reach: int = 3, pinned: float = 0.07, loose: bool = False, **options: Any
) -> Graph:
    """A graph of about ``count`` random operations; each reads some of the ``reach`` values before it.

    A share ``pinned`` of them cannot be recomputed. With ``loose`` some are there for backward only.
    """
    draw = random.Random(seed)
    builder = Builder(**options)
    values = [builder.input(draw.randrange(1, 4))]
    while len(builder.forward) < count:
        recent = values[-reach:]
        inputs = tuple(draw.sample(recent, min(len(recent), draw.choice((1, 1, 2)))))
        if values[-1] not in inputs and draw.random() < 0.7:
            inputs = (*inputs, values[-1])
        reads = tuple(value for value in (*inputs, -1) if draw.random() < 0.45)
        kind = draw.random()
        if kind < 0.12 and values[-1] != values[0]:
            values.append(builder.view(draw.choice(recent[-1:])))
        elif kind < 0.27:
            chosen = tuple(index for index in (0, 1) if draw.random() < 0.5)
            sizes = (draw.randrange(1, 8), draw.randrange(1, 8))
            values += builder.pair(*inputs, sizes=sizes, reads=chosen, seconds=draw.randrange(1, 9))
        else:
            flags = {"random": draw.random() < 0.1, "recomputable": draw.random() > pinned}
            flags["keepable"] = draw.random() > 0.05 or not flags["recomputable"] or -1 in reads
            size, weight = draw.randrange(1, 8), draw.choice((0, 0, 1, 3))
            seconds = float(draw.randrange(1, 9))
            values.append(builder.op(*inputs, size=size, seconds=seconds, reads=reads, weight=weight, **flags))
    read = {value for node in builder.nodes for value in node.inputs}
    return builder.build(*([] if loose else [v for v in values[1:-1] if v not in read]), values[-1])


@dataclass
class _Copy:
    """One allocation, alive from ``born`` to ``last``."""

    size: int
    born: int
    last: int


Copies = dict[int, _Copy]
"""Storage number: the allocation that holds it."""


@dataclass
class Replay:
    """What a training step takes."""

    peak_bytes: int
    extra_seconds: float


def replay(graph: Graph, plan: Plan) -> Replay:
    """Run the plan step by step: each allocation lives from the step that makes it to the last that touches it."""
    machine = _Machine(graph, plan)
    machine.run()
    return Replay(machine.peak(), machine.extra)


class _Machine:
    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.position = {value: position for position, value in enumerate(graph.forward)}
        self.names = {node.name: value for value, node in enumerate(graph.nodes)}
        self.time = 0
        self.copies: list[_Copy] = []
        self.scratch: dict[int, int] = {}
        self.overwritten: list[tuple[int, Copies]] = []
        self.extra = 0.0
        self.executed: set[int] = set()
        self.values: dict[int, Copies] = {}
        self.pending: dict[int, Copies] = {}

    def peak(self) -> int:
        for time, copies in self.overwritten:  # a sum takes the place of the old total if nothing else reads that
            if all(copy.last == time for copy in copies.values()):
                self.scratch[time] = self.scratch.get(time, 0) - sum(copy.size for copy in copies.values())
        live = [0] * (self.time + 2)
        for copy in self.copies:
            live[copy.born] += copy.size
            live[copy.last + 1] -= copy.size
        sums = itertools.accumulate(live)
        return self.graph.fixed_bytes + max(total + self.scratch.get(time, 0) for time, total in enumerate(sums))

    def _new(self, size: int) -> _Copy:
        self.copies.append(_Copy(size, self.time, self.time))
        return self.copies[-1]

    def _touch(self, copies: Copies) -> None:
        for copy in copies.values():
            copy.last = max(copy.last, self.time)

    def _inside(self, value: int, segment: Segment) -> bool:
        return segment.start <= self.position.get(value, -1) < segment.stop

    def _closure(self, targets: Iterable[int], segment: Segment) -> list[int]:
        found: set[int] = set()
        stack = list(targets)
        while stack:
            value = stack.pop()
            if value not in found and self._inside(value, segment):
                found.add(value)
                stack += self.graph.nodes[value].inputs
        return sorted(found, key=self.position.__getitem__)

    def _execute(self, value: int, values: dict[int, Copies], totals: dict[int, Copies]) -> None:
        node = self.graph.nodes[value]
        self.extra += node.seconds if value in self.executed else 0.0
        self.executed.add(value)
        sources: Copies = {}
        for read in node.inputs:
            count = len(self.graph.nodes)
            copies = totals.get(read - count, {}) if read >= count else values.get(read, {})
            self._touch(copies)
            sources |= copies
        made = {storage: self._new(self.graph.storage_bytes[storage]) for storage in node.allocates}
        values[value] = {s: made.get(s) or sources[s] for s in node.storages if s in made or s in sources}
        self.scratch[self.time] = node.workspace_bytes
        self.time += 1

    def run(self) -> None:
        graph, segments = self.graph, self.plan.segments
        probes = [_Probe(self, segment) for segment in segments]
        asked = set(graph.outputs)
        for probe in reversed(probes):
            outputs = {value for value in asked if self._inside(value, probe.segment)}
            probe.prepare(outputs)
            asked |= probe.external
        for probe in probes:
            for value in probe.forward:
                self._execute(value, self.values, {})
            for value in probe.external:
                self._touch(self.values.get(value, {}))
            kept = {v: c for v, c in self.values.items() if not self._inside(v, probe.segment)}
            self.values = kept | {v: self.values[v] for v in probe.leave}
        for slot, entry in enumerate(graph.slots):
            if entry.tangent >= 0:
                self.pending[slot] = {-1: self._new(entry.bytes)}
        outputs = [self.values[value] for value in graph.outputs if value in self.values]
        leaves: list[Copies] = []
        for probe in reversed(probes):
            self._backward(probe, leaves)
        for copies in outputs + (leaves if graph.fresh_gradients else []):
            self._touch(copies)

    def _backward(self, probe: _Probe, leaves: list[Copies]) -> None:
        """Run the steps of a segment's backward; gradients that come in stay until it returns."""
        graph = self.graph
        values = dict(self.values)
        grads = [g for g in graph.grad_nodes if probe.segment.start <= g.position < probe.segment.stop]
        own = {slot for grad in grads for slot in grad.reads}
        given = [slot for grad in grads for slot, _ in grad.contributes]
        through = {s for s in given if s in self.pending and (s in own or given.count(s) > 1)}
        totals = {slot: self.pending[slot] for slot in own | through if slot in self.pending}
        incoming = list(totals.values())
        for kind, what in probe.backward:
            if kind == "run":
                self._execute(what, values, totals)
            elif kind == "forget":
                values.pop(what, None)
            else:
                for slot, value in graph.grad_nodes[what].contributes:
                    if slot not in totals:
                        totals[slot] = dict(values[value])
                        self._touch(totals[slot])
                        continue
                    self._touch(totals[slot])
                    self._touch(values[value])
                    self.overwritten.append((self.time, totals[slot]))
                    totals[slot] = {-1: self._new(graph.slots[slot].bytes)}
                    self.time += 1
        for copies in [*incoming, *(totals[slot] for slot in totals if slot not in own)]:
            self._touch(copies)
        for slot in set(totals) - own:
            if slot not in self.pending or slot in through:
                self.pending[slot] = totals[slot]
                if graph.slots[slot].owner < 0:
                    leaves.append(totals[slot])
        self.time += 1


class _Probe:
    """What a segment runs and reads: ``backward`` is a list of values to run and autograd nodes to finish."""

    def __init__(self, machine: _Machine, segment: Segment) -> None:
        self.machine, self.graph, self.segment = machine, machine.graph, segment
        self.external: set[int] = set()
        self.backward: list[tuple[str, int]] = []
        self.available: set[int] = set()
        self.read: set[int] = set()

    def prepare(self, outputs: set[int]) -> None:
        """Find out what backward does, then what forward has to run for it."""
        machine = self.machine
        free = {value for value in outputs if self.graph.nodes[value].keepable}
        self.available = {machine.names[name] for name in self.segment.kept} | free
        self._segment(self.segment)
        self.leave = {value for value in self.read if machine._inside(value, self.segment)} | outputs
        required = [value for value in self.graph.required if machine._inside(value, self.segment)]
        self.forward = machine._closure([*self.leave, *required], self.segment)
        self.external |= {
            read
            for value in self.forward
            for read in self.graph.nodes[value].inputs
            if not machine._inside(read, self.segment)
        }

    def _segment(self, segment: Segment) -> None:
        if not segment.inner:
            self._leaf(segment)
            return
        # What a replay makes is made by the replay, even what later segments have been given.
        self.available -= {value for value in self.available if self.machine._inside(value, segment)}
        plans: list[list[int]] = []
        asked: set[int] = set()
        for inner in reversed(segment.inner):
            probe = _Probe(self.machine, inner)
            outputs = {value for value in asked if self.machine._inside(value, inner)}
            probe.available = {self.machine.names[name] for name in inner.kept} | outputs
            probe._segment(inner)
            leave = {value for value in probe.read if self.machine._inside(value, inner)} | outputs
            forward = self.machine._closure(leave, inner)
            asked |= probe.external | {read for value in forward for read in self.graph.nodes[value].inputs}
            plans.append([*forward, -1, *leave])
        for plan in reversed(plans):
            cut = plan.index(-1)
            for value in plan[:cut]:
                self._run(value)
            for value in plan[:cut]:
                if value not in plan[cut:]:
                    self._forget(value)
        for inner in reversed(segment.inner):
            self._segment(inner)
            for value in sorted(self.available):
                if self.machine._inside(value, inner):
                    self._forget(value)

    def _forget(self, value: int) -> None:
        self.available.discard(value)
        self.backward.append(("forget", value))

    def _run(self, value: int) -> None:
        self.backward.append(("run", value))
        self.available.add(value)
        for read in self.graph.nodes[value].inputs:
            if not self.machine._inside(read, self.segment):
                self.external.add(read)
            elif read in self.available:
                self.read.add(read)

    def _leaf(self, segment: Segment) -> None:
        grads = [i for i, g in enumerate(self.graph.grad_nodes) if segment.start <= g.position < segment.stop]
        wanted = self._wanted(grads)
        for index in grads:
            for node in self.graph.grad_nodes[index].nodes:
                for read in self.graph.nodes[node].inputs:
                    self._need(read, wanted)
                self.backward.append(("run", node))
            self.backward.append(("finish", index))

    def _wanted(self, grads: Iterable[int]) -> set[int]:
        nodes = self.graph.nodes
        stack = [read for i in grads for node in self.graph.grad_nodes[i].nodes for read in nodes[node].inputs]
        wanted: set[int] = set()
        while stack:
            value = stack.pop()
            if value not in wanted and self.machine._inside(value, self.segment) and value not in self.available:
                wanted.add(value)
                stack += nodes[value].inputs
        return wanted

    def _need(self, value: int, wanted: set[int]) -> None:
        if value >= len(self.graph.nodes) or self.graph.nodes[value].phase == "backward":
            return
        if not self.machine._inside(value, self.segment):
            self.external.add(value)
        elif value in self.available:
            self.read.add(value)
        elif not self.graph.nodes[value].recomputable:
            self.read.add(value)
            self.available.add(value)
        else:
            for read in self.graph.nodes[value].inputs:
                self._need(read, wanted)
            self._run(value)
            if self.graph.nodes[value].container:
                for item in sorted(wanted - self.available):
                    if value in self.graph.nodes[item].inputs:
                        self._run(item)


def choices(graph: Graph, start: int, stop: int, boundary: Iterable[int]) -> set[tuple[int, int]]:
    """All ``(kept bytes, extra seconds)`` that keeping some of the storages of a window can lead to."""
    nodes = graph.nodes
    makers = {s: v for v in graph.forward[start:stop] for s in nodes[v].allocates}
    values = [value for value in graph.forward[start:stop] if not nodes[value].container]
    items = {storage: value for value in reversed(values) for storage in nodes[value].storages}
    needs: set[int] = set()
    for grad in graph.grad_nodes:
        if start <= grad.position < stop:
            reads = {read for node in grad.nodes for read in nodes[node].inputs if read < len(nodes)}
            needs |= {storage for read in reads for storage in nodes[read].storages if storage in makers}
    run: set[int] = set()
    stack = [*graph.outputs, *graph.required]
    while stack:
        value = stack.pop()
        if value not in run:
            run.add(value)
            stack += nodes[value].inputs

    def keepable(storage: int) -> bool:
        return storage in items and (nodes[items[storage]].keepable or not nodes[makers[storage]].recomputable)

    free = {storage for storage in boundary if storage in makers and keepable(storage)}
    options = [storage for storage in makers if keepable(storage) and storage not in free]
    found: set[tuple[int, int]] = set()
    for number in range(len(options) + 1):
        for kept in itertools.combinations(options, number):
            again: set[int] = set()
            stack = list(needs)
            while stack:
                storage = stack.pop()
                made = storage in makers and storage not in free and storage not in kept
                if made and makers[storage] not in again:
                    again.add(makers[storage])
                    stack += (s for read in nodes[makers[storage]].inputs for s in nodes[read].storages)
            if all(nodes[value].recomputable for value in again):
                states = sum(graph.state_bytes for value in again if nodes[value].random)
                seconds = sum(nodes[value].seconds for value in again if value in run)
                found.add((sum(graph.storage_bytes[s] for s in kept) + states, round(seconds)))
    return found


def corners(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Corners of the lower hull of (bytes, seconds), the fastest first."""
    chain: list[tuple[int, int]] = []
    best = None
    for size, seconds in sorted(set(points)):
        if best is not None and seconds >= best:
            continue
        best = seconds
        while len(chain) > 1:
            (a, b), (c, d) = chain[-2:]
            if (d - b) * (size - a) < (seconds - b) * (c - a):
                break
            chain.pop()
        chain.append((size, seconds))
    return chain[::-1]


def partitions(count: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut ``count`` stages into runs."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        edges = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), count]
        yield list(itertools.pairwise(edges))


def checkmate(graph: Graph, budget: int) -> float | None:
    """Least seconds of recomputation of any schedule within ``budget`` bytes, None if there is none.

    The mixed integer program of Jain et al., "Checkmate", 2020, in which only forward results are made again: stage
    ``t`` ends with the first run of the ``t``-th operation, ``R[t, i]`` says that it runs ``i``, ``S[t, i]`` that
    ``i`` is there when it begins, ``F[t, i, k]`` that ``i`` is freed after ``k`` has run. For chains: every gradient
    has one contribution.
    """
    return _Checkmate(graph, budget).solve()


class _Checkmate:
    def __init__(self, graph: Graph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.first = [value for value in graph.forward if value not in graph.outputs]
        self.order = [*graph.forward, *(node for grad in graph.grad_nodes for node in grad.nodes)]
        self.index: dict[tuple[object, ...], int] = {}
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def _size(self, value: int) -> int:
        return sum(self.graph.storage_bytes[storage] for storage in self.graph.nodes[value].allocates)

    def _variable(self, *key: object) -> int:
        return self.index.setdefault(key, len(self.index))

    def _row(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def _always(self, stage: int, last: bool) -> int:
        """Bytes in memory whatever is decided: inputs, results of the region, gradients; ``last``: its own too."""
        graph, count = self.graph, len(self.graph.nodes)
        place = {value: index for index, value in enumerate(self.order)}
        total = graph.fixed_bytes + sum(self._size(value) for value in graph.outputs if place[value] < stage + last)
        contributions = {value: slot for grad in graph.grad_nodes for slot, value in grad.contributes}
        for slot, entry in enumerate(graph.slots):
            readers = [place[v] for v in self.order if count + slot in graph.nodes[v].inputs]
            end = max(readers) if readers else len(self.order)
            starts = [place[value] for value, given in contributions.items() if given == slot]
            begin = len(graph.forward) - 1 if entry.tangent >= 0 else min(starts)
            total += entry.bytes if begin < stage + last and stage <= end else 0
        return total

    def solve(self) -> float | None:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        for stage, value in enumerate(self.order):
            self._stage(stage, value)
        matrix = np.zeros((len(self.rows), len(self.index)))
        for number, row in enumerate(self.rows):
            for variable, factor in row.items():
                matrix[number, variable] = factor
        price = np.zeros(len(self.index))
        for key, variable in self.index.items():
            if key[0] == "R":
                price[variable] = self.graph.nodes[int(str(key[2]))].seconds
        result = milp(
            price, integrality=np.ones(len(price)), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
        )  # fmt: skip
        if not result.success:
            return None
        return float(result.fun) - sum(self.graph.nodes[value].seconds for value in self.order)

    def _stage(self, stage: int, value: int) -> None:
        """Rows of one stage: what must be there when something runs, and the memory after each step."""
        known = [v for v in self.first if self.order.index(v) < stage]
        runs = [*known, value]
        for v in known:
            self._variable("R", stage, v)
            kept = self._variable("S", stage, v)
            before = {self._variable("S", stage - 1, v): -1.0} if self.order.index(v) < stage - 1 else {}
            self._row({kept: 1.0, **before, self._variable("R", stage - 1, v): -1.0}, -9, 0)
        own = self._variable("R", stage, value)
        self._row({own: 1.0}, 1, 1)
        reads = {v: [r for r in self.graph.nodes[v].inputs if r in self.first] for v in runs}
        for v in runs:
            for read in reads[v]:
                there = {self._variable("R", stage, read): -1.0, self._variable("S", stage, read): -1.0}
                self._row({self._variable("R", stage, v): 1.0, **there}, -9, 0)
        memory = {self._variable("S", stage, v): float(self._size(v)) for v in known}
        for v in runs:
            if v in self.first:
                variable = self._variable("R", stage, v)
                memory[variable] = memory.get(variable, 0.0) + self._size(v)
            self._row(dict(memory), -float("inf"), self.budget - self._always(stage, v == value))
            for freed in (*reads[v], v):
                if freed in self.first:
                    variable = self._freed(
                        stage, freed, v, [w for w in runs if self.order.index(w) > self.order.index(v)]
                    )
                    memory[variable] = -float(self._size(freed))

    def _freed(self, stage: int, freed: int, after: int, later: list[int]) -> int:
        """The variable of a free, true if and only if the value is used no more."""
        variable = self._variable("F", stage, freed, after)
        uses = {self._variable("R", stage, v): 1.0 for v in later if freed in self.graph.nodes[v].inputs}
        if stage + 1 < len(self.order):
            uses[self._variable("S", stage + 1, freed)] = 1.0
        ran = self._variable("R", stage, after)
        # h = (1 - R) + uses;  1 - F <= h <= most * (1 - F)
        most = len(uses) + 1.0
        self._row({variable: 1.0, ran: -1.0, **uses}, 0, 99)
        self._row({variable: most, ran: -1.0, **uses}, -99, most - 1)
        return variable
