"""What each stage, and each short run of stages, can keep for backward, and what that costs.

Points are the corners of the lower convex hull of (kept bytes, extra seconds), found by parametric minimum cuts
(:mod:`fxckpt.hull`); their peaks come from going through the instructions one by one. Menus of several options for
each stage, to be combined by dynamic programming: Zhao et al., "Rockmate", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fxckpt.hull import Operation, Storage, hull
from fxckpt.moments import Course, Growth, Recipe, Step
from fxckpt.plan import Chain, Graph, MenuPoint

__all__ = ["menu"]

TICKS = 10**12  # per second; times are integers inside the cuts
NEVER = 10**9  # later than any instruction
WIDE = 500  # positions in the widest window of several stages
WORK = 100_000  # operations to go through for the points of one stage, so that one huge stage takes seconds


class _Op(NamedTuple):
    """A forward operation in window numbering: ``reads`` and ``makes`` are storages; views do not appear."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    ticks: int
    workspace: int
    over: int
    random: bool
    recomputable: bool
    runs: bool


class _Storage(NamedTuple):
    """Memory that forward creates in the window.

    Attributes:
        crosses: later stages or the caller read it, so that it is kept whatever the window does.
        free: backward may read it without charge, as it crosses and nobody overwrites it.
        keepable: it may be kept.
        needed: backward of the window reads it.
        held: it leaves the region, and is alive throughout backward.
        passing: it leaves the region, and is alive until the end of forward.
    """

    size: int
    crosses: bool
    free: bool
    keepable: bool
    needed: bool
    held: bool
    passing: bool


class _Window(NamedTuple):
    """A run of stages in its own numbering: equal for windows of equal structure, whose menus are the same.

    ``returned`` is gradient memory that outlives the window's backward, ``leaves`` that of parameters among it.
    """

    ops: tuple[_Op, ...]
    storages: tuple[_Storage, ...]
    backward: tuple[Step, ...]
    returned: tuple[int, ...]
    leaves: tuple[int, ...]
    state_bytes: int


class _Choice(NamedTuple):
    """A point in window numbering, with the names of what is alive in the moments that may be its peaks."""

    kept: tuple[int, ...]
    kept_bytes: int
    ticks: int
    idle: int
    forward_peak: int
    backward_peak: int
    forward: list[list[int]]
    backward: list[list[int]]
    beyond: list[int]
    again: list[int]
    unused: list[int]


def menu(
    graph: Graph, chain: Chain, widest: int = 6, most: int = 16, ends: Sequence[int] = ()
) -> tuple[tuple[MenuPoint, ...], ...]:
    """For each stage the points of every window of up to ``widest`` stages that starts with it.

    A point is a set of kept values that no other set, and no mixture of two, beats in both kept bytes and extra
    seconds; among them are the cheapest way to recompute nothing and the fastest way to keep the least. A window of
    several stages gets at most ``most`` of its points, the most telling ones; so does a stage of thousands of nodes.
    What comes from before the window, and the window's own results that cross its end, are free to read in backward.
    One minimum cut per point and one per gap between two; windows of equal structure are solved once.

    Args:
        graph: with costs.
        chain: its stages.
        widest: stages in the widest window.
        most: points of a window of more than one stage.
        ends: positions at which plans are cut later, also inside windows: what is read beyond them has to be kept.
    """
    known: dict[_Window, tuple[tuple[_Choice, ...], Recipe]] = {}
    components: dict[object, object] = {}
    reader = _Reader(graph, ends)
    menus: list[tuple[MenuPoint, ...]] = []
    for first in range(len(chain.stages)):
        points: list[MenuPoint] = []
        for last in range(first, min(first + widest, len(chain.stages))):
            start, end = chain.stages[first].start, chain.stages[last]
            if last > first and end.stop - start > WIDE:
                break
            window, keepers, parts, operations = reader.window(start, end.stop, end.boundary)
            if window not in known:
                limit = most if last > first else max(most, WORK // (1 + len(window.ops)))
                choices = _solve(window, limit, components)
                known[window] = choices, _recipe(choices)
            growth = Growth(known[window][1], parts, operations)
            for choice in known[window][0]:
                points.append(
                    MenuPoint(
                        kept=tuple(keepers[storage] for storage in choice.kept),
                        kept_bytes=choice.kept_bytes,
                        extra_seconds=choice.ticks / TICKS,
                        forward_peak_bytes=choice.forward_peak,
                        backward_peak_bytes=choice.backward_peak,
                        stages=last - first + 1,
                        idle_seconds=choice.idle / TICKS,
                        growth=growth,
                    )
                )
        menus.append(tuple(points))
    return tuple(menus)


class _Reader:
    """Cuts windows out of the graph."""

    def __init__(self, graph: Graph, ends: Sequence[int]) -> None:
        self.graph = graph
        self.passed = _passed(graph, ends)
        self.held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
        self.passing = {storage for value in graph.passing for storage in graph.nodes[value].storages}
        self.runs = graph.executed()
        self.keepers: dict[int, int] = {}
        for value in graph.forward:
            if not graph.nodes[value].container:
                for storage in graph.nodes[value].storages:
                    self.keepers.setdefault(storage, value)
        self.grads: list[list[int]] = [[] for _ in graph.forward]
        # The position from which on a slot has a total; NEVER for gradients that come from outside.
        self.first = [NEVER if slot.tangent >= 0 else -1 for slot in graph.slots]
        for index, grad in enumerate(graph.grad_nodes):
            self.grads[grad.position].append(index)
            for slot, _ in grad.contributes:
                self.first[slot] = max(self.first[slot], grad.position)

    def window(
        self, start: int, stop: int, boundary: Iterable[int]
    ) -> tuple[_Window, list[int], tuple[int, ...], tuple[int, ...]]:
        """The window of positions ``start`` to ``stop``, and what its numbers stand for.

        Returns:
            The window; for each of its storages the value to keep for it; for each name of memory its entry in
            :meth:`fxckpt.plan.Graph.part_bytes`; for each operation its value.
        """
        nodes = self.graph.nodes
        values = self.graph.forward[start:stop]
        local: dict[int, int] = {}
        for value in values:
            for storage in nodes[value].allocates:
                local[storage] = len(local)
        executed = [v for v in values if nodes[v].allocates or not (nodes[v].view or nodes[v].container)]
        ops = [self._op(value, local, range(start + 1, stop)) for value in executed]
        parts = [*local, *(self.graph.part_of_scratch(value) for value in executed)]
        backward, returned, leaves = self._backward(start, stop, local, parts)
        needed = {storage for step in backward for storage in step.needs}
        pinned = {storage for op in ops if not op.recomputable for storage in op.makes}
        crossing = set(boundary)
        keepers = [self.keepers.get(storage, -1) for storage in local]
        storages: list[_Storage] = []
        for (storage, number), keeper in zip(local.items(), keepers, strict=True):
            keepable = keeper >= 0 and (nodes[keeper].keepable or number in pinned)
            crosses = storage in crossing
            size, held = self.graph.storage_bytes[storage], storage in self.held
            flags = crosses, crosses and keepable, keepable, number in needed, held, storage in self.passing
            storages.append(_Storage(size, *flags))
        window = _Window(tuple(ops), tuple(storages), backward, returned, leaves, self.graph.state_bytes)
        return window, keepers, tuple(parts), tuple(executed)

    def _op(self, value: int, local: dict[int, int], inside: range) -> _Op:
        node = self.graph.nodes[value]
        runs = value in self.runs
        ticks = round(node.seconds * TICKS) if runs else 0
        reads, makes = self._locals(node.inputs, local), tuple(local[storage] for storage in node.allocates)
        over = self._locals(node.inputs[:1], local) if node.inplace else ()
        first = over[0] if len(over) == 1 else -1
        again = node.recomputable and not any(end in inside for end in self.passed.get(value, ()))
        return _Op(reads, makes, ticks, node.workspace_bytes, first, node.random, again, runs)

    def _locals(self, values: Iterable[int], local: dict[int, int]) -> tuple[int, ...]:
        """Storages of the window that ``values`` live in."""
        nodes = self.graph.nodes
        storages = (storage for value in values if value < len(nodes) for storage in nodes[value].storages)
        return tuple(dict.fromkeys(local[storage] for storage in storages if storage in local))

    def _backward(
        self, start: int, stop: int, local: dict[int, int], parts: list[int]
    ) -> tuple[tuple[Step, ...], tuple[int, ...], tuple[int, ...]]:
        """Steps of the window's backward, the gradient memory that outlives them, and of that the leaves'.

        Its memory gets the next names; ``parts`` gets an entry for each.
        """
        graph = self.graph
        made: dict[int, int] = {}  # storage of the graph: gradient memory
        totals: dict[int, tuple[int, ...]] = {}  # slot: gradient memory of its total
        steps: list[Step] = []

        def new(part: int) -> int:
            parts.append(part)
            return len(parts) - 1

        def memory(values: Iterable[int]) -> tuple[int, ...]:
            found: list[int] = []
            for value in values:
                if value >= len(graph.nodes):
                    found += totals.get(value - len(graph.nodes), ())
                else:
                    found += (made[storage] for storage in graph.nodes[value].storages if storage in made)
            return tuple(found)

        inside = [graph.grad_nodes[index] for index in sorted(i for grads in self.grads[start:stop] for i in grads)]
        consumed = {slot for grad in inside for slot in grad.reads}
        for grad in inside:
            for value in grad.nodes:
                node = graph.nodes[value]
                reads, over = memory(node.inputs), memory(node.inputs[:1]) if node.inplace else ()
                made.update((storage, new(storage)) for storage in node.allocates)
                if node.view and len(reads) == 1:  # a view of a total, which has no storage in the graph
                    made.update((storage, reads[0]) for storage in node.storages if storage not in made)
                makes = tuple((made[storage], graph.storage_bytes[storage]) for storage in node.allocates)
                first = over[0] if len(over) == 1 else -1
                needs, size = self._locals(node.inputs, local), sum(size for _, size in makes)
                scratch = new(graph.part_of_scratch(value))
                steps.append(Step(needs, reads, makes, size, node.workspace_bytes, first, scratch))
            for slot, value in grad.contributes:
                if graph.slots[slot].owner < -1:  # nobody wants it
                    continue
                # What later stages began comes in if it is consumed here; to the rest the engine adds in place.
                if slot not in totals and (slot not in consumed or self.first[slot] < stop):
                    totals[slot] = memory([value])
                    continue
                old, fresh = totals.get(slot, ()), new(graph.part_of_total(slot))
                first = old[0] if len(old) == 1 else -1
                reads, makes = (*old, *memory([value])), ((fresh, graph.slots[slot].bytes),)
                steps.append(Step(self._locals([value], local), reads, makes, makes[0][1], 0, first, -1))
                totals[slot] = (fresh,)
        returned = {name for slot, names_of in totals.items() if slot not in consumed for name in names_of}
        leaves = {name for slot, names_of in totals.items() if graph.slots[slot].owner == -1 for name in names_of}
        return tuple(steps), tuple(sorted(returned)), tuple(sorted(leaves))


def _passed(graph: Graph, ends: Sequence[int]) -> dict[int, list[int]]:
    """For each forward value those of ``ends`` beyond which its storages are read, in forward or in backward."""
    found: dict[int, list[int]] = {}
    for end in ends:
        makers = {storage: value for value in graph.forward[:end] for storage in graph.nodes[value].allocates}
        grads = [value for grad in graph.grad_nodes if grad.position >= end for value in grad.nodes]
        reads = {read for value in (*graph.forward[end:], *grads) for read in graph.nodes[value].inputs}
        storages = {storage for read in reads if read < len(graph.nodes) for storage in graph.nodes[read].storages}
        for value in {makers[storage] for storage in storages if storage in makers}:
            found.setdefault(value, []).append(end)
    return found


def _solve(window: _Window, most: int, known: dict[object, object]) -> tuple[_Choice, ...]:
    """Up to ``most`` points, from keeping all that backward reads to keeping the least."""
    storages = [Storage(s.size, s.keepable, s.needed and not s.free) for s in window.storages]
    free = {number for number, storage in enumerate(window.storages) if storage.free}
    operations = [
        Operation(
            tuple(read for read in op.reads if read not in free),
            tuple(made for made in op.makes if made not in free),
            op.ticks,
            window.state_bytes if op.random else 0,
            op.recomputable,
        )
        for op in window.ops
    ]
    compromises = hull(operations, storages, known)
    maker = {storage: index for index, op in enumerate(window.ops) for storage in op.makes}
    again = [_run(window, index, set()) for index in range(len(window.ops))]
    return tuple(
        _choice(window, again, maker, compromises.points[index], compromises.kept(index))
        for index in compromises.select(most)
    )


def _choice(
    window: _Window, again: Sequence[Step], maker: dict[int, int], point: tuple[int, int], kept: Sequence[int]
) -> _Choice:
    """The point with its peaks, found by going through its instructions; ``again`` are the operations as steps."""
    storages, ops = window.storages, window.ops
    available = {*kept, *(number for number, storage in enumerate(storages) if storage.free)}
    steps, repeated = _with_recomputation(window, again, maker, available)
    available.intersection_update(need for step in steps for need in step.needs)
    # What leaves the region is alive throughout backward, whoever reads it.
    ready = {number: storages[number].size for number in available if not storages[number].held}
    course = Course(steps, ready, set(window.returned))
    used: set[int] = set()
    stack = list(available)
    while stack:
        index = maker[stack.pop()]
        if index not in used:
            used.add(index)
            stack += ops[index].reads
    unused = [index for index, op in enumerate(ops) if op.runs and index not in used]
    forward = [again[index] for index, op in enumerate(ops) if op.runs or index in used]
    stays = {*available, *(number for number, storage in enumerate(storages) if storage.crosses or storage.passing)}
    before = Course(forward, {}, stays)
    return _Choice(
        tuple(sorted(available)), *point, sum(ops[index].ticks for index in unused), max(before.highs),
        max(course.highs), before.alive(before.moments()), course.alive(course.moments(_settled(steps, window.leaves))),
        [number for number in available if not storages[number].crosses],
        [index for index in repeated if ops[index].runs], unused,
    )  # fmt: skip


def _settled(steps: Sequence[Step], leaves: Sequence[int]) -> list[int]:
    """Gradients of parameters before the first step and while each one runs: they do not grow with the inputs."""
    own, total, found = set(leaves), 0, [0]
    for step in steps:
        for name, size in step.makes:
            if name in own:
                total += size
        found.append(total)
    return found


def _recipe(choices: Sequence[_Choice]) -> Recipe:
    return Recipe(
        [choice.beyond for choice in choices], [choice.forward for choice in choices],
        [choice.backward for choice in choices], [choice.again for choice in choices],
        [choice.unused for choice in choices],
    )  # fmt: skip


def _with_recomputation(
    window: _Window, again: Sequence[Step], maker: dict[int, int], available: set[int]
) -> tuple[list[Step], list[int]]:
    """Backward with the operations that have to run again, each right before its result is first read; and those."""
    present = set(available)
    steps: list[Step] = []
    repeated: list[int] = []
    for step in window.backward:
        if not present.issuperset(step.needs):
            missing: set[int] = set()
            stack = list(step.needs)
            while stack:
                storage = stack.pop()
                if storage not in present and maker[storage] not in missing:
                    missing.add(maker[storage])
                    stack += window.ops[maker[storage]].reads
            for index in sorted(missing):
                steps.append(
                    again[index] if present.isdisjoint(window.ops[index].makes) else _run(window, index, present)
                )
                present.update(window.ops[index].makes)
            repeated += missing
        steps.append(step)
    return steps, repeated


def _run(window: _Window, index: int, present: set[int]) -> Step:
    """An operation as a step; those of its results that are ``present`` it makes a second time, for nothing."""
    op, scratch = window.ops[index], len(window.storages) + index
    makes = tuple((storage, window.storages[storage].size) for storage in op.makes if storage not in present)
    twice = tuple(storage for storage in op.makes if storage in present)
    workspace = op.workspace + sum(window.storages[storage].size for storage in twice)
    return Step(op.reads, (), makes, sum(size for _, size in makes), workspace, op.over, scratch, twice)
