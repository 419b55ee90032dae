"""The second run of the traced step: under functionalization, with a record of what became of every node."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

from fxckpt import _torch
from fxckpt.joint import Edge, Trace, in_shape_of, inplace_form, is_alias, pure_form
from fxckpt.writes import SCATTERS, chain_of, is_plain_copy, is_random, plain_writes

__all__ = ["Functional", "alone", "run_functional"]

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
    writes = plain_writes(trace)
    if writes is not None:
        return _as_it_is(trace, writes)
    functional = _Run(trace).result()
    for node in list(functional.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            functional.writes.update(_update_in_place(functional, node) or [node])
    return functional


def _as_it_is(trace: Trace, writes: dict[fx.Node, Any]) -> Functional:
    """A trace whose only mutations are ``writes``: running it again would take as long as the trace took."""
    graph = trace.graph_module.graph
    numbers: dict[str, str] = {}
    made: dict[str, fx.Node] = {}
    versions: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node, form in writes.items():
        if form in SCATTERS.values():
            view: Any = node.args[0]
            base, scatter = _scatter(node, view, form, position)
            versions.setdefault(base, []).append((position[node], scatter))
            numbers[scatter.name], made[scatter.name] = view.name, node
        elif form is not None:
            node.target = form
            if not is_alias(form):
                _give_storage(chain_of(node.args[0], writes))  # type: ignore[arg-type]
    nodes = {node.name: node for node in graph.nodes}

    def value_at(node: fx.Node, name: str, last: int = 0) -> fx.Node:
        """What ``node`` is when the node ``name`` is about to run; with ``last`` 1, when it has run."""
        place = position[nodes[name]] + last if name else len(position)
        while node in versions:
            later = [scatter for written, scatter in versions[node] if written < place]
            if not later:
                break
            node = later[-1]
        return node

    gradients: dict[Question, fx.Node] = {}
    for record in trace.records:
        for place, total in enumerate(record.totals):
            if total is not None:
                gradients[record.index, "total", place] = value_at(total, record.before, 1)
        for place, (_, part) in enumerate(record.contributions):
            gradients[record.index, "part", place] = value_at(part, record.after, 1)
    edges = {value_at(nodes[argument], reader): edge for (reader, argument), edge in trace.edges.items()}
    return Functional(
        module=trace.graph_module, graph=graph, origin={**nodes, **made}, value={node: node for node in graph.nodes},
        edges=edges, outputs=[value_at(node, "") for node in trace.output_nodes], gradients=gradients,
        writes={node for node, form in writes.items() if form is None}, plain=True, numbers=numbers,
    )  # fmt: skip


def _scatter(write: fx.Node, view: Any, form: Any, position: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node]:
    """The base of ``view``, and the value that it has after ``write``, for those who read it then."""
    base: Any = view.args[0]
    source: Any
    later = [user for user in base.users if position[user] > position[write]]
    if is_plain_copy(write):
        source, scatter = write.args[1], write
    else:
        source, write.target = write, pure_form(write)
        write.meta["val"] = alone(view.meta["val"])
        with write.graph.inserting_after(write):
            scatter = write.graph.create_node("call_function", form, name=f"{write.name}_scatter")
        scatter.meta.update(write.meta)
        position[scatter] = position[write]
    if form is in_shape_of:
        scatter.target, scatter.args, scatter.kwargs = form, (base, source), {}
        with base.meta["val"].fake_mode:
            scatter.meta["val"] = in_shape_of(base.meta["val"], source.meta["val"])
    else:
        scatter.target, scatter.args, scatter.kwargs = form, (base, source, *view.args[1:]), dict(view.kwargs)
        scatter.meta["val"] = base.meta["val"]
        _give_storage([base])
    for user in later:
        user.replace_input_with(base, scatter)
    return base, scatter


def _give_storage(chain: list[fx.Node]) -> None:
    """Let the value that was written over have memory of its own; the result keeps what later views share.

    Args:
        chain: the value, what it is a view of, and so on.
    """
    base = alone(chain[-1].meta["val"])
    with base.fake_mode:
        for node in chain[:-1]:
            old = node.meta["val"]
            node.meta["val"] = torch.as_strided(base, old.shape, old.stride(), old.storage_offset())
    chain[-1].meta["val"] = base
    if chain[-1].target is operator.getitem:
        source, place = chain[-1].args
        values = list(source.meta["val"])  # type: ignore[union-attr]
        values[place] = base  # type: ignore[index]
        source.meta["val"] = tuple(values)  # type: ignore[union-attr]


def alone(fake: Any) -> Any:
    """A fake tensor like ``fake`` in memory of its own."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


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
        if value.target is not clone and (inplace_form(value) is None or is_random(value)):
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


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
