"""Scratch memory and time of kernels, measured: each distinct operator of a graph runs on inputs of its shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt import _torch
from fxckpt.device import is_view
from fxckpt.joint import JointGraph

__all__ = ["measure_seconds", "measure_workspaces", "reordered_bytes"]

LIMIT_BYTES = 4 * 2**30  # an operator with larger inputs is not tried
MARK_BYTES = 7_777  # size of the allocation that separates two operators in the allocator's record

# Operators that zeros cannot harm; others (a fused LSTM on CUDA given a made-up workspace) may crash the process.
_TRIED = (
    "convolution", "mm", "addmm", "bmm", "baddbmm", "native_batch_norm", "native_layer_norm", "native_group_norm",
    "_softmax", "_log_softmax", "_scaled_dot_product", "sum", "mean", "var", "cat", "upsample", "_upsample",
    "max_pool", "avg_pool", "adaptive", "_adaptive", "embedding", "cumsum", "sort", "topk", "add", "mul", "div", "sub",
    "_to_copy", "clone", "nll_loss", "reflection_pad", "replication_pad", "constant_pad", "gather", "index_select",
    "_fused_rms_norm", "_cdist", "linalg_vector_norm", "native_dropout", "norm", "amax", "logsumexp",
    "mkldnn_rnn_layer",
)  # fmt: skip
# On CPU these write straight to their result, and make a copy only of an input that is not contiguous.
_PLAIN = frozenset({
    "embedding", "embedding_dense_backward", "nll_loss_forward", "nll_loss_backward", "_log_softmax",
    "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
})  # fmt: skip
_BLAS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_known: dict[Hashable, int] = {}
_timed: dict[Hashable, float] = {}
REPEATS = 3
BLOCK = 16  # channels that convolutions on CPU bring together; where there are fewer, zeros fill the block


def measure_workspaces(nodes: Iterable[fx.Node], limit_bytes: int = LIMIT_BYTES) -> dict[str, int]:
    """Bytes that each operator's kernel allocates beyond its results.

    Operators that appear several times with the same shapes run once, and results are remembered over calls. An
    operator that cannot run on made-up inputs (zeros) counts as needing nothing.

    Args:
        nodes: of a joint graph; their tensors tell shapes, strides, types and device.
        limit_bytes: operators whose tensors take more than this together are left out.

    Returns:
        Bytes by node name, only where not 0.
    """
    keys = {node: _key(node) for node in nodes if _may_need_scratch(node)}
    todo: dict[Hashable, fx.Node] = {}
    for node, key in keys.items():
        if key not in _known and _bytes(node) <= limit_bytes:
            todo.setdefault(key, node)
    if todo:
        _known.update(zip(todo, _measure(list(todo.values())), strict=True))
    return {node.name: _known[key] for node, key in keys.items() if _known.get(key, 0) > 0}


def reordered_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Size of a tensor of a convolution, its channels in blocks, as its kernel may bring it into order."""
    return math.prod(math.ceil(n / BLOCK) * BLOCK if dim == 1 else n for dim, n in enumerate(shape)) * itemsize


def _may_need_scratch(node: fx.Node) -> bool:
    """Elementwise kernels of one type write straight to their result; so do copies."""
    if node.op != "call_function" or is_view(node.target) or not _torch.is_operator(node.target):
        return False
    if node.target.namespace != "aten" or not node.target._overloadpacket.__name__.startswith(_TRIED):
        return False
    tensors = _tensors(node)
    kinds = {value.dtype for value in tensors}
    if all(value.device.type == "cpu" for value in tensors):
        if node.target in _BLAS and kinds <= {torch.float32, torch.float64}:
            return False  # BLAS brings its own buffers, past torch's allocator
        if node.target._overloadpacket.__name__ in _PLAIN and all(value.is_contiguous() for value in tensors):
            return False
    return not (torch.Tag.pointwise in node.target.tags and len(kinds) == 1)


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    values = [*results, *(source.meta.get("val") for source in node.all_input_nodes)]
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(node))


def _key(node: fx.Node) -> Hashable:
    def describe(source: fx.Node) -> Any:
        value = source.meta.get("val")
        return str((value.shape, value.stride(), value.dtype, value.device)) if isinstance(value, Tensor) else "?"

    arguments = fx.node.map_arg((node.args, node.kwargs), describe)
    return str(node.target), repr(arguments), torch.get_num_threads()


def _measure(nodes: list[fx.Node]) -> list[int]:
    with torch.no_grad():
        state = torch.get_rng_state()
        if any(tensor.device.type == "cuda" for node in nodes for tensor in _tensors(node)):
            scratch = [_cuda(node) for node in nodes]
        else:
            scratch = _cpu(nodes)
        torch.set_rng_state(state)
    return scratch


def _run(node: fx.Node, mark: Callable[[], None]) -> None:
    """Run the operator on zeros; ``mark`` is called right before and, while the result lives, right after."""

    def real(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        return torch.zeros(size, dtype=value.dtype, device=value.device).as_strided(value.shape, value.stride())

    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), real)
        with torch.set_grad_enabled("rnn" in str(node.target)):  # these kernels ask for the mode
            if node.target is torch.ops.aten.mkldnn_rnn_layer_backward.default:
                args = _after_forward(args)
            mark()
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            mark()
        del result
    except Exception:  # an operator that zeros do not suit
        return


def _after_forward(args: Any) -> tuple[Any, ...]:
    """Arguments for the backward of an LSTM layer with what its forward makes: a made-up workspace would crash it."""
    reverse, mode, size, layers, biases, train, both, batch_sizes, batch_first = args[13:22]
    result = torch.ops.aten.mkldnn_rnn_layer.default(
        *args[:7], reverse, batch_sizes, mode, size, layers, biases, both, batch_first, train
    )
    return (*args[:7], *result[:3], *args[10:22], result[3])


def _cpu(nodes: list[fx.Node]) -> list[int]:
    """All operators under one profile; allocations of two odd sizes mark where each begins and ends."""

    def mark(size: int = MARK_BYTES) -> None:
        torch.empty(size, dtype=torch.uint8)

    def run_all() -> None:
        for node in nodes:
            mark(MARK_BYTES + 1)
            _run(node, mark)

    scratch: list[int] = []
    live = peak = marks = 0
    for count in _torch.cpu_allocations(run_all):
        if count == MARK_BYTES + 1:
            scratch.append(0)
            marks = 0
        elif count == MARK_BYTES:
            marks += 1
            if marks == 1:
                peak = live
            else:
                scratch[-1] = max(0, peak - live)
        elif abs(count) < MARK_BYTES or abs(count) > MARK_BYTES + 1:
            live += count
            peak = max(peak, live)
    return scratch if len(scratch) == len(nodes) else [0] * len(nodes)


def _cuda(node: fx.Node) -> int:
    seen: list[int] = []

    def mark() -> None:
        torch.cuda.synchronize()
        if seen:
            seen.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        else:
            torch.cuda.reset_peak_memory_stats()
            seen.append(0)

    _run(node, mark)
    return max(0, seen[-1]) if len(seen) == 2 else 0


def measure_seconds(joint: JointGraph, limit_bytes: int = LIMIT_BYTES) -> dict[str, float]:
    """Time of each operator on the graph's own device: each distinct one runs a few times, the fastest counts.

    Args:
        joint: the joint graph; its tensors tell shapes, strides, types and device.
        limit_bytes: operators whose tensors take more than this together are left out.

    Returns:
        Seconds by node name. Operators that cannot run on made-up inputs (zeros) are missing; they keep the estimate.
    """
    keys = {node: _key(node) for node in joint.nodes if _can_be_timed(node)}
    todo: dict[Hashable, fx.Node] = {}
    for node, key in keys.items():
        if key not in _timed and _bytes(node) <= limit_bytes:
            todo.setdefault(key, node)
    with torch.no_grad():
        state = torch.get_rng_state()
        for key, node in todo.items():
            found = [_time(node) for _ in range(REPEATS)]
            _timed[key] = min(found) if all(found) else 0.0
        torch.set_rng_state(state)
    return {node.name: _timed[key] for node, key in keys.items() if _timed.get(key)}


def _can_be_timed(node: fx.Node) -> bool:
    if node.op != "call_function" or is_view(node.target) or not _torch.is_operator(node.target):
        return False
    name: str = node.target._overloadpacket.__name__
    pointwise = torch.Tag.pointwise in node.target.tags and not name.endswith("_")
    return node.target.namespace == "aten" and (pointwise or name.startswith(_TRIED))


def _time(node: fx.Node) -> float:
    """Seconds of one run, 0 if it cannot run."""
    on_cuda = any(tensor.device.type == "cuda" for tensor in _tensors(node))
    marks: list[float] = []

    def mark() -> None:
        if on_cuda:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    _run(node, mark)
    return marks[1] - marks[0] if len(marks) == 2 else 0.0
