"""Score every node of the joint graph: storages and their bytes, seconds, and what may be recomputed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt import _torch
from fxckpt.device import Device, is_half, is_view, op_work, roofline_seconds, sum_seconds
from fxckpt.joint import (
    UPDATING_NORMS,
    JointGraph,
    allocated_bytes,
    bernoulli_like,
    fixed_parts,
    inplace_form,
    is_alias,
)
from fxckpt.plan import GradNode, Graph, Node, Slot

__all__ = ["cost"]

aten = torch.ops.aten


def cost(
    joint: JointGraph,
    device: Device,
    *,
    workspaces: dict[str, int] | None = None,
    seconds: dict[str, float] | None = None,
    fresh_gradients: bool = True,
    extra_fixed: tuple[tuple[str, int], ...] = (),
) -> Graph:
    """Describe ``joint`` by numbers.

    Args:
        joint: functional joint graph.
        device: rates for the roofline estimate of seconds.
        workspaces: bytes of scratch memory by node name, measured; absent means none.
        seconds: measured seconds by node name, which take the place of the estimate.
        fresh_gradients: ``.grad`` of the parameters is None when backward starts.
        extra_fixed: further parts of fixed memory by name (existing gradients, optimizer state), bytes.

    Returns:
        The graph that the solvers, the scheduler and the simulator read.
    """
    return _Costs(joint, device, workspaces or {}, seconds or {}).graph(fresh_gradients, extra_fixed)


class _Costs:
    def __init__(
        self, joint: JointGraph, device: Device, workspaces: dict[str, int], seconds: dict[str, float]
    ) -> None:
        self.joint, self.device, self.workspaces, self.seconds = joint, device, workspaces, seconds
        self.index = joint.index
        self.storage_of: dict[int, int] = {}
        self.bytes: list[int] = []
        self.forward = set(joint.forward)
        self.mutated = {self._storages(node)[0] for node in joint.mutated if self._storages(node)}
        self.read_by_backward = self._read_by_backward()

    def _read_by_backward(self) -> set[fx.Node]:
        backward = [node for _, _, _, nodes, _ in self.joint.records for node in nodes]
        return {source for node in backward for source in node.all_input_nodes if source in self.forward}

    def _storages(self, node: fx.Node) -> tuple[int, ...]:
        values = node.meta.get("val")
        if isinstance(values, Tensor):
            values = (values,)
        found: dict[int, None] = {}
        for value in values if isinstance(values, (tuple, list)) else ():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                found[self._storage(value)] = None
        return tuple(found)

    def _storage(self, value: Tensor) -> int:
        key = _torch.storage_key(value)
        if key not in self.storage_of:
            self.storage_of[key] = len(self.bytes)
            self.bytes.append(allocated_bytes(int(value.untyped_storage().nbytes()), value.device))
        return self.storage_of[key]

    def graph(self, fresh_gradients: bool, extra_fixed: tuple[tuple[str, int], ...]) -> Graph:
        joint = self.joint
        given = [self._storages(node) for node in joint.nodes[: len(joint.inputs)]]
        known = {storage for storages in given for storage in storages}
        fixed = fixed_parts(joint, given, self.bytes) + extra_fixed
        nodes = []
        for node in joint.nodes:
            storages = self._storages(node)
            new = tuple(storage for storage in storages if storage not in known)
            known.update(new)
            nodes.append(self._node(node, storages, new))
        return Graph(
            nodes=tuple(nodes),
            forward=tuple(self.index[node] for node in joint.forward),
            grad_nodes=tuple(self._grad_node(*record) for record in joint.records),
            slots=tuple(self._slot(slot) for slot in range(len(joint.sums))),
            storage_bytes=tuple(self.bytes),
            outputs=tuple(dict.fromkeys(self.index[node] for node in joint.outputs)),
            required=tuple(self.index[node] for node in joint.forward if self._has_effect(node)),
            forbidden=tuple(joint.forbidden),
            fixed_bytes=sum(size for _, size in fixed),
            fixed=fixed,
            fresh_gradients=fresh_gradients,
            state_bytes=self._state_bytes(),
        )

    def _state_bytes(self) -> int:
        """Memory of one saved generator state on the planned device; that of an accelerator lies in host memory."""
        kinds = {
            tensor.device.type for node in self.joint.forward if isinstance(tensor := node.meta.get("val"), Tensor)
        }
        return torch.get_rng_state().numel() if kinds <= {"cpu"} else 0

    def _node(self, node: fx.Node, storages: tuple[int, ...], new: tuple[int, ...]) -> Node:
        module, source = self.joint.places.get(node.name, ("", ""))
        statistics = self._statistics(node)
        inputs = tuple(self.index[source] for source in node.all_input_nodes if source not in statistics)
        if node.op == "placeholder":
            order = self.index[node]
            kind = "input" if order < len(self.joint.inputs) else "tangent"
            return Node(node.name, kind, "input", storages=storages, allocates=new)
        phase = "forward" if node in self.forward else "backward"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source_node: source_node.meta.get("val"))
        value = node.meta.get("val")
        if new and phase == "backward" and is_alias(node.target):
            storages, new = tuple(storage for storage in storages if storage not in new), ()
        view = is_view(node.target) and not new
        flops, moved = (0, 0) if is_view(node.target) else op_work(node.target, args, kwargs, value)
        return Node(
            name=node.name, op=_op_name(node.target), phase=phase, inputs=inputs,
            state_inputs=tuple(self.index[source] for source in statistics), storages=storages, allocates=new,
            seconds=self._seconds(node, flops, moved), workspace_bytes=self.workspaces.get(node.name, 0),
            view=view, container=isinstance(value, (tuple, list)), random=_is_random(node),
            recomputable=self._recomputable(node, storages), keepable=self._keepable(node),
            inplace=self._can_overwrite(node), dense=_is_dense(value), flops=flops, moved_bytes=moved, module=module,
            source=source,
        )  # fmt: skip

    def _seconds(self, node: fx.Node, flops: int, moved: int) -> float:
        if node.name in self.seconds:
            return self.seconds[node.name]
        if is_view(node.target):
            return 0.0
        half = is_half([node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)])
        return roofline_seconds(self.device, flops, moved, half)

    def _statistics(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Running statistics that a normalisation in training mode updates: buffers that it reads for nothing else."""
        if str(node.target) not in UPDATING_NORMS or node not in self.forward:
            return ()
        read = [source for source in node.args[3:5] if isinstance(source, fx.Node)]
        return tuple(source for source in read if source in self.joint.mutated and source.op == "placeholder")

    def _has_effect(self, node: fx.Node) -> bool:
        """Whether forward must run the node even if nothing reads its value."""
        if node in self.joint.writes or _is_random(node) or node.target is operator.getitem:
            return node.target is not operator.getitem
        schema = getattr(node.target, "_schema", None)
        foreign = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
        statistics = any(source in self.joint.mutated for source in node.all_input_nodes)
        return foreign or statistics or (schema is not None and schema.is_mutable)

    def _recomputable(self, node: fx.Node, storages: tuple[int, ...]) -> bool:
        if node.target is operator.getitem:
            return self._recomputable(node.args[0], storages)  # type: ignore[arg-type]
        if getattr(node.target, "namespace", "aten") not in ("aten", "prims") or node in self.joint.writes:
            return False
        if node.kwargs.get("generator") is not None or "rnn" in str(node.target):
            return False  # a private generator moves on; a fused RNN hands a workspace to its backward
        statistics = self._statistics(node)  # a recomputation runs without them
        sources = [source for source in node.all_input_nodes if source not in statistics]
        return not (self.mutated & {storage for source in sources for storage in self._storages(source)})

    def _can_overwrite(self, node: fx.Node) -> bool:
        return inplace_form(node) is not None and _is_dense(node.args[0].meta["val"])  # type: ignore[union-attr]

    def _keepable(self, node: fx.Node) -> bool:
        return node not in self.joint.outputs or node in self.read_by_backward

    def _grad_node(
        self, name: str, position: int, reads: list[int], nodes: list[fx.Node], contributes: list[tuple[int, fx.Node]]
    ) -> GradNode:
        index = self.index
        pairs = tuple((slot, index[node]) for slot, node in contributes)
        return GradNode(name, position, tuple(reads), tuple(index[node] for node in nodes), pairs)

    def _slot(self, slot: int) -> Slot:
        joint = self.joint
        value, tangent, total = joint.slot_values[slot], joint.slot_tangents[slot], joint.sums[slot].meta.get("val")
        size = 0
        if isinstance(total, Tensor) and total.layout is torch.strided:
            size = allocated_bytes(total.numel() * total.element_size(), total.device)
        return Slot(
            value=-1 if value is None else self.index[value], owner=joint.slot_owner[slot],
            tangent=-1 if tangent is None else self.index[tangent], bytes=size,
            seconds=sum_seconds(self.device, size),
        )  # fmt: skip


def _op_name(target: Any) -> str:
    """Name of an operator or function, the same in every process: a plan is tied to its graph by such names."""
    return str(target) if _torch.is_operator(target) else str(target.__name__)


def _is_random(node: fx.Node) -> bool:
    if node.target is bernoulli_like:
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(given)
    return True


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and _torch.is_dense(value)
