"""Turn the traced step into pure values and put it in the order of the joint graph.

In the result every node is a value that never changes; writes to inputs are ``copy_`` nodes at the end of forward;
gradients are summed only by ``sum_gradients`` nodes, one for each slot.
"""

from __future__ import annotations

import bisect
import operator
from typing import Any

import torch
from torch import fx

from fxckpt.device import is_view
from fxckpt.errors import CaptureError
from fxckpt.functional import Functional, alone, run_functional
from fxckpt.joint import (
    Edge,
    JointGraph,
    RegionInput,
    Trace,
    bernoulli_like,
    functional_form,
    pure_form,
    sum_gradients,
)

__all__ = ["functionalize"]

aten = torch.ops.aten
NEAR = 4  # a view of a parameter and a reader this close behind it are not cut apart
STATISTICS = {  # training-mode normalisations: positions of the running statistics that the kernel updates
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
    aten._native_batch_norm_legit.default: (3, 4),
}


def functionalize(trace: Trace) -> JointGraph:
    """Rewrite ``trace`` as a functional joint graph.

    Args:
        trace: the result of capture.

    Returns:
        The joint graph, with forbidden cut positions and the value of every gradient slot.

    Raises:
        CaptureError: forward writes to an input that requires grad.
    """
    return _Assembly(trace, run_functional(trace)).build()


class _Assembly:
    def __init__(self, trace: Trace, second: Functional) -> None:
        self.trace, self.second = trace, second
        self.new = fx.Graph()
        self.map: dict[fx.Node, fx.Node] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.origin: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.tangent_old = {second.value[node]: node for node in trace.tangent_nodes if node is not None}
        self._drop_aliases()
        self.forward_old, self.tags, self.members = self._split()
        self.position = {node: index for index, node in enumerate(self.forward_old)}

    # -- which node belongs where ---------------------------------------------------------------------------------

    def _drop_aliases(self) -> None:
        """Remove ``alias`` and ``detach`` where they only name a value again; autograd adds them by the dozen.

        A detached use of a differentiable value in forward stays, for double backward has to stop there.
        """
        second, outputs = self.second, set(self.second.outputs)
        same: dict[fx.Node, fx.Node] = {}
        for node in list(second.graph.nodes):
            if node.target not in (aten.alias.default, aten.detach.default) or node in second.edges or node in outputs:
                continue
            source = node.args[0]
            origin = second.origin.get(node.name)
            backward = origin is not None and origin.name in self.trace.backward_tag
            if isinstance(source, fx.Node) and (backward or source not in second.edges):
                node.replace_all_uses_with(source)
                same[node] = source
                second.graph.erase_node(node)
        tables: list[dict[Any, fx.Node]] = [second.value, second.gradients]
        for table in tables:
            for key, node in table.items():
                while node in same:
                    node = same[node]
                table[key] = node

    def _live(self) -> set[fx.Node]:
        """Nodes that outputs, gradients or forward operators are made of."""
        stack = [*self.second.outputs, *self.second.gradients.values()]
        stack += [node for node in self.second.graph.nodes if self._is_forward(node)]
        live: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack += node.all_input_nodes
        return live

    def _is_forward(self, node: fx.Node) -> bool:
        origin = self.second.origin.get(node.name)
        return origin is None or origin.name not in self.trace.backward_tag

    def _split(self) -> tuple[list[fx.Node], list[int], dict[int, list[fx.Node]]]:
        """Forward nodes in order with their tags, and the nodes of each autograd node."""
        depends: set[fx.Node] = set(self.tangent_old)
        forward: list[fx.Node] = []
        late: list[fx.Node] = []
        members: dict[int, list[fx.Node]] = {}
        owner: dict[fx.Node, int] = {}
        live = self._live()
        for node in self.second.graph.nodes:
            if node.op != "call_function" or node in self.tangent_old or node not in live:
                continue
            if getattr(node.target, "namespace", "") == "profiler":
                continue  # record_function marks a span of Python code, which is not there any more
            origin = self.second.origin.get(node.name)
            name = "" if origin is None else origin.name
            if any(source in depends for source in node.all_input_nodes):
                depends.add(node)
            if name in self.trace.backward_tag:
                owner[node] = self.trace.backward_tag[name]
                members.setdefault(owner[node], []).append(node)
            elif node not in depends:
                forward.append(node)
        shared = {
            source
            for node, index in owner.items()
            for source in node.all_input_nodes
            if source not in depends and owner.get(source, index) != index
        } | {source for node in forward for source in node.all_input_nodes if source in owner}
        stack = list(shared)
        while stack:  # what a shared pure value is made of is shared as well
            for source in stack.pop().all_input_nodes:
                if source in owner and source not in shared:
                    shared.add(source)
                    stack.append(source)
        late = [node for node in self.second.graph.nodes if node in shared]
        members = {index: [node for node in nodes if node not in shared] for index, nodes in members.items()}
        return (*self._order(forward, late), members)

    def _order(self, forward: list[fx.Node], late: list[fx.Node]) -> tuple[list[fx.Node], list[int]]:
        """Forward order: as executed, ``getitem`` right behind its operator, late values behind their inputs."""
        items: dict[fx.Node, list[fx.Node]] = {}
        order: list[fx.Node] = []
        for node in forward:
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node):
                items.setdefault(source, []).append(node)
            else:
                order.append(node)
        placed: list[fx.Node] = []
        for node in order:
            placed += [node, *items.get(node, ())]
        rank = {node: float(index) for index, node in enumerate(placed)}
        for count, node in enumerate(late):
            base = max((rank[source] for source in node.all_input_nodes if source in rank), default=-1.0)
            rank[node] = base + 1e-6 * (count + 1)
        placed = sorted(rank, key=rank.__getitem__)
        tags, latest = [], 0
        for node in placed:
            origin = self.second.origin.get(node.name)
            latest = max(latest, self.trace.forward_tag.get("" if origin is None else origin.name, latest))
            tags.append(latest)
        return placed, tags

    # -- the new graph --------------------------------------------------------------------------------------------

    def build(self) -> JointGraph:
        inputs = self._placeholders()
        for node in self.forward_old:
            self._copy(node)
        self._slots()
        records = self._records()
        leaf_sums = [self._sum(slot) for slot, owner in enumerate(self.slot_owner) if owner < 0 and self.parts[slot]]
        outputs = [self.map[node] for node in self.second.outputs]
        self.new.output((outputs, leaf_sums))
        self.new.lint()
        writes = [self.map[node] for node in self.forward_old if node in self.second.writes]
        forward = [self.map[node] for node in self.forward_old]
        sums = set(self.sums.values())
        return JointGraph(
            graph=self.new, inputs=inputs, forward=forward, outputs=outputs, records=records, writes=writes,
            nodes=[node for node in self.new.nodes if node.op != "output" and node not in sums],
            sums=[self.sums.get(slot, self.new.output_node()) for slot in range(len(self.parts))],
            slot_values=[None if value is None else self.map[value] for value in self.slot_values],
            differentiable=self._differentiable(), slot_tangents=self.slot_tangents, slot_owner=self.slot_owner,
            mutated=self._mutated(writes), forbidden=self._forbidden(), constants=self.constants,
            output=self.trace.output, fakes=self.trace.outputs, assigned=self.trace.assigned, places=self.places,
            tape=self.trace.tape, origin=self.origin if self.second.plain else {},
        )  # fmt: skip

    def _placeholders(self) -> list[RegionInput]:
        inputs = list(self.trace.inputs)
        for old in self.second.graph.nodes:
            if old.op == "placeholder":
                self._place(old, self.new.placeholder(old.name))
            elif old.op == "get_attr":
                constant = _attribute(self.second.module, old.target)
                self.constants[old.name] = constant
                inputs.append(RegionInput("constant", old.name, False))
                self._place(old, self.new.placeholder(old.name))
                self.map[old].meta.setdefault("val", constant)
        for index, old in enumerate(self.tangent_old):
            self._place(old, self.new.placeholder(f"tangent_{index}"))
        return inputs

    def _place(self, old: fx.Node, new: fx.Node) -> None:
        new.meta.update(old.meta)
        self.map[old] = new
        self.origin[new.name] = old.name

    def _copy(self, old: fx.Node, swap: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        swap = swap or {}
        new = self.new.node_copy(old, lambda node: swap.get(node) or self.map[node])
        self.map[old] = new
        self.origin[new.name] = self.second.numbers.get(old.name, old.name)
        origin = self.second.origin.get(old.name)
        if origin is not None and old.target is aten.bernoulli.p and origin.target is aten.bernoulli_.float:
            new.target, new.meta["val"] = bernoulli_like, alone(origin.meta["val"])
        elif origin is not None and old.target is functional_form(origin.target) is not pure_form(origin):
            new.target, new.meta["val"] = pure_form(origin), alone(origin.meta["val"])
        if origin is not None and origin.name in self.trace.places:
            self.places[new.name] = self.trace.places[origin.name]
        return new

    def _slots(self) -> None:
        """Number the gradients: one slot per edge that receives a contribution or a tangent."""
        records = self.trace.records
        rank = {record.index: order for order, record in enumerate(records)}
        self.slot_of: dict[Edge, int] = {}
        self.slot_owner: list[int] = []
        self.parts: list[list[fx.Node]] = []
        self.slot_tangents: list[fx.Node | None] = []
        for edge, tangent in zip(self.trace.output_edges, self.trace.tangent_nodes, strict=True):
            if edge is not None and tangent is not None:
                slot = self._slot(edge, rank)
                self.slot_tangents[slot] = self.map[self.second.value[tangent]]
                self.parts[slot].append(self.map[self.second.value[tangent]])
        for record in records:
            for edge, _ in record.contributions:
                self._slot(edge, rank)
        placeholders = [node for node in self.second.graph.nodes if node.op == "placeholder"]
        by_edge: dict[Edge, fx.Node] = {(-1 - index, 0): node for index, node in enumerate(placeholders)}
        for node in self.forward_old:
            if node in self.second.edges:
                by_edge.setdefault(self.second.edges[node], node)
        for edge, node in zip(self.trace.output_edges, self.second.outputs, strict=True):
            if edge is not None and edge[0] >= 0:
                by_edge[edge] = node
        self.slot_values = [by_edge.get(edge) for edge in self.slot_of]
        self.sums: dict[int, fx.Node] = {}

    def _differentiable(self) -> dict[fx.Node, int]:
        edges = {node: edge for node, edge in self.second.edges.items() if node in self.position}
        for node, edge in zip(self.second.outputs, self.trace.output_edges, strict=True):
            if edge is not None:
                edges[node] = edge
        return {self.map[node]: self.slot_of.get(edge, -1) for node, edge in edges.items()}

    def _slot(self, edge: Edge, rank: dict[int, int]) -> int:
        if edge not in self.slot_of:
            self.slot_of[edge] = len(self.parts)
            self.slot_owner.append(-1 if edge[0] < 0 else rank.get(edge[0], -2))
            self.parts.append([])
            self.slot_tangents.append(None)
        return self.slot_of[edge]

    def _sum(self, slot: int) -> fx.Node:
        if slot not in self.sums:
            node = self.sums[slot] = self.new.call_function(sum_gradients, tuple(self.parts[slot]))
            node.meta["val"] = self.parts[slot][0].meta["val"]
        return self.sums[slot]

    def _records(self) -> list[tuple[str, int, list[int], list[fx.Node], list[tuple[int, fx.Node]]]]:
        result = []
        self.reads_of: list[list[fx.Node]] = []
        for record in self.trace.records:
            swap: dict[fx.Node, fx.Node] = {}
            reads = []
            for number, total in enumerate(record.totals):
                slot = self.slot_of.get((record.index, number))
                if total is not None and slot is not None and self.parts[slot]:
                    reads.append(slot)
                    swap[self.second.gradients[record.index, "total", number]] = self._sum(slot)
            own = self.members.get(record.index, [])
            self.reads_of.append([source for node in own for source in node.all_input_nodes if source not in swap])
            nodes = [self._copy(node, swap) for node in own]
            contributions = []
            for place, (edge, _) in enumerate(record.contributions):
                old = self.second.gradients[record.index, "part", place]
                node = swap.get(old) or self.map[old]
                slot = self.slot_of[edge]
                self.parts[slot].append(node)
                contributions.append((slot, node))
            result.append((record.name, self._position_of(record.sequence), reads, nodes, contributions))
        return result

    def _position_of(self, sequence: int) -> int:
        return min(bisect.bisect_right(self.tags, sequence), len(self.tags) - 1)

    # -- where not to cut, and what changes ------------------------------------------------------------------------

    def _forbidden(self) -> list[tuple[int, int]]:
        ranges: set[tuple[int, int]] = set()
        records = self.trace.records
        places = [self._position_of(record.sequence) for record in records]
        owner_of = {node: order for order, record in enumerate(records) for node in self.members.get(record.index, ())}

        def forbid(a: int, b: int) -> None:
            if a != b:
                ranges.add((min(a, b), max(a, b)))

        for order, record in enumerate(records):
            for edge, _ in record.contributions:
                slot = self.slot_of[edge]
                owner, value = self.slot_owner[slot], self.slot_values[slot]
                if owner >= 0:
                    near = places[order] if value is None else self._value_position(value, places[owner])
                    forbid(places[owner], near)
            for source in self.reads_of[order]:
                if source in self.position and self.position[source] > places[order]:
                    forbid(places[order], self.position[source])
                elif owner_of.get(source, order) != order:
                    forbid(places[order], places[owner_of[source]])
        for slot, value in enumerate(self.slot_values):
            if self.slot_owner[slot] >= 0 and value is not None:
                forbid(places[self.slot_owner[slot]], self._value_position(value, places[self.slot_owner[slot]]))
        given = {node for node in self.second.graph.nodes if node.op == "placeholder"}
        for node, place in self.position.items():
            if is_view(node.target) and given.issuperset(node.all_input_nodes):  # stays with its first reader
                after = min((self.position[user] for user in node.users if user in self.position), default=place)
                if place < after <= place + NEAR:
                    forbid(place, after)
            if isinstance(node.meta.get("val"), (tuple, list)):
                forbid(place, max((self.position.get(user, place) for user in node.users), default=place))
        return sorted(ranges)

    def _value_position(self, value: fx.Node, default: int) -> int:
        return self.position.get(value, default)

    def _mutated(self, writes: list[fx.Node]) -> list[fx.Node]:
        placeholders = [node for node in self.new.nodes if node.op == "placeholder"]
        mutated: dict[fx.Node, None] = {}
        for write in writes:
            mutated[write.args[0]] = None  # type: ignore[index]
        for old in self.forward_old:
            for index in STATISTICS.get(old.target, ()):  # type: ignore[call-overload]
                node = self.map[old].args[index]
                if isinstance(node, fx.Node) and self.map[old].args[5] is True:
                    mutated[node] = None
        for node in mutated:
            order = placeholders.index(node)
            if order < len(self.trace.inputs) and self.trace.inputs[order].requires_grad:
                raise CaptureError(
                    f"forward writes to {self.trace.inputs[order].name}, which requires grad",
                    reason="in-place change of an input that requires grad",
                )
        return list(mutated)


def _attribute(module: torch.nn.Module, target: Any) -> Any:
    """A tensor, or another object that an operator takes (a generator)."""
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    return value
