"""The joint graph and its costs at other sizes of the inputs, without tracing or scoring anything again.

All structure is that of the first trace, which :func:`fxckpt.passes.retrace.retrace` has confirmed; what changes are
numbers among the arguments of operators, sizes of results, and costs.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt import _torch
from fxckpt.device import HALF, Device, op_work, roofline_seconds, sum_seconds
from fxckpt.errors import FxckptError
from fxckpt.joint import (
    JointGraph,
    allocated_bytes,
    bernoulli_like,
    fixed_parts,
    functional_form,
    in_layout,
    in_shape_of,
)
from fxckpt.plan import Graph, Node, Slot, Timeline
from fxckpt.tape import Call, Described, Result, Sizes, describe, take_apart
from fxckpt.workspace import measure_workspaces, reordered_bytes
from fxckpt.writes import SCATTERS

__all__ = ["Blueprint", "Resized", "Unlike"]


MARGIN = 0.25  # estimates of scratch memory may be short by this much of it
_MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
_TRACED_AS = {
    torch.ops.aten.detach.default: torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default,
}


class Unlike(FxckptError):
    """The graph cannot be had at these sizes; the message says why. A new trace can."""


@dataclass(slots=True)
class _Place:
    """Where a node of the joint graph stands on the tape.

    Attributes:
        call: index of its call.
        item: which of the call's results it is; None for the whole.
        reads: values that it reads.
        allocates: (storage, result, alone) for each storage that it makes; ``alone`` if that is no larger than need be.
        scatter: it writes into a copy of its first argument what its call makes a view of.
        shaped: it is the second argument in the shape of the first, of which its call makes a view.
    """

    call: int
    item: int | None
    reads: tuple[int, ...]
    allocates: tuple[tuple[int, int, bool], ...]
    scatter: bool = False
    shaped: bool = False

    def plain(self, calls: list[Call]) -> tuple[Any, ...]:
        """Plain arguments of the node, given those of its call."""
        if self.shaped:
            return (Tensor, Tensor)
        return (Tensor, *calls[self.call].plain) if self.scatter else calls[self.call].plain


class Blueprint:
    """What ties the nodes of a joint graph to the tape; made once for each trace."""

    def __init__(self, joint: JointGraph, graph: Graph) -> None:
        """
        Raises:
            Unlike: some node is not simply a call of the tape.
        """
        if not joint.origin:
            raise Unlike("functionalization changed the graph")
        self.joint, self.graph = joint, graph
        self.calls = joint.tape.calls
        call_of = {name: index for index, names in enumerate(joint.tape.names) for name in names}
        self.added = {value for grad_node in graph.grad_nodes for _, value in grad_node.contributes}
        self.constant_numbers: dict[int, int] = {}
        self.places: dict[int, _Place] = {}
        for value, node in enumerate(joint.nodes):
            if node.op == "placeholder" and value < len(joint.inputs):
                continue
            call = call_of.get(joint.origin.get(node.name, ""))
            if call is None:
                raise Unlike(f"{node.name} is not on the tape")
            self.places[value] = self._place(value, node, call)
        missing = [
            v for v, entry in enumerate(joint.inputs) if entry.kind == "constant" and v not in self.constant_numbers
        ]
        if missing:
            raise Unlike("a constant is not on the tape")

    def _place(self, value: int, node: fx.Node, call: int) -> _Place:
        if node.op == "placeholder":  # a gradient from outside, made as an empty tensor
            return _Place(call, None, (), self._allocates(value, node))
        if node.target is operator.getitem:
            source, item = node.args
            return _Place(call, int(item), (self.joint.index[source],), self._allocates(value, node))  # type: ignore[arg-type, index]
        found: list[fx.Node] = []
        plain = take_apart(node.args, node.kwargs, fx.Node, found)
        func, reads = self.calls[call].func, self.calls[call].reads
        writes = node.target in SCATTERS.values() and node.target is SCATTERS.get(func)
        place = _Place(
            call, None, tuple(self.joint.index[source] for source in found), self._allocates(value, node),
            writes and node.target is not in_shape_of, writes and node.target is in_shape_of,
        )  # fmt: skip
        forms = (func, functional_form(func), bernoulli_like, in_layout(func), _TRACED_AS.get(func), SCATTERS.get(func))
        if node.target not in forms or plain != place.plain(self.calls):
            raise Unlike(f"{node.name} is not the call that it comes from")
        if writes:
            return place
        for source, number in zip(found, reads, strict=True):
            if number < 0:
                self.constant_numbers[self.joint.index[source]] = -1 - number
        return place

    def _allocates(self, value: int, node: fx.Node) -> tuple[tuple[int, int, bool], ...]:
        described = self.graph.nodes[value]
        if not described.allocates:
            return ()
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        first: dict[int, int] = {}
        for item, tensor in enumerate(values):
            if isinstance(tensor, Tensor):
                first.setdefault(_torch.storage_key(tensor), item)
        found = []
        for storage, item in zip(described.storages, first.values(), strict=True):
            if storage in described.allocates:
                alone = describe(values[item])
                found.append((storage, item, alone.storage_bytes == alone.least_bytes))
        return tuple(found)


class Resized:
    """Graph and costs at other sizes.

    Scratch memory of kernels is estimated: it is taken to grow like the tensor that grows most, and never to shrink.
    :meth:`measured` replaces the estimates that matter.

    Attributes:
        joint: the graph, whose nodes are those of the first trace.
    """

    def __init__(self, blueprint: Blueprint, sizes: Sizes, device: Device) -> None:
        """
        Args:
            blueprint: of the graph as first traced.
            sizes: what :func:`fxckpt.passes.retrace.retrace` found.
            device: rates for estimates of seconds.

        Raises:
            Unlike: something that plans rely on is different at these sizes.
        """
        self.blueprint, self.sizes, self.device = blueprint, sizes, device
        self.first, self.first_graph = blueprint.joint, blueprint.graph
        self.nodes = [*self.first.nodes, *self.first.sums]
        self.work: dict[Any, tuple[int, int]] = {}
        self.constants = self._constants()
        self.results = self._results()
        self._check_inputs()
        self.joint = self._joint()
        self.growths: dict[int, float] = {}
        self.extra: dict[str, float] | None = None  # by which estimates may be short, of nodes not measured
        self.storages = self._storage_bytes()
        self.scored = tuple(self._node(value, node) for value, node in enumerate(self.first_graph.nodes))
        self.slots = tuple(self._slot(slot, entry) for slot, entry in enumerate(self.first_graph.slots))

    def _constants(self) -> dict[int, Tensor]:
        """Value -> its constant."""
        return {value: self.sizes.constants[number] for value, number in self.blueprint.constant_numbers.items()}

    def _results(self) -> list[Result]:
        """Description of each value; the totals of slots follow."""
        results: list[Result] = []
        for value in range(len(self.first.nodes)):
            place = self.blueprint.places.get(value)
            if place is None:
                constant = self.constants.get(value)
                results.append(self.sizes.inputs[value] if constant is None else describe(constant))
                continue
            if place.scatter:
                base: Any = results[place.reads[0]]
                results.append(base._replace(storage_bytes=base.least_bytes))
                continue
            if place.shaped:
                base, written = results[place.reads[0]], results[place.reads[1]]
                results.append(written._replace(shape=base.shape, stride=base.stride))  # type: ignore[union-attr]
                continue
            result: Any = self.sizes.results[place.call]
            results.append(result if place.item is None else result[place.item])
        index = self.first.index
        for node in self.first.sums:
            first = node.args[0] if node.op == "call_function" else None
            results.append(results[index[first]] if isinstance(first, fx.Node) else ())
        return results

    def _joint(self) -> JointGraph:
        sizes, calls = self.sizes, self.blueprint.calls
        changed = {
            self.nodes[value]: place.plain(sizes.calls)
            for value, place in self.blueprint.places.items()
            if place.item is None and place.plain(sizes.calls) != place.plain(calls)
        }
        return dataclasses.replace(
            self.first, plain=changed, described=dict(zip(self.nodes, self.results, strict=True)),
            constants={self.first.inputs[value].name: self.constants[value] for value in sorted(self.constants)},
            output=sizes.output, fakes=sizes.outputs, assigned=sizes.assigned,
        )  # fmt: skip

    def graph(self, *, fresh_gradients: bool, extra_fixed: tuple[tuple[str, int], ...] = ()) -> Graph:
        """Costs; arguments as for :func:`fxckpt.passes.cost.cost`."""
        inputs = [node.storages for node in self.scored[: len(self.first.inputs)]]
        fixed = (*fixed_parts(self.first, inputs, self.storages), *extra_fixed)
        return dataclasses.replace(
            self.first_graph, nodes=self.scored, slots=self.slots, storage_bytes=tuple(self.storages),
            fixed_bytes=sum(size for _, size in fixed), fixed=fixed, fresh_gradients=fresh_gradients,
        )  # fmt: skip

    def measured(self, graph: Graph, timeline: Timeline, limit: int) -> Graph | None:
        """``graph`` with the scratch memory measured of operators that may exceed ``limit`` bytes by it.

        Returns:
            None if all that matters has been measured.
        """
        if self.extra is None:
            extra = ((node.name, self.extra_scratch(value, node)) for value, node in enumerate(self.scored))
            self.extra = {name: size for name, size in extra if size > 0}
        near = {
            name
            for total, (_, _, name) in zip(timeline.total_bytes, timeline.labels, strict=True)
            if name in self.extra and total + self.extra[name] > limit
        }
        if not near:
            return None
        for name in near:
            del self.extra[name]
        values = [value for value, node in enumerate(self.scored) if node.name in near]
        alone = self._alone(values)
        found = measure_workspaces(alone.values())
        nodes = list(self.scored)
        for value in values:
            nodes[value] = dataclasses.replace(nodes[value], workspace_bytes=found.get(alone[value].name, 0))
        self.scored = tuple(nodes)
        return dataclasses.replace(graph, nodes=self.scored)

    def extra_scratch(self, value: int, node: Node) -> float:
        """How many bytes the estimate of scratch memory may be short by.

        Kernels of oneDNN that need none for few rows may bring their inputs and results into another order for many.
        """
        place = self.blueprint.places.get(value)
        if place is None or node.phase == "input":
            return 0
        tensors = _tensors([self.results[value], *(self.results[source] for source in place.reads)])
        matmul = node.op.startswith(_MATMULS) and any(tensor.dtype in HALF for tensor in tensors)
        reorders = matmul or node.op.startswith("aten.convolution")
        if not (node.workspace_bytes or reorders) or self._growth(value, place) == 1:
            return 0
        reordered = sum(reordered_bytes(one.shape, one.dtype.itemsize) for one in tensors) if reorders else 0
        return max(MARGIN * node.workspace_bytes, reordered - node.workspace_bytes)

    def _alone(self, values: list[int]) -> dict[int, fx.Node]:
        """Nodes in a graph of their own, with tensors of the present sizes."""
        graph, make = fx.Graph(), _torch.FakeMaker(_torch.FakeMode()).make

        def fake(result: Result) -> Any:
            return make(*result[:4]) if isinstance(result, Described) else tuple(one and fake(one) for one in result)

        nodes = {}
        for value in values:
            given = {}
            for source in self.blueprint.places[value].reads:
                given[self.nodes[source]] = graph.placeholder("given")
                given[self.nodes[source]].meta["val"] = fake(self.results[source])
            args, kwargs = fx.node.map_arg(self.joint.arguments(self.nodes[value]), given.__getitem__)
            target: Any = self.nodes[value].target
            nodes[value] = graph.call_function(target, args, kwargs)
            nodes[value].meta["val"] = fake(self.results[value])
        return nodes

    def _check_inputs(self) -> None:
        """Inputs must share storages as they did."""
        first: dict[Any, int] = {}
        count = len(self.sizes.inputs)
        before = [first.setdefault(node.storages, index) for index, node in enumerate(self.first_graph.nodes[:count])]
        if before != self.sizes.same_storage:
            raise Unlike("other inputs share memory")

    def _storage_bytes(self) -> list[int]:
        storages = list(self.first_graph.storage_bytes)
        for node, result in zip(self.first_graph.nodes[: len(self.first.inputs)], self.results, strict=False):
            for storage in node.storages:
                assert isinstance(result, Described)
                storages[storage] = allocated_bytes(result.storage_bytes, result.device)
        for value, place in self.blueprint.places.items():
            result = self.results[value]
            for storage, item, alone in place.allocates:
                one: Any = result if isinstance(result, Described) else result[item]
                storages[storage] = allocated_bytes(one.least_bytes if alone else one.storage_bytes, one.device)
        return storages

    def _node(self, value: int, node: Node) -> Node:
        place = self.blueprint.places.get(value)
        if place is None or place.item is not None or node.phase == "input":
            return node
        result = self.results[value]
        if isinstance(result, Described) and node.dense and not result.is_dense:
            if value in self.blueprint.added:
                raise Unlike("a gradient has another memory layout")
            node = dataclasses.replace(node, dense=False)
        if node.inplace and not self._fits_over(node, result):
            raise Unlike("a result does not fit over its input")
        if _is_seeded(self.nodes[value].target) and _floats(self.sizes.calls[place.call]) != _floats(
            self.blueprint.calls[place.call]
        ):
            raise Unlike("random numbers are drawn with other probabilities")
        if not node.moved_bytes and not node.seconds:
            return node
        flops, moved = self._work_of(value, place)
        if (flops, moved) == (node.flops, node.moved_bytes):
            return node
        inputs = [self.results[source] for source in place.reads]
        half = any(one.dtype in HALF for one in _tensors([result, *inputs]))
        ratio = roofline_seconds(self.device, flops, moved, half)
        ratio /= roofline_seconds(self.device, node.flops, node.moved_bytes, half)
        return dataclasses.replace(
            node, flops=flops, moved_bytes=moved, seconds=node.seconds * ratio,
            workspace_bytes=math.ceil(node.workspace_bytes * self._growth(value, place)),
        )  # fmt: skip

    def _growth(self, value: int, place: _Place) -> float:
        """How much the tensor that grows most has grown, at least 1."""
        return max(map(self._grown, (value, *place.reads)))

    def _grown(self, value: int) -> float:
        """How much the largest growth is among the tensors of one value."""
        growth = self.growths.get(value)
        if growth is None:
            before, after = self.nodes[value].meta.get("val"), self.results[value]
            olds = before if isinstance(before, (tuple, list)) else (before,)
            news = (after,) if isinstance(after, Described) else after
            growth = 1.0
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor) and new is not None and old.numel():
                    growth = max(growth, math.prod(new.shape) / old.numel())
            self.growths[value] = growth
        return growth

    def _fits_over(self, node: Node, result: Result) -> bool:
        first = self.results[node.inputs[0]]
        return isinstance(first, Described) and first[:3] == result[:3] and first.is_dense

    def _work_of(self, value: int, place: _Place) -> tuple[int, int]:
        """Floating point operations and bytes moved, once for each kind of call."""
        node, plain = self.first.nodes[value], place.plain(self.sizes.calls)
        inputs = tuple(self.results[source] for source in place.reads)
        key = (node.target, plain, inputs, self.results[value])
        if key not in self.work:
            joint = dataclasses.replace(self.first, plain={node: plain})
            tensors = {self.nodes[source]: result for source, result in zip(place.reads, inputs, strict=True)}
            args, kwargs = fx.node.map_arg(joint.arguments(node), lambda source: _meta(tensors[source]))
            self.work[key] = op_work(node.target, args, kwargs, _meta(self.results[value]))
        return self.work[key]

    def _slot(self, slot: int, entry: Slot) -> Slot:
        result = self.results[self.first_graph.total(slot)]
        if not isinstance(result, Described) or not entry.bytes:
            return entry
        size = allocated_bytes(math.prod(result.shape) * result.dtype.itemsize, result.device)
        return dataclasses.replace(entry, bytes=size, seconds=sum_seconds(self.device, size))


def _is_seeded(target: Any) -> bool:
    return target is bernoulli_like or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _floats(call: Call) -> list[float]:
    return [value for value in call.plain if isinstance(value, float)]


def _tensors(results: Iterable[Result]) -> list[Described]:
    """The tensors among ``results``."""
    return [one for result in results for one in ([result] if isinstance(result, Described) else result) if one]


def _meta(result: Result) -> Any:
    """Tensors without memory that look as described."""
    if isinstance(result, Described):
        return torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    return tuple(item and _meta(item) for item in result)
