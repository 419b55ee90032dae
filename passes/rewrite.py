"""Emit the GraphModule: one submodule for each segment, its forward and backward translated step by step."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from fxckpt.joint import UPDATING_NORMS, JointGraph, bernoulli_like, device_of, inplace_form
from fxckpt.listing import Listing, Var
from fxckpt.plan import Graph, Program, SegmentProgram, Step
from fxckpt.runtime import SegmentModule, replay_bernoulli, replay_random, view_gradient
from fxckpt.snapshot import device_random_state

__all__ = ["rewrite"]

aten = torch.ops.aten
STATISTICS_ARGUMENTS = (3, 4)
TRAINING_ARGUMENT = 5

Reschedule = Callable[[int, tuple[bool, ...]], SegmentProgram]
"""Lowers segment ``index`` again for a pattern of present tangents."""


def rewrite(joint: JointGraph, graph: Graph, program: Program, reschedule: Reschedule) -> fx.GraphModule:
    """Translate ``program``.

    Args:
        joint: functional joint graph.
        graph: its description; values are indices of ``joint.nodes``.
        program: what each segment runs.
        reschedule: called in backward when the gradients that arrive differ from those that ``program`` expects.

    Returns:
        A module from a ``RegionCall`` (or None) and the tensors of ``joint.inputs`` to those of ``joint.outputs``.
    """
    return _Rewriter(joint, graph, program, reschedule).build()


class _Rewriter:
    def __init__(self, joint: JointGraph, graph: Graph, program: Program, reschedule: Reschedule) -> None:
        self.joint, self.graph, self.program, self.reschedule = joint, graph, program, reschedule

    def build(self) -> fx.GraphModule:
        root = torch.nn.Module()
        outer = fx.Graph()
        values: dict[int, fx.Node] = {}
        names: set[str] = set()
        region_call = outer.placeholder("region_call")
        for index, entry in enumerate(self.joint.inputs):
            name = _identifier(entry.name if entry.kind != "argument" else f"input_{entry.name}")
            values[index] = outer.placeholder(name if name not in names else f"{name}_{index}")
            names.add(name)
        for index, segment in enumerate(self.program.segments):
            name = f"segment_{index}_{_identifier(segment.name)}".rstrip("_")
            root.add_module(name, self._segment(index, segment))
            call = outer.call_module(name, (region_call, *(values[value] for value in segment.inputs)))
            for place, value in enumerate(segment.outputs):
                values[value] = outer.call_function(operator.getitem, (call, place))
        outer.output([values[self.joint.index[node]] for node in self.joint.outputs])
        for node in [node for node in outer.nodes if node.target is operator.getitem and not node.users]:
            outer.erase_node(node)
        return fx.GraphModule(root, outer)

    def _segment(self, index: int, segment: SegmentProgram) -> SegmentModule:
        forward = _Emitter(self.joint, self.graph, segment).forward()

        def specialise(present: tuple[bool, ...]) -> Listing:
            steps = segment.backward if present == segment.expected else self.reschedule(index, present).backward
            return _Emitter(self.joint, self.graph, segment).backward(steps, present)

        carrying = [segment.outputs.index(self.graph.slots[slot].value) for slot in segment.tangents]
        requires = [i < len(self.joint.inputs) and self.joint.inputs[i].requires_grad for i in segment.inputs]
        internal = [i >= len(self.joint.inputs) for i in segment.inputs]
        return SegmentModule(
            forward, specialise, index=index, input_count=len(segment.inputs), tangent_outputs=tuple(carrying),
            constant_outputs=tuple(i for i in range(len(segment.outputs)) if i not in carrying),
            detached=tuple(
                i for i, slot in enumerate(segment.gradients) if slot < 0 and (requires[i] or internal[i])
            ),
            expected=segment.expected, differentiable=bool(segment.tangents) and any(s >= 0 for s in segment.gradients),
        )  # fmt: skip


class _Emitter:
    """Writes the listing of a segment from steps."""

    def __init__(self, joint: JointGraph, graph: Graph, segment: SegmentProgram) -> None:
        self.joint, self.graph, self.segment = joint, graph, segment
        self.out = Listing(_identifier(segment.name) or "segment")
        self.env: dict[int, Var] = {}
        self.states: dict[int, Var] = {}

    def forward(self) -> Listing:
        """Forward from the inputs to (outputs, saved values, generator states)."""
        segment = self.segment
        for value in segment.inputs:
            self.env[value] = self.out.argument(self._name(value))
        for step in segment.forward:
            self._emit(step, again=False)
        states = [self.states[value] for value in segment.states]
        self.out.result = ([self.env[v] for v in segment.outputs], [self.env[v] for v in segment.saved], states)
        return self.out

    def backward(self, steps: tuple[Step, ...], present: tuple[bool, ...]) -> Listing:
        """Backward from (saved values, states, present tangents) to one gradient per input."""
        segment = self.segment
        for value in segment.saved:
            self.env[value] = self.out.argument(self._name(value))
        for value in segment.states:
            self.states[value] = self.out.argument(f"state_of_{self._name(value)}")
        started = {slot for slot, there in zip(segment.tangents, present, strict=True) if there}
        for slot in segment.tangents:
            if slot in started:
                self.env[self.graph.total(slot)] = self.out.argument(f"tangent_{slot}")
        for step in steps:
            if step.op == "add":
                self._add(step, step.slot in started)
            elif step.op == "zero":
                self._zero(step)
            else:
                self._emit(step, again=True)
            started.add(step.slot)
        self.out.result = [
            self.env[self.graph.total(slot)] if slot in started and slot >= 0 else None for slot in segment.gradients
        ]
        return self.out

    def _name(self, value: int) -> str:
        return self.graph.nodes[value].name

    def _emit(self, step: Step, *, again: bool) -> None:
        node = self.joint.nodes[step.value]
        if step.op == "record":
            name = f"state_of_{self._name(step.value)}"
            self.states[step.value] = self.out.call(name, device_random_state, (device_of(node),), {})
            return
        again = again and self.graph.nodes[step.value].phase == "forward"
        statistics: set[fx.Node] = set()
        if again and str(node.target) in UPDATING_NORMS and node.args[TRAINING_ARGUMENT] is True:
            # A normalisation that is recomputed must not move its running statistics again.
            statistics = {node.args[index] for index in STATISTICS_ARGUMENTS}  # type: ignore[misc]
        index, env = self.joint.index, self.env

        def variable(source: fx.Node) -> Any:
            return None if source in statistics else env[index[source]]

        args, kwargs = cast(Any, fx.node.map_arg(self.joint.arguments(node), variable))
        target: Any = node.target
        if step.inplace:
            target = inplace_form(node)
        elif target is aten.view.default and self.graph.nodes[step.value].phase == "backward":
            target = view_gradient
        elif step.op == "replay":
            args = (device_of(node), self.states[step.value], *args)
            if target is bernoulli_like:
                target = replay_bernoulli
            else:
                target, args = replay_random, (target, *args)
        meta = {"val": node.meta.get("val")}
        if again:
            meta["recomputed"] = True
        self.env[step.value] = self.out.call(self._name(step.value), target, args, kwargs, **meta)

    def _add(self, step: Step, started: bool) -> None:
        total = self.graph.total(step.slot)
        part = self.env[step.value]
        if started:
            add = aten.add_.Tensor if step.inplace else aten.add.Tensor
            value = self.joint.sums[step.slot].meta.get("val")
            part = self.out.call(f"gradient_{step.slot}", add, (self.env[total], part), {}, val=value)
        self.env[total] = part

    def _zero(self, step: Step) -> None:
        value = self.joint.sums[step.slot].meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        name, shape = f"gradient_{step.slot}", list(self.joint.shape(self.joint.sums[step.slot]))
        total = self.out.call(name, aten.zeros.default, (shape,), options, val=value)
        self.env[self.graph.total(step.slot)] = total


def _identifier(name: str) -> str:
    clean = re.sub(r"\W+", "_", name).strip("_")
    return f"_{clean}" if clean[:1].isdigit() or keyword.iskeyword(clean) else clean
