"""Trace the forward and backward of a module once, with real autograd on fake tensors.

Each node of the traced graph is tagged while it is created: forward nodes with autograd's sequence counter, which
ties them to the autograd node they create; backward nodes with the autograd node that runs. A dispatch mode above
the tracer notes, for every tensor that an operator reads, which autograd edge the tensor had at that moment.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import _torch
from fxckpt.constants import RealConstants
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.joint import Edge, GradRecord, RegionInput, Trace
from fxckpt.objects import Watch
from fxckpt.refuse import Refuse, Refused, refuse_seeding
from fxckpt.state import INTERNAL, SIMPLE, ModuleState, contains_tensor, find_tensors, has_hooks

__all__ = ["capture"]


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Trace one training step of ``module``: its forward, and the gradients of every differentiable input.

    Args:
        module: the region; its parameters, buffers and attributes are as before when this returns or raises.
        args: positional inputs, any pytree of tensors and plain values.
        kwargs: keyword inputs.

    Returns:
        The tagged trace. Shapes, dtypes, training flags and plain attributes are specialised.

    Raises:
        CaptureError: the Python code of the module cannot be followed; names module, line and construct.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise CaptureError(f"module {path!r} is TorchScript", module=path, reason="TorchScript runs no Python")
        if path and has_hooks(child):
            raise CaptureError(f"module {path!r} carries hooks", module=path, reason="hooks on a submodule")
    state = ModuleState.collect(module)
    for floats in (True, False):
        constants = RealConstants(floats)
        try:
            return _Tracing(module, state, args, kwargs, constants).run()
        except CaptureError:
            if not constants.made:
                raise
        # Something was done to a constant that only a traced tensor can take: it is returned, or written to.
    return _Tracing(module, state, args, kwargs, contextlib.nullcontext()).run()


class _Tracing:
    def __init__(
        self, module: nn.Module, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Any
    ) -> None:
        self.module, self.state, self.constants = module, state, constants
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *SIMPLE)) and contains_tensor(leaf):
                raise CaptureError(
                    f"an input is a {type(leaf).__name__} that holds tensors",
                    reason=f"input class {type(leaf).__name__} is unknown to torch.utils._pytree",
                )
        self.inputs: list[RegionInput] = []
        self.tensors: list[Tensor] = []
        self.argument_slot: dict[int, int] = {}
        self._list_inputs()
        self.places = _Places(module)
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
        self.assigned: list[tuple[str, str, Any]] = []

    def _list_inputs(self) -> None:
        known: dict[int, int] = {}
        for held in self.state.tensors:
            known[id(held.tensor)] = len(self.tensors)
            self.inputs.append(RegionInput(held.kind, held.name, held.tensor.requires_grad))
            self.tensors.append(held.tensor)
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) not in known:
                    known[id(leaf)] = len(self.tensors)
                    self.inputs.append(RegionInput("argument", str(index), leaf.requires_grad))
                    self.tensors.append(leaf)
                self.argument_slot[index] = known[id(leaf)]

    def run(self) -> Trace:
        self.casts_are_cached = torch.is_autocast_cache_enabled()
        states = _host_random_state()
        rng = torch.get_rng_state()
        mode = _torch.FakeMode(allow_non_fake_inputs=True)
        fakes = [_fake(tensor, mode) for tensor in self.tensors]
        watch = Watch(self._shared_objects())
        try:
            with mode, _torch.quiet_fakes():
                graph_module = _torch.traced(self.joint, fakes)
        except FxckptError:
            raise
        except Exception as error:
            raise self.places.explain(error) from error
        finally:
            for handle in self.handles:  # hooks hold this object, and through C++ the garbage collector cannot see them
                handle.remove()
            self.record_of.clear()
            moved = _host_random_state() != states
            seeded = not torch.equal(torch.get_rng_state(), rng)
            _restore_host_random_state(states)
            torch.set_rng_state(rng)
            torch.clear_autocast_cache()
            changed = watch.changed()
            watch.restore()
        if changed:
            raise CaptureError(f"forward changes {changed}", reason=f"forward changes {changed}")
        if seeded:
            raise CaptureError("forward sets the state of torch's generator", reason="torch's generator is set")
        if moved:
            raise CaptureError(
                "forward draws from Python's or NumPy's random generator", reason="Python or NumPy random numbers"
            )
        self._check_assigned()
        nodes = {node.name: node for node in graph_module.graph.nodes}
        return Trace(
            graph_module=graph_module, inputs=self.inputs, assigned=self.assigned, forward_tag=self.forward_tag,
            backward_tag=self.backward_tag, edges=self.edges, places=self.places.by_name, records=self.records,
            **_by_name(self.result, nodes),
        )  # fmt: skip

    def _shared_objects(self) -> Iterator[tuple[str, Any]]:
        """What others see too and forward may write to, apart from tensors and modules."""
        for variable, value in contextvars.copy_context().items():
            yield f"context variable {variable.name!r}", value
        for leaf in self.leaves:
            yield f"an input, a {type(leaf).__name__}", leaf
        for path, module in self.state.modules:
            for key, value in vars(module).items():
                if key not in INTERNAL:
                    yield f"attribute {key!r} of module {path or 'the model'!r}", value

    def _check_assigned(self) -> None:
        for path, name, value in self.assigned:
            if not contains_tensor(value):
                raise CaptureError(
                    f"forward changes attribute {name!r} of module {path or 'the model'!r}",
                    module=path,
                    reason=f"forward changes attribute {name!r}, which may steer later calls",
                )

    def joint(self, *fakes: Tensor) -> list[Tensor | None]:
        """The function that ``make_fx`` traces: forward, then gradients of all differentiable inputs."""
        tracer = self.tracer = _torch.current_tracer()
        graph = tracer.graph
        create_node = graph.create_node

        def tagged(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create_node(*args, **kwargs)
            self.latest = node.name
            if self.phase == "forward":
                self.created.append(node.name)
                self.forward_tag[node.name] = _torch.sequence_number()
                self.places.note(node.name)
            elif self.running is not None:
                self.backward_tag[node.name] = self.running.index
            return node

        graph.create_node = tagged
        try:
            self._forward(fakes)
            return self._backward(fakes)
        finally:
            graph.create_node = create_node

    def _forward(self, fakes: tuple[Tensor, ...]) -> None:
        leaves = list(self.leaves)
        for index, slot in self.argument_slot.items():
            leaves[index] = fakes[slot]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        self.leaf_index = {id(fake): index for index, fake in enumerate(fakes) if fake.requires_grad}
        held = list(fakes[: len(self.state.tensors)])
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self.casts_are_cached)  # make_fx switches it off
        swapped, plainly = self.state.swapped(held, self.assigned), _torch.without_inner_checkpoints()
        try:
            with swapped, self.places, Refuse(), refuse_seeding(), plainly, _EdgeRecorder(self), self.constants:
                output = self.module.forward(*args, **kwargs)
                self._check_containers(args, kwargs, leaves)
        finally:
            torch.set_autocast_cache_enabled(cached)
        for fake in fakes:
            if fake.requires_grad and fake.grad is not None:
                raise CaptureError("forward runs backward() itself", reason="backward() inside forward")
        self._outputs(output, fakes)

    def _check_containers(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> None:
        """The trace gets its own lists and dictionaries, so that a change to one would be lost."""
        now, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(one is not other for one, other in zip(now, leaves, strict=True)):
            raise CaptureError("forward changes a container among its inputs", reason="an input container is changed")

    def _outputs(self, output: Any, fakes: tuple[Tensor, ...]) -> None:
        unique: dict[int, Tensor] = {}
        for tensor in find_tensors([output, [value for _, _, value in self.assigned]]):
            unique.setdefault(id(tensor), tensor)
        outputs = list(unique.values())
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

    def _backward(self, fakes: tuple[Tensor, ...]) -> list[Tensor | None]:
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
        grads = torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)
        self.running = None
        return [*self.result["outputs"], *(grad for grad in grads if grad is not None)]

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


class _Places:
    """Which module and which line of user code is running."""

    def __init__(self, root: nn.Module) -> None:
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.stack: list[str] = [""]
        self.by_name: dict[str, tuple[str, str]] = {}
        self.handles: list[Any] = []
        self.thread = threading.get_ident()

    def __enter__(self) -> _Places:
        hooks = torch.nn.modules.module
        self.handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        if threading.get_ident() == self.thread:
            self.stack.append(self.paths.get(id(module), self.stack[-1]))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self.thread and len(self.stack) > 1:
            self.stack.pop()

    def note(self, name: str) -> None:
        """Remember where the node ``name`` comes from."""
        frame = sys._getframe(1)
        line = ""
        while frame is not None:
            if not _is_internal(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        self.by_name[name] = (self.stack[-1], line)

    def explain(self, error: Exception) -> CaptureError:
        """The error a user sees: module, source line, construct."""
        source, trace = "", error.__traceback__
        while trace is not None:
            if not _is_internal(trace.tb_frame.f_code.co_filename):
                source = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__}: {reason}" if not isinstance(error, Refused) else reason
        path = self.stack[-1]
        where = f"module {path!r}" if path else "the model"
        return CaptureError(f"cannot capture {where}, {source}: {reason}", module=path, reason=reason, source=source)


_TORCH_ROOT = torch.__path__[0] + "/"
_OWN_ROOTS = (__file__.rpartition("/")[0] + "/", _torch.__file__.rpartition("/")[0] + "/")


def _is_internal(filename: str) -> bool:
    return filename.startswith((_TORCH_ROOT, "<", *_OWN_ROOTS))


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    fake: Tensor = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _by_name(result: dict[str, Any], nodes: dict[str, fx.Node]) -> dict[str, Any]:
    """``result`` with the tracer's nodes replaced by those of the finished graph."""
    swap = {key: [node and nodes[node.name] for node in result[key]] for key in ("output_nodes", "tangent_nodes")}
    return {**result, **swap}


def _host_random_state() -> tuple[Any, ...]:
    """State of Python's and NumPy's global generators, comparable by ``==``."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, tuple(keys.tolist()), *rest


def _restore_host_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    if len(state) > 1:
        sys.modules["numpy"].random.set_state(state[1:])
