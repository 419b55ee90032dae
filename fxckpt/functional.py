"""The second run of the traced step: under functionalization, with a record of what became of every node."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

from fxckpt import _torch
from fxckpt.joint import Edge, Trace, inplace_form, is_alias, pure_form

__all__ = ["SCATTERS", "Functional", "run_functional"]

Question = tuple[int, str, int]
"""A gradient: index of a record, ``"total"`` or ``"part"``, and which of its totals or contributions."""


@dataclass(slots=True)
class Functional:
    """The step as pure values, in traced order, tied to the trace that it was made from.

    Attributes:
        module: holds the graph and the constants that its ``get_attr`` nodes name.
        graph: the functional graph; writes to inputs are ``copy_`` nodes.
        origin: new node name -> old node that was running when it appeared.
        value: old node -> new node that held its value right after it ran.
        edges: new node -> edge it had when some operator read it.
        outputs: new node of each of the trace's outputs, at the end.
        gradients: new node of each gradient at the moment when it was complete.
        writes: new nodes that write to inputs: ``copy_``, or the in-place form of what made the new value.
        plain: the graph is the trace's own, with functional operators in the place of those that write.
        numbers: node that writes into a view -> that view, whose numbers it has.
    """

    module: fx.GraphModule
    graph: fx.Graph
    origin: dict[str, fx.Node]
    value: dict[fx.Node, fx.Node]
    edges: dict[fx.Node, Edge]
    outputs: list[fx.Node]
    gradients: dict[Question, fx.Node]
    writes: set[fx.Node] = field(default_factory=set)
    plain: bool = False
    numbers: dict[str, str] = field(default_factory=dict)


def run_functional(trace: Trace) -> Functional:
    """Run the traced graph again under functionalization.

    Args:
        trace: the result of capture.

    Returns:
        The functional graph, and for every node, output and gradient of the trace the pure value that it had.
    """
    writes = _plain_writes(trace)
    if writes is not None:
        return _as_it_is(trace, writes)
    functional = _Run(trace).result()
    for node in list(functional.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            functional.writes.update(_update_in_place(functional, node) or [node])
    return functional


def _plain_writes(trace: Trace) -> dict[fx.Node, Any] | None:
    """In-place operators with their functional forms, if no other name for what they write to is read afterwards.

    None as value marks an update of an input that nothing reads; it may stay as it is. A ``copy_`` into a view, as
    autograd does for gradients of strided views, has the view's ``scatter`` as functional form.

    Returns:
        None if there is a write that needs the full treatment.
    """
    named = {*trace.output_nodes, *(node for record in trace.records for _, node in record.contributions)}
    named.update(node for record in trace.records for node in record.totals if node is not None)
    position = {node: place for place, node in enumerate(trace.graph_module.graph.nodes)}
    names = {argument for _, argument in trace.edges}
    differentiable = {node for node in position if node.name in names}
    found: dict[fx.Node, Any] = {}
    for node in position:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or target in named:
            return None
        if target.op == "placeholder":
            if set(target.users) != {node} or node.users or node in named:
                return None
            found[node] = None
        elif _is_copy_into_view(node, position, named | differentiable, found):
            found[node] = SCATTERS[target.target]
        else:
            form, chain = pure_form(node), _chain(target, found)
            if form is None or not chain or not _unseen(chain, node, position):
                return None
            if is_alias(form) and torch.Tag.inplace_view not in node.target.tags:
                return None
            found[node] = form
    return found


SCATTERS: dict[Any, Any] = {
    torch.ops.aten.as_strided.default: torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


def _chain(target: fx.Node, found: dict[fx.Node, Any]) -> list[fx.Node]:
    """``target``, what it is a view of, and so on to the operator that made the memory; empty if that is unclear."""
    chain = [target]
    while is_alias(chain[-1].target) and chain[-1].target is not operator.getitem:
        if chain[-1] in found and not is_alias(found[chain[-1]]):
            break  # it will be a value of its own
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node) or source.meta["val"].dtype is not target.meta["val"].dtype:
            return []
        chain.append(source)
    maker = chain[-1].args[0] if chain[-1].target is operator.getitem else chain[-1]
    fresh = (
        isinstance(maker, fx.Node) and maker.op == "call_function" and (not is_alias(maker.target) or maker in found)
    )
    return chain if fresh else []


def _unseen(chain: list[fx.Node], write: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether all that else reads the memory of ``chain`` does so before ``write``, and makes no view of it."""
    own = {write, *chain}
    others = {user for node in chain for user in node.users} - own
    return all(position[user] < position[write] and not is_alias(user.target) for user in others)


def _is_copy_into_view(
    node: fx.Node, position: dict[fx.Node, int], kept: set[fx.Node], found: dict[fx.Node, Any]
) -> bool:
    """Whether something is copied into a view of memory that was made for it and is read as a whole afterwards.

    Args:
        kept: nodes that must stay what they are: outputs, gradients at some moment, and what gradients flow through.
    """
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    view, source = node.args[:2]
    if not isinstance(view, fx.Node) or not isinstance(source, fx.Node) or view.target not in SCATTERS:
        return False
    base, one, other = view.args[0], view.meta["val"], source.meta["val"]
    if not isinstance(base, fx.Node) or base in kept or base.op != "call_function" or is_alias(base.target):
        return False
    written = {copy.args[0] for copy, form in found.items() if form in SCATTERS.values()}
    earlier = [user for user in base.users if position[user] < position[node]]
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    views = [user for user in earlier if is_alias(user.target) and user is not view and user not in written]
    return same and set(view.users) == {node} and not views


def _as_it_is(trace: Trace, writes: dict[fx.Node, Any]) -> Functional:
    """A trace whose only mutations are ``writes``: running it again would take as long as the trace took."""
    graph = trace.graph_module.graph
    numbers: dict[str, str] = {}
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node, form in writes.items():
        if form in SCATTERS.values():
            numbers[node.name] = node.args[0].name  # type: ignore[union-attr, assignment]
            _scatter(node, form, position)
        elif form is not None:
            node.target = form
            if not is_alias(form):
                _give_storage(_chain(node.args[0], writes))  # type: ignore[arg-type]
    nodes = {node.name: node for node in graph.nodes}
    gradients: dict[Question, fx.Node] = {}
    for record in trace.records:
        for place, total in enumerate(record.totals):
            if total is not None:
                gradients[record.index, "total", place] = total
        for place, (_, part) in enumerate(record.contributions):
            gradients[record.index, "part", place] = part
    return Functional(
        module=trace.graph_module, graph=graph, origin=dict(nodes), value={node: node for node in graph.nodes},
        edges={nodes[argument]: edge for (_, argument), edge in trace.edges.items()},
        outputs=list(trace.output_nodes), gradients=gradients,
        writes={node for node, form in writes.items() if form is None}, plain=True, numbers=numbers,
    )  # fmt: skip


def _scatter(copy: fx.Node, form: Any, position: dict[fx.Node, int]) -> None:
    """Turn ``copy_(view(base, ...), source)`` into the value that ``base`` has afterwards, for those who read it."""
    view, source = copy.args[:2]
    base = view.args[0]  # type: ignore[union-attr]
    later = [user for user in base.users if position[user] > position[copy]]  # type: ignore[union-attr]
    copy.target, copy.args, copy.kwargs = form, (base, source, *view.args[1:]), dict(view.kwargs)  # type: ignore[union-attr]
    copy.meta["val"] = base.meta["val"]  # type: ignore[union-attr]
    _give_storage([base])  # type: ignore[list-item]
    for user in later:
        user.replace_input_with(base, copy)  # type: ignore[arg-type]


def _give_storage(chain: list[fx.Node]) -> None:
    """Let the value that was written over have memory of its own; the result keeps what later views share.

    Args:
        chain: the value, what it is a view of, and so on.
    """
    made = chain[-1].meta["val"]
    with made.fake_mode:
        base = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device)
        for node in chain[:-1]:
            old = node.meta["val"]
            node.meta["val"] = torch.as_strided(base, old.shape, old.stride(), old.storage_offset())
    chain[-1].meta["val"] = base
    if chain[-1].target is operator.getitem:
        source, place = chain[-1].args
        values = list(source.meta["val"])  # type: ignore[union-attr]
        values[place] = base  # type: ignore[index]
        source.meta["val"] = tuple(values)  # type: ignore[union-attr]


class _Run:
    """Notes by node name, since the nodes of a trace in progress are not those of the finished graph."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.origin: dict[str, fx.Node] = {}
        self.names: dict[fx.Node, str] = {}
        self.edge_names: dict[str, Edge] = {}
        self.output_names: list[str] = []
        self.answers: dict[Question, str] = {}
        self.questions: dict[str, list[tuple[fx.Node, Question]]] = {}
        for record in trace.records:
            for place, total in enumerate(record.totals):
                if total is not None:
                    self.questions.setdefault(record.before, []).append((total, (record.index, "total", place)))
            for place, (_, part) in enumerate(record.contributions):
                self.questions.setdefault(record.after, []).append((part, (record.index, "part", place)))
        self.by_consumer: dict[str, list[tuple[str, Edge]]] = {}
        for (consumer, argument), edge in trace.edges.items():
            self.by_consumer.setdefault(consumer, []).append((argument, edge))

    def result(self) -> Functional:
        old_inputs = _placeholders(self.trace.graph_module.graph)
        fakes = [node.meta["val"].detach() for node in old_inputs]
        # The trace holds every cast already; autocast would add its own to the operators as they are run again.
        off = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
        with old_inputs[0].meta["val"].fake_mode, torch.no_grad(), off[0], off[1]:
            module = _torch.traced(self._trace, fakes)
        graph = module.graph
        nodes = {node.name: node for node in graph.nodes}
        value = {old: nodes[name] for old, name in self.names.items() if name in nodes}
        value.update(zip(old_inputs, _placeholders(graph), strict=True))
        return Functional(
            module=module,
            graph=graph,
            origin=self.origin,
            value=value,
            edges={nodes[name]: edge for name, edge in self.edge_names.items() if name in nodes},
            outputs=[nodes[name] for name in self.output_names],
            gradients={question: nodes[name] for question, name in self.answers.items()},
        )

    def _trace(self, *inputs: Tensor) -> Any:
        tracer = _torch.current_tracer()
        create_node = tracer.graph.create_node
        interpreter = _Recorder(self, tracer)

        def tagged(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create_node(*args, **kwargs)
            if interpreter.current is not None:
                self.origin[node.name] = interpreter.current
            return node

        tracer.graph.create_node = tagged
        try:
            return functionalize(interpreter.run_all, remove="mutations")(*inputs)
        finally:
            tracer.graph.create_node = create_node


class _Recorder(fx.Interpreter):
    def __init__(self, owner: _Run, tracer: Any) -> None:
        super().__init__(owner.trace.graph_module, garbage_collect_values=False)
        self.owner, self.tracer = owner, tracer
        self.current: fx.Node | None = None
        self.old = {node.name: node for node in owner.trace.graph_module.graph.nodes}

    def run_all(self, *inputs: Tensor) -> Any:
        """All nodes, then the outputs once more: a later operator may have written to them."""
        result = self.run(*inputs)
        for node in self.owner.trace.output_nodes:
            self.current = node
            name = self._name(self.env[node])
            assert name is not None
            self.owner.output_names.append(name)
        self.current = None
        return result

    def run_node(self, n: fx.Node) -> Any:
        """One node; notes the edges of what it reads, its value, and the gradients that are complete with it."""
        self.current = n
        for argument, edge in self.owner.by_consumer.get(n.name, ()):
            if self.old.get(argument) in self.env:
                name = self._name(self.env[self.old[argument]])
                if name is not None:
                    self.owner.edge_names[name] = edge
        result = super().run_node(n)
        name = self._name(result) if isinstance(result, Tensor) else None
        if name is not None and n.op != "placeholder":
            self.owner.names[n] = name
        for node, question in self.owner.questions.get(n.name, ()):
            name = self._name(self.env[node] if node is not n else result)
            assert name is not None
            self.owner.answers[question] = name
        return result

    def _name(self, tensor: Tensor) -> str | None:
        node = _torch.proxy_node(_torch.functional_value(tensor), self.tracer)
        return None if node is None else node.name


def _update_in_place(functional: Functional, copy: fx.Node) -> list[fx.Node]:
    """Put in-place operators where an input is read only to compute its own new value, as a counter's ``add_(1)`` is.

    Returns:
        The operators that took the place of ``copy`` and of what made its value; none if that cannot be.
    """
    clone = torch.ops.aten.clone.default
    target, value = copy.args
    assert isinstance(target, fx.Node)
    named = {*functional.outputs, *functional.gradients.values(), *functional.edges}
    chain: list[fx.Node] = []
    while value is not target:
        if not isinstance(value, fx.Node) or len(value.users) != 1 or value in named:
            return []
        if value.target is not clone and (inplace_form(value) is None or _is_random(value)):
            return []
        chain.append(value)
        value = value.args[0]
    if all(node.target is clone for node in chain):
        return []
    if target in named or copy in named or copy.users or set(target.users) != {chain[-1], copy}:
        return []
    updates = []
    for node in reversed(chain):
        if node.target is not clone:
            with functional.graph.inserting_after(node):
                update = functional.graph.create_node(
                    "call_function", inplace_form(node), (target, *node.args[1:]), dict(node.kwargs), f"{node.name}_"
                )
            update.meta.update(node.meta, val=target.meta["val"])
            functional.origin[update.name] = functional.origin[node.name]
            updates.append(update)
    for node in (copy, *chain):
        functional.graph.erase_node(node)
    return updates


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
