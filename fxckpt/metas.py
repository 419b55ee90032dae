"""Results of operators by their meta kernels: what a fake kernel says too, at a tenth of the time.

A fake kernel may know better (which layout a convolution chooses on this device). Where the two agree is found out
during the trace, call by call; see :attr:`fxckpt.tape.Tape.likeness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxckpt import _torch
from fxckpt.shapes import Answer
from fxckpt.tape import Described, describe

__all__ = ["answer_of", "described", "likeness", "meta_answer"]

_META = torch.device("meta")


def described(tensors: Sequence[Tensor]) -> tuple[Described, ...] | None:
    """Descriptions of ``tensors``; None if one of them is not simply strided."""
    if any(tensor.layout is not torch.strided or tensor.is_complex() for tensor in tensors):
        return None
    return tuple([describe(tensor) for tensor in tensors])


def likeness(inputs: Sequence[Described]) -> Any:
    """What a kernel may go by apart from sizes: types, dimensions of size one, and the order of dimensions."""
    return tuple(
        (one.dtype, one.device, tuple([size == 1 for size in one.shape]), _order(one.stride)) for one in inputs
    )


def _order(stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(stride)), key=stride.__getitem__))


def answer_of(result: Any, tensors: Sequence[Tensor], inputs: Sequence[Described]) -> Answer | None:
    """The result of a call in the form in which it is remembered; None if it cannot be.

    Args:
        result: what the operator returned.
        tensors: those among its arguments.
        inputs: their descriptions before the call.
    """
    if isinstance(result, Tensor):
        found = described([result])
        same = next((index for index, tensor in enumerate(tensors) if tensor is result), None)
        if found is None or (same is not None and inputs[same][:3] != found[0][:3]):
            return None
        return (Tensor, found[0]) if same is None else (int, same)
    if not isinstance(result, (tuple, list)) or any(item is tensor for item in result for tensor in tensors):
        return None
    found = described([item for item in result if isinstance(item, Tensor)])
    if found is None or any(item is not None and not isinstance(item, Tensor) for item in result):
        return None
    rest = iter(found)
    return type(result), tuple(None if item is None else next(rest) for item in result)


def meta_answer(func: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Described]) -> Answer | None:
    """What the operator returns for inputs of these sizes, as its meta kernel says; None if that does not tell.

    Args:
        func: the operator.
        args, kwargs: of the call, with tensors of any kind.
        inputs: descriptions of those tensors, in order.
    """
    if func.namespace != "aten" or any(one.device.type == "meta" for one in inputs):
        return None
    with _torch.without_dispatch():
        metas = [torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=_META) for one in inputs]
        given = iter(metas)
        device = kwargs.get("device") or (inputs[0].device if inputs else torch.get_default_device())
        try:
            positional = [_on_meta(value, given) for value in args]
            result = func(*positional, **{key: _on_meta(value, given) for key, value in kwargs.items()})
        except Exception:  # no meta kernel, or one that fails
            return None
        answer = answer_of(result, metas, inputs)
        if answer is None or answer[0] is int:
            return answer
        storages = {_torch.storage_key(meta): one.storage_bytes for meta, one in zip(metas, inputs, strict=True)}
        if answer[0] is Tensor:
            return Tensor, _placed(answer[1], result, device, storages)
        return answer[0], tuple(
            one and _placed(one, item, device, storages) for one, item in zip(answer[1], result, strict=True)
        )


def _on_meta(value: Any, given: Any) -> Any:
    if isinstance(value, Tensor):
        return next(given)
    if isinstance(value, (list, tuple)):
        return [_on_meta(item, given) for item in value]
    return _META if isinstance(value, torch.device) else value


def _placed(one: Described, result: Tensor, device: torch.device, storages: dict[int, int]) -> Described:
    """``one`` on the device of the inputs, and in the storage that it is a view of."""
    size = storages.get(_torch.storage_key(result), one.storage_bytes)
    return Described(one.shape, one.stride, one.dtype, device, size)
