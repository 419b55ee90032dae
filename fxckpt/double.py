"""Double backward: a region's forward run again under autograd, operator by operator, segment by segment.

Built-in operators bring their own derivatives of any order. Where gradients flow through an operation that autograd did
not see (a custom ``autograd.Function``), a bridge runs the backward that was traced for it, itself differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.joint import UPDATING_NORMS, JointGraph, device_of, remembered
from fxckpt.plan import Graph, Program
from fxckpt.snapshot import device_random_state, set_device_random_state

__all__ = ["DoubleReplay"]

Env = dict[fx.Node, Any]


class DoubleReplay:
    """Runs the forward of a planned region under autograd; implements :class:`fxckpt.runtime.Replay`."""

    def __init__(self, joint: JointGraph, graph: Graph, program: Program) -> None:
        self.joint, self.graph, self.program = joint, graph, program
        self.inputs = [node for node in joint.nodes if node.op == "placeholder"][: len(joint.inputs)]
        self.devices = {device_of(joint.nodes[value]) for value in graph.forward if graph.nodes[value].random}
        self.mutated = remembered(joint)
        self.owner = self._owners()

    def _owners(self) -> dict[fx.Node, int]:
        """Forward node -> the autograd node that takes the gradient of its value."""
        joint = self.joint
        return {
            node: joint.slot_owner[slot]
            for node, slot in joint.differentiable.items()
            if slot >= 0 and joint.slot_owner[slot] >= 0
        }

    def remember(self, inputs: list[Any]) -> Any:
        """Generator states and copies of the inputs that forward is about to change."""
        generators = [value for value in inputs if isinstance(value, torch.Generator)]
        return (
            _random_state(self.devices),
            [(generator, generator.get_state()) for generator in generators],
            {index: inputs[index].detach().clone() for index in self.mutated},
        )

    def writes(self, tensor: Tensor, inputs: list[Any]) -> bool:
        """Whether forward writes to this input."""
        return any(inputs[i] is tensor for i, node in enumerate(self.inputs) if node in self.joint.mutated)

    def run(self, inputs: list[Any], before: Any) -> list[tuple[list[Tensor | None], dict[int, Tensor]]]:
        """Per segment its inputs and its outputs by place, connected by autograd; streams are as before afterwards."""
        states, generators, copies = before
        now = _random_state(self.devices), [(generator, generator.get_state()) for generator, _ in generators]
        values: Env = dict(zip(self.inputs, inputs, strict=True))
        values.update({self.inputs[index]: copy for index, copy in copies.items()})
        _set_random_state(states, generators)
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return [self._segment(index, values) for index in range(len(self.program.segments))]
        finally:
            _set_random_state(*now)

    def _segment(self, index: int, values: Env) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        segment, nodes = self.program.segments[index], self.joint.nodes
        env: Env = {}
        entering: list[Tensor | None] = []
        for value, slot in zip(segment.inputs, segment.gradients, strict=True):
            tensor = values[nodes[value]]
            if slot >= 0 and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # so that gradients stop here
                entering.append(tensor)
            else:
                tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
                entering.append(None)
            env[nodes[value]] = tensor
        for step in segment.forward:
            if step.op == "run" and nodes[step.value] not in self.joint.writes:
                self._compute(nodes[step.value], env)
        outputs = {}
        for place, value in enumerate(segment.outputs):
            outputs[place] = values[nodes[value]] = env[nodes[value]]
        return entering, outputs

    def _compute(self, node: fx.Node, env: Env) -> None:
        args, kwargs = fx.node.map_arg(self.joint.arguments(node), lambda source: env[source])
        if str(node.target) in UPDATING_NORMS and len(args) > 5 and args[5] is True:
            args = (*args[:3], None, None, *args[5:])
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(result, Tensor):
            if node not in self.joint.differentiable:
                result = result.detach()
            elif not result.requires_grad and node in self.owner:
                result = self._bridge(node, result, env)
        env[node] = result

    def _bridge(self, node: fx.Node, result: Tensor, env: Env) -> Tensor:
        """``result`` with the traced backward of its autograd node attached."""
        joint, owner = self.joint, self.owner[node]
        _, _, reads, backward, contributes = joint.records[owner]
        values = ((joint.slot_values[slot], part) for slot, part in contributes)
        targets = [(value, part) for value, part in values if value is not None and value in env]
        slot = joint.differentiable[node]

        def vjp(grad: Tensor) -> tuple[Tensor, ...]:
            local: Env = dict(env)
            for read in reads:
                total = joint.sums[read]
                local[total] = (
                    grad if read == slot else grad.new_zeros(joint.shape(total), dtype=total.meta["val"].dtype)
                )
            for step in backward:
                args, kwargs = fx.node.map_arg(joint.arguments(step), lambda source: local[source])
                local[step] = step.target(*args, **kwargs)  # type: ignore[operator]
            return tuple(local[part] for _, part in targets)

        bridged: Tensor = _Bridge.apply(vjp, result, *(env[value] for value, _ in targets))
        return bridged


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vjp: Any, result: Tensor, *sources: Tensor) -> Tensor:
        ctx.vjp = vjp
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, None, *ctx.vjp(grad))


def _random_state(devices: set[torch.device]) -> list[tuple[torch.device, Tensor]]:
    return [(device, device_random_state(device)) for device in devices]


def _set_random_state(
    states: list[tuple[torch.device, Tensor]], generators: list[tuple[torch.Generator, Tensor]]
) -> None:
    for device, state in states:
        set_device_random_state(device, state)
    for generator, state in generators:
        generator.set_state(state)
