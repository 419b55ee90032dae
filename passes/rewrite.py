"""Emit the GraphModule: one submodule for each segment, its forward and backward translated step by step."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxckpt import _torch
from fxckpt.joint import UPDATING_NORMS, JointGraph, bernoulli_like, device_of, inplace_form
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
        position = {node: index for index, node in enumerate(self.joint.nodes)}
        outer.output([values[position[node]] for node in self.joint.outputs])
        for node in [node for node in outer.nodes if node.target is operator.getitem and not node.users]:
            outer.erase_node(node)
        return fx.GraphModule(root, outer)

    def _segment(self, index: int, segment: SegmentProgram) -> SegmentModule:
        forward = _Emitter(self.joint, self.graph).forward(segment)

        def specialise(present: tuple[bool, ...]) -> fx.GraphModule:
            steps = segment.backward if present == segment.expected else self.reschedule(index, present).backward
            return _Emitter(self.joint, self.graph).backward(segment, steps, present)

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
    """Builds one fx graph from steps."""

    def __init__(self, joint: JointGraph, graph: Graph) -> None:
        self.joint, self.graph = joint, graph
        self.out = fx.Graph()
        self.out.set_codegen(_torch.BoxedCodeGen())
        self.env: dict[int, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}
        self.sums = {node: len(graph.nodes) + slot for slot, node in enumerate(joint.sums)}
        self.index = {node: index for index, node in enumerate(joint.nodes)}
        self.index.update(self.sums)

    def forward(self, segment: SegmentProgram) -> fx.GraphModule:
        """Forward from the inputs to (outputs, saved values, generator states)."""
        for value in segment.inputs:
            self.env[value] = self.out.placeholder(self._name(value))
        for step in segment.forward:
            self._emit(step, again=False)
        states = [self.states[value] for value in segment.states]
        results = ([self.env[v] for v in segment.outputs], [self.env[v] for v in segment.saved], states)
        return self._finish(results, segment)

    def backward(self, segment: SegmentProgram, steps: tuple[Step, ...], present: tuple[bool, ...]) -> fx.GraphModule:
        """Backward from (saved values, states, present tangents) to one gradient per input."""
        for value in segment.saved:
            self.env[value] = self.out.placeholder(self._name(value))
        for value in segment.states:
            self.states[value] = self.out.placeholder(f"state_of_{self._name(value)}")
        started = {slot for slot, there in zip(segment.tangents, present, strict=True) if there}
        for slot in segment.tangents:
            if slot in started:
                self.env[self.graph.total(slot)] = self.out.placeholder(f"tangent_{slot}")
        for step in steps:
            if step.op == "add":
                self._add(step, step.slot in started)
            elif step.op == "zero":
                self._zero(step)
            else:
                self._emit(step, again=True)
            started.add(step.slot)
        results = [
            self.env[self.graph.total(slot)] if slot in started and slot >= 0 else None for slot in segment.gradients
        ]
        return self._finish(results, segment)

    def _finish(self, results: Any, segment: SegmentProgram) -> fx.GraphModule:
        self.out.output(results)
        self.out.lint()
        return _torch.lazy_graph_module(torch.nn.Module(), self.out, _identifier(segment.name) or "segment")

    def _name(self, value: int) -> str:
        return self.graph.nodes[value].name

    def _emit(self, step: Step, *, again: bool) -> None:
        node = self.joint.nodes[step.value]
        if step.op == "record":
            self.states[step.value] = self.out.call_function(device_random_state, (device_of(node),))
            return
        again = again and self.graph.nodes[step.value].phase == "forward"
        statistics: set[fx.Node] = set()
        if again and str(node.target) in UPDATING_NORMS and node.args[TRAINING_ARGUMENT] is True:
            # A normalisation that is recomputed must not move its running statistics again.
            statistics = {node.args[index] for index in STATISTICS_ARGUMENTS}  # type: ignore[misc]
        new = self.out.node_copy(node, lambda source: None if source in statistics else self.env[self.index[source]])
        if step.inplace:
            new.target = inplace_form(node)
        elif node.target is aten.view.default and self.graph.nodes[step.value].phase == "backward":
            new.target = view_gradient
        elif step.op == "replay":
            new.args = (device_of(node), self.states[step.value], *new.args)
            if node.target is bernoulli_like:
                new.target = replay_bernoulli
            else:
                new.args = (node.target, *new.args)  # type: ignore[arg-type]
                new.target = replay_random
        if again:
            new.meta["recomputed"] = True
        self.env[step.value] = new

    def _add(self, step: Step, started: bool) -> None:
        total = self.graph.total(step.slot)
        part = self.env[step.value]
        if started:
            add = aten.add_.Tensor if step.inplace else aten.add.Tensor
            part = self.out.call_function(add, (self.env[total], part))
            part.meta["val"] = self.joint.sums[step.slot].meta.get("val")
        self.env[total] = part

    def _zero(self, step: Step) -> None:
        value = self.joint.sums[step.slot].meta["val"]
        zeros = self.out.call_function(
            aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
        )
        zeros.meta["val"] = value
        self.env[self.graph.total(step.slot)] = zeros


def _identifier(name: str) -> str:
    clean = re.sub(r"\W+", "_", name).strip("_")
    return f"_{clean}" if clean[:1].isdigit() or keyword.iskeyword(clean) else clean
