"""Trace the forward and backward of a module once, with real autograd on fake tensors.

Each node of the traced graph is tagged while it is created: forward nodes with autograd's sequence counter, which
ties them to the autograd node they create; backward nodes with the autograd node that runs. A dispatch mode above
the tracer notes, for every tensor that an operator reads, which autograd edge the tensor had at that moment.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import _torch
from fxckpt.constants import RealConstants
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.joint import Edge, GradRecord, Trace
from fxckpt.places import Places
from fxckpt.recorder import TapeRecorder
from fxckpt.rehearsal import Rehearsal, Settles
from fxckpt.state import ModuleState, has_hooks

__all__ = ["capture"]

MOST_SETTINGS = 4  # rounds in which forward may set what had no value
_MISSING = object()


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Trace one training step of ``module``: its forward, and the gradients of every differentiable input.

    Args:
        module: the region; its parameters, buffers and attributes are as before when this returns or raises.
        args: positional inputs, any pytree of tensors and plain values.
        kwargs: keyword inputs.

    Returns:
        The tagged trace. Shapes, dtypes, training flags and plain attributes are specialised. What forward sets once
        and for all (a plain value where there was None) is set from now on, as after a call of the module.

    Raises:
        CaptureError: the Python code of the module cannot be followed; names module, line and construct.
    """
    undo: list[tuple[dict[Any, Any], Any, Any]] = []
    first: Settles | None = None
    try:
        for _ in range(MOST_SETTINGS):
            try:
                trace = _capture(module, args, kwargs)
            except Settles as error:
                first = first or error
                if not error.tape.same_step(first.tape):
                    raise
                for entries, key, value in error.settings:
                    undo.append((entries, key, entries.get(key, _MISSING)))
                    entries[key] = value
                continue
            if first is not None and not trace.tape.same_step(first.tape):
                raise first
            return trace
        assert first is not None
        raise first
    except BaseException:
        for entries, key, value in reversed(undo):
            entries.pop(key) if value is _MISSING else entries.update({key: value})
        raise


def _capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise CaptureError(f"module {path!r} is TorchScript", module=path, reason="TorchScript runs no Python")
        if path and has_hooks(child):
            raise CaptureError(f"module {path!r} carries hooks", module=path, reason="hooks on a submodule")
    state = ModuleState.collect(module)
    for floats in (True, False):
        constants = RealConstants(floats)
        try:
            trace = _Tracing(module, state, args, kwargs, constants).run()
            trace.tape.floats = floats
            return trace
        except CaptureError as error:
            if not constants.made or isinstance(error, Settles):
                raise
        # Something was done to a constant that only a traced tensor can take: it is returned, or written to.
    return _Tracing(module, state, args, kwargs, contextlib.nullcontext()).run()


class _Tracing(Rehearsal):
    def __init__(
        self, module: nn.Module, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Any
    ) -> None:
        super().__init__(module, state, args, kwargs)
        self.constants = constants
        self.recorder = TapeRecorder()
        self.places = Places(module)
        self.created: list[str] = []
        self.forward_tag: dict[str, int] = {}
        self.backward_tag: dict[str, int] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.records: list[GradRecord] = []
        self.record_of: dict[Any, GradRecord] = {}
        self.leaf_index: dict[int, int] = {}
        self.phase = "forward"
        self.latest = ""
        self.handles: list[Any] = []
        self.running: GradRecord | None = None
        self.result: dict[str, Any] = {}

    def run(self) -> Trace:
        mode = _torch.FakeMode(allow_non_fake_inputs=True)
        fakes = [_fake(tensor, mode) for tensor in self.tensors]
        try:
            with self.undone():
                graph_module = self._traced(mode, fakes)
        except Settles as error:
            error.tape = self.recorder.tape
            raise
        nodes = {node.name: node for node in graph_module.graph.nodes}
        return Trace(
            graph_module=graph_module, inputs=self.inputs, assigned=self.assigned, forward_tag=self.forward_tag,
            backward_tag=self.backward_tag, edges=self.edges, places=self.places.by_name, records=self.records,
            tape=self.recorder.tape, **_by_name(self.result, nodes),
        )  # fmt: skip

    def _traced(self, mode: Any, fakes: list[Tensor]) -> fx.GraphModule:
        try:
            with mode, _torch.quiet_fakes():
                return _torch.traced(self.joint, fakes)
        except FxckptError:
            raise
        except Exception as error:
            raise self.places.explain(error) from error
        finally:
            for handle in self.handles:  # hooks hold this object, and through C++ the collector cannot see them
                handle.remove()
            self.record_of.clear()

    def joint(self, *fakes: Tensor) -> list[Tensor | None]:
        """The function that ``make_fx`` traces: forward, then gradients of all differentiable inputs."""
        tracer = self.tracer = _torch.current_tracer()
        graph = tracer.graph
        create_node = graph.create_node

        def tagged(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create_node(*args, **kwargs)
            self.latest = node.name
            self.recorder.note(node.name)
            if self.phase == "forward":
                self.created.append(node.name)
                self.forward_tag[node.name] = _torch.sequence_number()
                self.places.note(node.name)
            elif self.running is not None:
                self.backward_tag[node.name] = self.running.index
            return node

        graph.create_node = tagged
        self.recorder.number(fakes)
        try:
            with self.recorder:
                self._forward(list(fakes))
                gradients = self._backward(fakes)
        finally:
            graph.create_node = create_node
        outputs = self.result["outputs"]
        self.recorder.finish([*outputs, *gradients])
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)]

    def _forward(self, fakes: list[Tensor]) -> None:
        self.leaf_index = {id(fake): index for index, fake in enumerate(fakes) if fake.requires_grad}
        output, outputs = self.forward(fakes, self.places, _EdgeRecorder(self), self.constants)
        nodes = [_torch.proxy_node(tensor, self.tracer) for tensor in outputs]
        if None in nodes:
            raise CaptureError(
                "forward returns a tensor that it did not compute from its inputs", reason="untracked output"
            )
        edges = [self.edge(tensor) if tensor.requires_grad else None for tensor in outputs]
        self.result = {"output": output, "outputs": outputs, "output_nodes": nodes, "output_edges": edges}

    def edge(self, tensor: Tensor) -> Edge | None:
        """Edge of a tensor that requires grad, None for a leaf made inside forward."""
        node = tensor.grad_fn
        if node is not None:
            return self._record(node).index, tensor.output_nr
        index = self.leaf_index.get(id(tensor))
        return None if index is None else (-1 - index, 0)

    def _record(self, node: Any) -> GradRecord:
        if node not in self.record_of:
            self.record_of[node] = GradRecord(len(self.record_of), node.name(), node._sequence_nr())
        return self.record_of[node]

    def _backward(self, fakes: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        self.phase = "backward"
        outputs = [t for t, edge in zip(self.result["outputs"], self.result["output_edges"], strict=True) if edge]
        self._hook_all(outputs)
        tangents = [torch.empty_like(output) for output in outputs]
        nodes = iter([_torch.proxy_node(tangent, self.tracer) for tangent in tangents])
        self.result["tangent_nodes"] = [next(nodes) if edge else None for edge in self.result["output_edges"]]
        inputs = [fake for fake in fakes if fake.requires_grad]
        if not inputs or not outputs:
            raise CaptureError(
                "no output depends on a parameter or input that requires grad", reason="nothing requires grad"
            )
        grads = self.gradients(outputs, inputs, tangents)
        self.running = None
        return grads

    def _hook_all(self, outputs: list[Tensor]) -> None:
        stack = [output.grad_fn for output in outputs]
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            self._hook(node)
            stack += [following for following, _ in node.next_functions]

    def _hook(self, node: Any) -> None:
        record = self._record(node)

        def before(totals: tuple[Tensor | None, ...]) -> None:
            self.running = record
            self.records.append(record)
            record.before = self.latest
            record.totals = [None if t is None else _torch.proxy_node(t, self.tracer) for t in totals]

        def after(gradients: tuple[Tensor | None, ...], _: Any) -> None:
            record.after = self.latest
            for (following, number), gradient in zip(node.next_functions, gradients, strict=True):
                if following is not None and gradient is not None:
                    contribution = _torch.proxy_node(gradient, self.tracer)
                    edge = (self._record(following).index, number)
                    if hasattr(following, "variable"):
                        if id(following.variable) not in self.leaf_index:
                            continue  # a leaf made inside forward: nobody reads its gradient
                        edge = (-1 - self.leaf_index[id(following.variable)], 0)
                    assert contribution is not None
                    record.contributions.append((edge, contribution))
            self.running = None

        self.handles += [node.register_prehook(before), node.register_hook(after)]


class _EdgeRecorder(TorchDispatchMode):
    """Above the tracer: sees every operator with the tensors as autograd passed them on."""

    def __init__(self, tracing: _Tracing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracing = tracing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = self.tracing
        if func.namespace == "prim":  # a question about a tensor, maybe in the middle of autograd's own work on it
            return func(*args, **(kwargs or {}))
        edges = []
        writes = func._schema.is_mutable  # asking a view for its edge while it is written to would fix a stale edge
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not (writes and leaf._is_view()):
                node, edge = _torch.proxy_node(leaf, tracing.tracer), tracing.edge(leaf)
                if node is not None and edge is not None:
                    edges.append((node.name, edge))
        before = len(tracing.created)
        result = func(*args, **(kwargs or {}))
        for name in tracing.created[before:]:
            for argument, edge in edges:
                tracing.edges[name, argument] = edge
        return result


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    fake: Tensor = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _by_name(result: dict[str, Any], nodes: dict[str, fx.Node]) -> dict[str, Any]:
    """``result`` with the tracer's nodes replaced by those of the finished graph."""
    swap = {key: [node and nodes[node.name] for node in result[key]] for key in ("output_nodes", "tangent_nodes")}
    return {**result, **swap}
