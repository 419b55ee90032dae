"""Every private torch API the project uses, in one place, each with the reason.

Checked against torch 2.11 to 2.14; ``tests/test_torch.py`` exercises each function so that a release which
moves one of them fails there and not inside a pass.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
import torch._prims_common
import torch.autograd.profiler
import torch.utils.checkpoint
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode as _get_proxy_mode
from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DEVICE_QUESTION",
    "BareMode",
    "BoxedCodeGen",
    "FakeMaker",
    "FakeMode",
    "FakeTensor",
    "below_autograd",
    "clear_saved",
    "cpu_allocations",
    "current_tracer",
    "fast_callable",
    "functional_value",
    "graph_is_kept",
    "is_dense",
    "is_operator",
    "lazy_graph_module",
    "proxy_node",
    "quiet_fakes",
    "real_tensors",
    "sequence_number",
    "storage_key",
    "traced",
    "transform_active",
    "watched_globally",
    "without_dispatch",
    "without_inner_checkpoints",
]


def sequence_number() -> int:
    """Sequence number that the next autograd node will get.

    The tag that ties an operation to its autograd node. No public API tells it.
    """
    return int(torch._C._autograd._get_sequence_nr())


def current_tracer() -> Any:
    """Tracer of the ``make_fx`` call that is running; its graph is where nodes appear."""
    mode = _get_proxy_mode()
    assert mode is not None, "no make_fx trace is active"
    return mode.tracer


def proxy_node(tensor: Tensor, tracer: Any) -> fx.Node | None:
    """Node that holds the present value of ``tensor``, None if the trace never saw it."""
    proxy = get_proxy_slot(tensor, tracer, None, lambda slot: slot)
    return None if proxy is None else proxy.proxy.node  # type: ignore[attr-defined]


def functional_value(tensor: Tensor) -> Tensor:
    """The pure value behind a functionalized tensor at this moment, pending mutations applied.

    The second pass needs old tensor -> new value at any moment, which ``torch.func.functionalize`` does not expose.
    """
    if not torch._is_functional_tensor(tensor):  # type: ignore[attr-defined]
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    value: Tensor = torch._C._functorch._unwrap_functional_tensor(tensor, True)
    return value


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage: equal exactly for tensors that share memory (fake tensors have no ``data_ptr``)."""
    return int(tensor.untyped_storage()._cdata)


def without_dispatch() -> Any:
    """Context in which neither modes nor tensor subclasses see operators: a microsecond, see :func:`real_tensors`."""
    return torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]


def is_operator(target: Any) -> TypeGuard[OpOverload]:
    """Whether the target of an fx node is an ATen (or custom) operator and not a plain Python function.

    The class of the operators has no public name.
    """
    return isinstance(target, OpOverload)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps and overlap, in any order of the dimensions.

    Kernels may write a result of the same layout over such a tensor. ``Tensor.is_contiguous`` knows the usual orders
    only; newer releases have the check under a second name, which does not fail for symbolic shapes.
    """
    module: Any = torch._prims_common
    name = "is_non_overlapping_and_dense"
    check = getattr(module, f"{name}_or_false", None) or getattr(module, name)
    return tensor.layout is torch.strided and bool(check(tensor))


def transform_active() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, jvp) or forward-mode differentiation is running.

    A custom autograd Function has no rules for them, so that the planned graph must step aside.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def watched_globally() -> bool:
    """Whether somebody registered hooks on every module there is, as module trackers do.

    ``register_module_forward_hook`` and its like have no public way to ask. Hooks of a trace of our own do not count.
    """
    if not any(_GLOBAL_HOOKS):
        return False
    hooks = [hook for table in _GLOBAL_HOOKS for hook in table.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("fxckpt") for hook in hooks)


_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
for _key in (
    "AutogradCUDA",
    "AutogradXPU",
    "AutogradMPS",
    "AutogradOther",
    "AutogradMeta",
    "AutogradNestedTensor",
    "ADInplaceOrView",
    "AutocastCPU",
    "AutocastCUDA",
    "AutocastXPU",
    "AutocastMPS",
):
    if hasattr(torch._C.DispatchKey, _key):
        _BELOW = _BELOW | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))


def traced(function: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    """``make_fx`` without Python code for the result, which takes as long as a tenth of the trace and nobody runs."""
    with _use_lazy_graph_module(True):
        module = make_fx(function)(*inputs)
    assert isinstance(module, fx.GraphModule)
    return module


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A GraphModule that generates its Python code when somebody asks for it."""
    return _LazyGraphModule(root, graph, class_name)


def below_autograd() -> Any:
    """Context in which ATen operators run without autograd, view tracking and autocast.

    The captured graph already holds every cast, and its tensors must not become views in autograd's eyes: a caller
    may modify an output in place. ``torch.no_grad`` and ``autocast(enabled=False)`` together cost four times as much.
    """
    return torch._C._ExcludeDispatchKeyGuard(_BELOW)


def clear_saved(ctx: Any) -> None:
    """Let go of the saved tensors inside backward unless the graph is retained.

    Without it every kept value lives until the function returns, and the recomputed ones come on top.
    """
    ctx.maybe_clear_saved_tensors()


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to retain the graph. No public API tells a node that."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class BoxedCodeGen(CodeGen):
    """Generated functions take one list and empty it, so that each argument dies at its last use.

    ``torch.fx.graph.CodeGen`` is the hook that fx offers for this; its methods are not declared stable.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        unpack = f"    {', '.join(names)}, = boxed\n" if names else ""
        return f"def forward(self, boxed):\n{unpack}    boxed.clear()"


class FakeMode(FakeTensorMode):
    """Fake tensors, with what torch's own fake kernels leave out.

    Grouped matrix products (mixtures of experts) run in every floating type, but their fake kernel takes half types
    only. Rows of the result are padded to 16 bytes. Of an LSTM layer on CPU the fake kernel says that it hands nothing
    to its backward; how much it is, only the real one knows.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on fakes."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype in (torch.float32, torch.float64):
            left, right = args[:2]
            offsets = args[2] if len(args) > 2 else kwargs.get("offs")
            sizes = [left.shape[-2], right.shape[-1]]
            if left.dim() == right.dim():  # otherwise the offsets divide the rows or columns of the result
                sizes.insert(0, left.shape[0] if left.dim() == 3 else offsets.shape[0])
            row = -(-sizes[-1] * left.itemsize // 16) * 16 // left.itemsize
            strides = [sizes[-2] * row, row, 1][-len(sizes) :]
            with self:
                return torch.empty_strided(sizes, strides, dtype=left.dtype, device=left.device)
        result: Any = super().dispatch(func, types, args, kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and args[-1]:
            size = _lstm_workspace(args)
            with self:
                return *result[:3], torch.empty(size, dtype=torch.uint8)
        if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            with self:  # one tensor is the gradient of both biases, of which the engine makes two
                return *result[:4], torch.empty_like(result[3]), *result[5:]
        return result


class FakeMaker:
    """Makes fake tensors from descriptions, ten times as fast as the fake mode does.

    Its constructor checks much that is known here. All but the size is the same for every fake of a device, so that
    the attributes of one that the constructor made serve for all.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.first: dict[torch.device, FakeTensor] = {}

    def make(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """A fake in a storage of its own."""
        with without_dispatch():
            element = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if device not in self.first:
                self.first[device] = FakeTensor(self.mode, element, device)
            fake: FakeTensor = Tensor._make_subclass(  # type: ignore[attr-defined]
                FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device
            )
        fake.__dict__.update(self.first[device].__dict__)
        torch._C._set_throw_on_mutable_data_ptr(fake)  # type: ignore[attr-defined]
        return fake

    def make_parameter(self, fake: FakeTensor) -> None:
        """Let a fake pass for an ``nn.Parameter``; that class would make another tensor of it."""
        fake._is_param = True  # type: ignore[attr-defined]


class BareMode:
    """Mixed into a dispatch mode: torch then calls its ``__torch_dispatch__`` without the wrapper that keeps
    ``torch.compile`` out of it, which takes as long as a call that is answered from memory.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


DEVICE_QUESTION = torch.ops.prim.device.default
"""What C++ asks of a fake tensor thousands of times in a step; ``fake_device`` is the answer."""


_LSTM_WORKSPACES: dict[str, int] = {}


def _lstm_workspace(args: tuple[Any, ...]) -> int:
    """Bytes that an LSTM layer keeps for its backward, by a run on zeros."""
    key = repr([(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args])
    if key not in _LSTM_WORKSPACES:
        zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
        with torch.enable_grad():  # the kernel asks for the mode
            _LSTM_WORKSPACES[key] = torch.ops.aten.mkldnn_rnn_layer.default(*zeros)[3].nbytes
    return _LSTM_WORKSPACES[key]


def real_tensors() -> Any:
    """Context without the dispatch modes of a trace in progress: operators run, on real tensors."""
    return _disable_current_modes()


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback for every operator without a fake kernel; the error itself still comes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def without_inner_checkpoints() -> Iterator[None]:
    """Within it (on this thread) ``torch.utils.checkpoint.checkpoint`` runs its function plainly.

    The planner takes over: a traced inner checkpoint would be recomputed twice, and the reentrant variant calls
    ``backward`` inside backward, which a trace cannot follow. Users import the function by name, so the two
    internals that it calls are replaced for the time of the trace.
    """
    module: Any = torch.utils.checkpoint
    owner = threading.get_ident()

    def only_here(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (replacement if threading.get_ident() == owner else original)(*args, **kwargs)

        return choose

    # 2.14 renamed the generator and kept the old name for other callers.
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    saved = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, original in saved.items():
        setattr(module, name, only_here(_plain_generator, original))
    function = module.CheckpointFunction
    function.apply = staticmethod(only_here(_plain_apply, function.apply))
    try:
        yield
    finally:
        del function.apply  # the class inherits the real one
        for name, original in saved.items():
            setattr(module, name, original)


def _plain_apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


def _plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def cpu_allocations(run: Callable[[], object]) -> list[int]:
    """Bytes that the CPU allocator hands out (positive) and takes back (negative) while ``run`` runs, in time order.

    ``torch.profiler`` shows memory per operator only, and the CPU allocator keeps no statistics; the raw events of
    the profiler hold every allocation of every thread that the autograd engine uses. Blocks from before ``run`` are
    left out: the profiler knows the size of some, those allocated under an earlier profile, and not of others.
    """
    # Kineto writes notes of its own to stderr at every start and stop. It reads this when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        run()
    found: list[tuple[int, int, int]] = []
    todo = list(profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    counts: list[int] = []
    live: set[int] = set()
    for _, address, count in sorted(found):
        if count > 0:
            live.add(address)
        elif address not in live:
            continue
        else:
            live.discard(address)
        counts.append(count)
    return counts


_METHODS = ("view", "expand")
_FUNCTIONS = (
    "mm", "addmm", "bmm", "baddbmm", "t", "transpose", "permute", "unsqueeze", "squeeze", "add", "mul", "sub", "div",
    "sum", "mean", "relu", "tanh", "sigmoid", "exp", "rsqrt", "neg", "pow", "clone", "native_layer_norm", "convolution",
    "native_batch_norm", "native_group_norm", "embedding", "masked_fill", "where", "_softmax", "_log_softmax",
    "cat",
)  # fmt: skip
_OVERLOADS = frozenset({"default", "Tensor", "int", "dim", "dim_IntList", "Scalar", "Tensor_Scalar", "self"})


def fast_callable(overload: Any) -> Callable[..., Any]:
    """Something that runs the same operator as ``overload`` with less Python on the way.

    ``torch.mm`` and its like parse their arguments in C++ made for them; ``torch.ops`` goes through the schema, which
    takes about a microsecond more for each call. Only operators whose binding is known to reach the same overload are
    exchanged; for the others the handle inside the ``OpOverload`` saves one Python frame.
    """
    name, kind = overload._overloadpacket.__name__, overload._overloadname
    if overload.namespace == "aten" and kind in _OVERLOADS:
        if name in _METHODS:
            return getattr(torch._C.TensorBase, name)  # type: ignore[no-any-return]
        if name in _FUNCTIONS:
            return getattr(torch._C._VariableFunctions, name)  # type: ignore[no-any-return]
    return getattr(overload, "_op", overload)  # type: ignore[no-any-return]
