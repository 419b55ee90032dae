"""Replay a program against a model of the allocator: live bytes after every instruction.

A storage is live while any live value refers to it. Values are held by the running program, by the caller between
segments, by the segments' saved tensors, and by the autograd engine (gradients that wait for their consumer).
"""

from __future__ import annotations

from fxckpt.plan import Graph, Program, SegmentProgram, Step, Timeline

__all__ = ["simulate"]

LOSS_BYTES = 64  # the scalar loss and its like, which the caller holds during backward
CATEGORIES = ("fixed", "gradients", "kept", "outputs", "recomputed", "temporary")


def simulate(graph: Graph, program: Program, tangents: frozenset[int] | None = None) -> Timeline:
    """Predict the memory of one training step that runs ``program``.

    Args:
        graph: the joint graph with costs.
        program: the lowered plan.
        tangents: slots of outputs whose gradient arrives from outside; None means all of them.

    Returns:
        The timeline. The caller is taken to let go of outputs that its loss does not use once the loss is known, and
        to hold the others until the step ends; the gradients of outputs are there when backward starts.
    """
    if tangents is None:
        tangents = frozenset(index for index, slot in enumerate(graph.slots) if slot.tangent >= 0)
    run = _Run(graph)
    run.forward(program)
    run.backward(program, tangents)
    return run.timeline(program)


class _Block:
    """One allocation: its size, how many references it has, and what it is for."""

    __slots__ = ("category", "references", "size")

    def __init__(self, size: int, category: str) -> None:
        self.size, self.category, self.references = size, category, 0


Value = dict[int, _Block]
"""Storage number -> block, for every storage that a value lies in. Blocks of the region's inputs are left out."""


class _Run:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live = graph.fixed_bytes
        self.parts = dict.fromkeys(CATEGORIES, 0)
        self.parts["fixed"] = graph.fixed_bytes
        self.totals: list[int] = []
        self.labels: list[tuple[int, str, str]] = []
        self.peak, self.peak_index, self.peak_parts = -1, 0, dict(self.parts)
        self.held: dict[int, Value] = {}
        self.saved: list[dict[int, Value]] = []
        self.states: list[list[_Block]] = []
        self.pending: dict[int, Value] = {}
        self.scope: dict[int, Value] = {}
        self.random_states: dict[int, _Block] = {}
        self.last_replay: dict[int, int] = {}
        self.segment, self.phase = 0, "forward"
        self.seconds = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
        self.segment_peaks: list[int] = []
        self.extra_storage = len(graph.storage_bytes)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _allocate(self, size: int, category: str) -> _Block:
        self.live += size
        self.parts[category] += size
        return _Block(size, category)

    def _hold(self, value: Value) -> Value:
        for block in value.values():
            block.references += 1
        return value

    def _drop(self, value: Value | None) -> None:
        for block in (value or {}).values():
            block.references -= 1
            if block.references == 0:
                self.live -= block.size
                self.parts[block.category] -= block.size

    def _relabel(self, value: Value, category: str) -> None:
        for block in value.values():
            self.parts[block.category] -= block.size
            block.category = category
            self.parts[category] += block.size

    def _mark(self, name: str, workspace: int = 0) -> None:
        """Record the live bytes of one instruction."""
        high = self.live + workspace
        self.totals.append(high)
        self.labels.append((self.segment, self.phase, name))
        if high > self.peak:
            self.peak, self.peak_index = high, len(self.totals) - 1
            self.peak_parts = dict(self.parts)
            self.peak_parts["temporary"] += workspace

    # -- steps -----------------------------------------------------------------------------------------------------

    def _steps(self, steps: tuple[Step, ...]) -> None:
        for index, step in enumerate(steps):
            if step.op == "add" or step.op == "zero":
                self._add(step)
            elif step.op != "record":
                self._compute(step)
            if step.op == "replay" and self.last_replay[step.value] == index:
                self._drop({0: self.random_states.pop(step.value)})
            for value in step.frees:
                self._drop(self.scope.pop(value, None))

    def _compute(self, step: Step) -> None:
        graph, node = self.graph, self.graph.nodes[step.value]
        again = self.phase == "backward" and node.phase == "forward"
        sources: Value = {}
        if len(node.allocates) < len(node.storages) or node.view:
            for source in node.inputs:
                sources.update(self.scope.get(source, {}))
        value: Value = {}
        first = self.scope.get(node.inputs[0], {}) if step.inplace else {}
        for storage in node.storages:
            if storage in node.allocates:
                if step.inplace:
                    value[storage] = next(iter(first.values()))
                else:
                    category = "recomputed" if again else "temporary"
                    value[storage] = self._allocate(graph.storage_bytes[storage], category)
            elif storage in sources:
                value[storage] = sources[storage]
        if node.view and not value:
            value = sources  # a view of a gradient total, whose storage goes by another number
        self._define(step.value, value)
        self.seconds["recompute" if again else node.phase] += node.seconds
        state = self.graph.state_bytes if step.op == "replay" else 0  # the stream's own state, while it is set back
        self._mark(node.name, node.workspace_bytes + state)

    def _define(self, key: int, value: Value) -> None:
        self._hold(value)
        self._drop(self.scope.pop(key, None))
        self.scope[key] = value

    def _add(self, step: Step) -> None:
        slot = self.graph.slots[step.slot]
        key = self.graph.total(step.slot)
        if step.op == "add" and key not in self.scope:
            self._define(key, self.scope.get(step.value, {}))
            return
        if not step.inplace:
            self._define_fresh(key, slot.bytes)
        self.seconds["backward"] += slot.seconds
        self._mark(f"gradient_{step.slot}")

    def _define_fresh(self, key: int, size: int) -> None:
        """A new total: it is there before the old one goes."""
        block = self._allocate(size, "temporary")
        value = {self.extra_storage: block}
        self.extra_storage += 1
        self._hold(value)
        self._mark("sum")
        self._drop(self.scope.pop(key, None))
        self.scope[key] = value

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, program: Program) -> None:
        if any(self.graph.nodes[value].random for value in self.graph.forward):
            self._allocate(self.graph.state_bytes, "kept")  # the streams as the region found them, for double backward
        last: dict[int, int] = {}
        for index, segment in enumerate(program.segments):
            for value in segment.inputs:
                last[value] = index
        for index, segment in enumerate(program.segments):
            self.segment = index
            self._forward_segment(segment)
            for value in [v for v in self.held if last.get(v, -1) <= index and v not in self.graph.outputs]:
                self._drop(self.held.pop(value))
        for held in self.held.values():
            self._relabel_free(held)

    def _relabel_free(self, value: Value) -> None:
        for block in value.values():
            if block.category == "temporary":
                self._relabel({0: block}, "outputs")

    def _forward_segment(self, segment: SegmentProgram) -> None:
        self.scope = {value: self._hold(dict(self.held.get(value, {}))) for value in segment.inputs}
        arguments = [self._hold(dict(value)) for value in self.scope.values()]
        states = [self._allocate(self.graph.state_bytes, "kept") for _ in segment.states]
        for block in states:
            block.references = 1
        self._steps(segment.forward)
        saved = {value: self._hold(dict(self._lookup(value))) for value in segment.saved}
        for value in saved.values():
            self._relabel(value, "kept")
        for output in segment.outputs:
            if output not in segment.inputs:
                self.held[output] = self._hold(dict(self.scope.get(output, {})))
        for value in [*self.scope.values(), *arguments]:
            self._drop(value)
        self.scope = {}
        self.saved.append(saved)
        self.states.append(states)

    def _lookup(self, value: int) -> Value:
        return self.scope.get(value) or self.held.get(value, {})

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, program: Program, tangents: frozenset[int]) -> None:
        self.phase = "backward"
        self._allocate(LOSS_BYTES, "outputs")
        for slot, entry in enumerate(self.graph.slots):
            if entry.tangent >= 0 and slot not in tangents:
                self._drop(self.held.pop(entry.value, None))
        for slot in sorted(tangents):
            block = self._allocate(self.graph.slots[slot].bytes, "temporary")
            self.pending[slot] = self._hold({self.extra_storage: block})
            self.extra_storage += 1
        self.segment_peaks = [0] * len(program.segments)
        for index in range(len(program.segments) - 1, -1, -1):
            self.segment = index
            before = len(self.totals)
            self._backward_segment(program.segments[index], self.saved[index], self.states[index])
            self.segment_peaks[index] = max(self.totals[before:], default=self.live)

    def _backward_segment(self, segment: SegmentProgram, saved: dict[int, Value], states: list[_Block]) -> None:
        graph = self.graph
        self.scope = saved
        arguments = []
        for slot in segment.tangents:
            tangent = self.pending.pop(slot, None)
            if tangent is not None:
                arguments.append(tangent)
                self.scope[graph.total(slot)] = self._hold(dict(tangent))
        self._mark(segment.name)
        self.random_states = dict(zip(segment.states, states, strict=True))
        self.last_replay = {step.value: index for index, step in enumerate(segment.backward) if step.op == "replay"}
        self._steps(segment.backward)
        totals = [(slot, self.scope.get(graph.total(slot))) for slot in segment.gradients if slot >= 0]
        results = [(slot, self._hold(dict(value))) for slot, value in totals if value is not None]
        for value in [*self.scope.values(), *arguments]:
            self._drop(value)
        self.scope = {}
        for block in self.random_states.values():
            self._drop({0: block})
        for slot, value in results:
            self._deliver(slot, value)
        self._mark(segment.name)

    def _deliver(self, slot: int, value: Value) -> None:
        """Hand a returned gradient to the engine: it waits for its consumer, or becomes ``.grad``."""
        leaf = self.graph.slots[slot].owner == -1
        waiting = self.pending.get(slot)
        if waiting is not None or (leaf and not self.graph.fresh_gradients):
            self.seconds["backward"] += self.graph.slots[slot].seconds  # the engine adds
        if leaf and not self.graph.fresh_gradients:
            self._drop(value)
            return
        if waiting is not None and all(block.references == 1 for block in waiting.values()):
            self._drop(value)  # added in place
            return
        if waiting is not None:  # the engine adds in place only where nobody else holds the storage
            total = self._hold({self.extra_storage: self._allocate(self.graph.slots[slot].bytes, "temporary")})
            self.extra_storage += 1
            self._mark("sum")
            self._drop(waiting)
            self._drop(value)
            value = total
        self.pending[slot] = value
        if leaf:
            self._relabel(value, "gradients")

    def timeline(self, program: Program) -> Timeline:
        """The record as plain data."""
        label = self.labels[self.peak_index] if self.labels else (0, "forward", "")
        parts = {**dict(self.graph.fixed), **{k: v for k, v in self.peak_parts.items() if k != "fixed"}}
        return Timeline(
            total_bytes=tuple(self.totals), peak_bytes=self.peak, peak_index=self.peak_index,
            peak_segment=label[0], peak_phase=label[1], categories=tuple(parts), peak_parts=tuple(parts.values()),
            labels=tuple(self.labels), recompute_seconds=self.seconds["recompute"],
            plain_seconds=self.seconds["forward"] + self.seconds["backward"],
            segment_peaks=tuple(self.segment_peaks),
        )  # fmt: skip
