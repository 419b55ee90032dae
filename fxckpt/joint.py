"""What capture returns: the traced step, and the functional joint graph that all later passes read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt import _torch
from fxckpt.tape import Result, Tape, put_in

__all__ = [
    "UPDATING_NORMS",
    "Edge",
    "GradRecord",
    "JointGraph",
    "RegionInput",
    "Trace",
    "allocated_bytes",
    "bernoulli_like",
    "device_of",
    "fixed_parts",
    "functional_form",
    "in_layout",
    "inplace_form",
    "is_alias",
    "pure_form",
    "remembered",
    "sum_gradients",
]

aten = torch.ops.aten

Edge = tuple[int, int]
"""Identity of a differentiable value: (index of its autograd node in the trace, output number).

Leaves are (-1 - input, 0).
"""


@dataclass(frozen=True, slots=True)
class RegionInput:
    """One tensor that the region reads.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"attribute"`` (a tensor on a plain module attribute), ``"argument"``
            or ``"constant"`` (a tensor that the code reaches by other ways).
        name: path of the tensor in the module, index of the flat argument, or name of the constant.
        requires_grad: whether gradients flow to it.
    """

    kind: str
    name: str
    requires_grad: bool


@dataclass(slots=True)
class GradRecord:
    """One autograd node in the order in which backward executed it.

    Attributes:
        sequence: sequence number, which tells the forward operation that created it.
        totals: node of the total gradient of each of its outputs, None where no gradient arrived.
        contributions: (edge, node) pairs in the order of ``next_functions``.
        before, after: names of the nodes that were the latest when its totals and its contributions were complete; a
            gradient may be written to between the node that made it and that moment.
    """

    index: int
    name: str
    sequence: int
    totals: list[fx.Node | None] = field(default_factory=list)
    contributions: list[tuple[Edge, fx.Node]] = field(default_factory=list)
    before: str = ""
    after: str = ""


@dataclass(slots=True)
class Trace:
    """The step as first traced: ATen operators with mutations, tagged.

    Attributes:
        graph_module: the traced graph.
        inputs: region inputs in placeholder order.
        output: the module's output with fake tensors as leaves.
        outputs: fake tensors of the output and of assigned attributes, each tensor once.
        output_nodes: their nodes.
        output_edges: their edges, None where no gradient flows.
        tangent_nodes: node of the gradient fed in for each differentiable output.
        assigned: (module path, attribute, value with fake tensors) for attributes that forward set.
        forward_tag: node name -> sequence number of the autograd counter when the forward node was created.
        backward_tag: node name -> index of the autograd node that was running.
        edges: (consumer node name, argument node name) -> edge of the argument as the consumer saw it.
        places: node name -> (module path, ``file:line``).
        records: autograd nodes in execution order.
        tape: every operator call, for comparing another call of the module with this one.
    """

    graph_module: fx.GraphModule
    inputs: list[RegionInput]
    output: Any
    outputs: list[Tensor]
    output_nodes: list[fx.Node]
    output_edges: list[Edge | None]
    tangent_nodes: list[fx.Node | None]
    assigned: list[tuple[str, str, Any]]
    forward_tag: dict[str, int]
    backward_tag: dict[str, int]
    edges: dict[tuple[str, str], Edge]
    places: dict[str, tuple[str, str]]
    records: list[GradRecord]
    tape: Tape


@dataclass
class JointGraph:
    """Functional joint graph: placeholders, forward nodes, then backward nodes autograd node by autograd node.

    Backward nodes read gradient totals through nodes that call :func:`sum_gradients`; one such node per slot.

    Attributes:
        graph: the graph; every node has ``meta["val"]``.
        inputs: region inputs in placeholder order; tangents follow.
        nodes: placeholders, forward and backward nodes in graph order, without the sums.
        forward: the forward nodes.
        sums: slot -> its ``sum_gradients`` node (leaves too).
        slot_values: slot -> forward node or placeholder whose gradient it is, None if it never appears.
        slot_tangents: slot -> tangent placeholder or None.
        slot_owner: slot -> index in ``records`` of the autograd node that consumes it, -1 for leaves.
        records: per autograd node: (name, forward position, slots read, backward nodes, (slot, node) contributions).
        outputs: forward node or placeholder for each of the trace's outputs.
        differentiable: forward nodes through which gradients flow, with the slot of their gradient or -1.
        mutated: placeholders that forward writes to.
        writes: forward nodes that write to mutated inputs; nothing reads their values.
        forbidden: ranges of positions that must not be cut.
        constants: tensors and generators by constant name.
        output: the module's output with fake tensors as leaves; ``fakes`` lists them in the order of ``outputs``.
        assigned: (module path, attribute, value) for attributes that forward set.
        places: node name -> (module path, ``file:line``).
        tape: operator calls of the trace.
        origin: node name -> node of the trace that it is a copy of; empty if functionalization ran the trace again.
        plain: of a graph that was resized, the arguments of those nodes for which numbers among them have changed.
        described: of a graph that was resized, what its nodes and sums look like; ``meta`` tells the first sizes.
    """

    graph: fx.Graph
    inputs: list[RegionInput]
    nodes: list[fx.Node]
    forward: list[fx.Node]
    sums: list[fx.Node]
    slot_values: list[fx.Node | None]
    slot_tangents: list[fx.Node | None]
    slot_owner: list[int]
    records: list[tuple[str, int, list[int], list[fx.Node], list[tuple[int, fx.Node]]]]
    outputs: list[fx.Node]
    differentiable: dict[fx.Node, int]
    mutated: list[fx.Node]
    writes: list[fx.Node]
    forbidden: list[tuple[int, int]]
    constants: dict[str, Any]
    output: Any
    fakes: list[Tensor]
    assigned: list[tuple[str, str, Any]]
    places: dict[str, tuple[str, str]]
    tape: Tape
    origin: dict[str, str]
    plain: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    described: dict[fx.Node, Result] = field(default_factory=dict)

    @functools.cached_property
    def index(self) -> dict[fx.Node, int]:
        """Node -> value: its place in ``nodes``; the sums follow."""
        return {node: index for index, node in enumerate([*self.nodes, *self.sums])}

    def arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """Positional and keyword arguments of a node."""
        plain = self.plain.get(node)
        return (node.args, node.kwargs) if plain is None else put_in(node.args, node.kwargs, plain)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Sizes of a node's tensor."""
        described = self.described.get(node)
        return tuple(node.meta["val"].shape) if described is None else described.shape  # type: ignore[union-attr]


def remembered(joint: JointGraph) -> list[int]:
    """Inputs that forward computes with and then changes: a copy is kept, in case forward has to be run again.

    Running statistics of normalisations and buffers that are only counted up are not among them.
    """
    inputs = [node for node in joint.nodes if node.op == "placeholder"][: len(joint.inputs)]
    return [index for index, node in enumerate(inputs) if node in joint.mutated and _is_read(joint, node)]


def _is_read(joint: JointGraph, node: fx.Node) -> bool:
    return any("batch_norm" not in str(user.target) and user not in joint.writes for user in node.users)


CUDA_BLOCK = 512  # the caching allocator hands out multiples of 512 bytes


def allocated_bytes(size: int, device: torch.device) -> int:
    """Bytes that the allocator of ``device`` hands out for ``size`` bytes."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else size


def fixed_parts(
    joint: JointGraph, storages: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """Bytes of the region's inputs by kind, each storage once, and of copies of those that forward changes.

    Args:
        joint: the graph.
        storages: those of each input.
        sizes: bytes of each storage.
    """
    parts = {"parameters": 0, "buffers": 0, "inputs": 0}
    names = {"parameter": "parameters", "argument": "inputs"}
    seen: set[int] = set()
    for entry, own in zip(joint.inputs, storages, strict=True):
        parts[names.get(entry.kind, "buffers")] += sum(sizes[storage] for storage in set(own) - seen)
        seen.update(own)
    parts["buffers"] += sum(sizes[storage] for index in remembered(joint) for storage in storages[index])
    return tuple(parts.items())


def device_of(node: fx.Node) -> torch.device:
    """Device of a node's tensor; of a tuple's first tensor."""
    value = node.meta["val"]
    tensor = value if isinstance(value, Tensor) else next(item for item in value if isinstance(item, Tensor))
    return tensor.device


def inplace_form(node: fx.Node) -> Any:
    """The in-place form of a node's operator, None if it has none or its result does not fit its first input."""
    packet = getattr(node.target, "_overloadpacket", None)
    first = node.args[0] if node.args else None
    value = node.meta.get("val")
    if packet is None or not isinstance(first, fx.Node) or not isinstance(value, Tensor):
        return None
    source = first.meta.get("val")
    if not isinstance(source, Tensor) or (source.shape, source.stride(), source.dtype) != (
        value.shape, value.stride(), value.dtype,
    ):  # fmt: skip
        return None
    return _overload(packet.__name__ + "_", node.target._overloadname)  # type: ignore[union-attr]


def is_alias(target: Any) -> bool:
    """Whether the operator's result lies in the storage of an argument, by its schema."""
    schema = getattr(target, "_schema", None)
    named = target in (operator.getitem, aten._unsafe_view.default, in_shape_of)
    return named or (schema is not None and any(result.alias_info is not None for result in schema.returns))


def pure_form(node: fx.Node) -> Any:
    """What computes the new value of the first input of an in-place operator; None if nothing does.

    Where that input does not fill its memory, as one part of a split tensor does not, the functional operator would
    make a result of another layout, in which kernels may round differently; see :func:`in_layout`.
    """
    form = functional_form(node.target)
    first = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if form is None or is_alias(form) or not isinstance(first, Tensor) or _torch.is_dense(first):
        return form
    return form if torch.Tag.nondeterministic_seeded in node.target.tags else in_layout(node.target)  # type: ignore[union-attr]


def functional_form(target: Any) -> Any:
    """The functional form of an in-place operator that computes its new first input; None if there is none.

    ``bernoulli_`` stands for another operator than its functional namesake, see :func:`bernoulli_like`.
    """
    if target is aten.bernoulli_.float:
        return bernoulli_like
    if not _torch.is_operator(target):
        return None
    name = target._overloadpacket.__name__
    return _overload(name[:-1], target._overloadname) if target.namespace == "aten" and name.endswith("_") else None


def _overload(name: str, overload: str) -> Any:
    """An overload of an ATen operator, None if there is no such one."""
    packet = getattr(aten, name, None)
    return getattr(packet, overload) if packet is not None and overload in packet.overloads() else None


UPDATING_NORMS = frozenset(
    f"aten.{name}.default" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
"""Normalisations that move running statistics (arguments 3 and 4) inside the kernel when argument 5 is True."""


def sum_gradients(*parts: Tensor) -> Tensor:
    """Sum of gradient contributions in the order in which the autograd engine adds them."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@functools.cache
def in_layout(operator: Any) -> Callable[..., Tensor]:
    """A function that computes what in-place ``operator`` leaves in its first argument, in the same strides."""

    def compute(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
        changed: Tensor = operator(result.copy_(first), *args, **kwargs)
        return changed

    compute.__name__ = f"{operator._overloadpacket.__name__}_in_layout"
    return compute


def in_shape_of(like: Tensor, value: Tensor) -> Tensor:
    """``value``, which has been written over all of a view of ``like``, as ``like`` shows it."""
    return value.view(like.shape)


def bernoulli_like(like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.empty_like(like).bernoulli_(...)``: draws in the memory order of ``like``.

    The functional ``aten.bernoulli.p``, which functionalization puts in the place of ``bernoulli_``, makes a contiguous
    result and so draws another mask than eager does for a permuted tensor.
    """
    return torch.empty_like(like).bernoulli_(*args, **kwargs)
