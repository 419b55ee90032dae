"""Small tensors that depend on no input (positions, masks) stay real while the rest of the step is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import _torch

__all__ = ["TRACED", "RealConstants"]

TRACED = object()

# A larger constant would take more memory between the steps than it is worth.
LIMIT_BYTES = 2**20
FLOAT_LIMIT_BYTES = 2**16
_FACTORIES = frozenset({"arange", "zeros", "ones", "full", "eye", "tril_indices", "triu_indices"})
_LIKE: dict[str, Callable[..., Tensor]] = {"new_zeros": torch.zeros, "new_ones": torch.ones, "new_full": torch.full}


class RealConstants(TorchDispatchMode):
    """Runs operators on constants for real, so that Python code may look at their values as it does in eager.

    Models decide by such values, for instance whether positions are those of packed sequences, and take another way
    (an explicit mask, another attention kernel) when they meet a fake tensor. Constants that traced operators read
    become constants of the graph.

    Args:
        floats: whether floating point tensors count, which models also use to write results into.
    """

    def __init__(self, floats: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats = floats
        self.known: dict[int, Tensor] = {}
        self.read: set[int] = set()

    @property
    def made(self) -> bool:
        """Whether anything was computed for real."""
        return bool(self.known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = self.attempt(func, tensors, args, kwargs)
        return func(*args, **kwargs) if result is TRACED else result

    @staticmethod
    def may_concern(func: Any, tensors: list[Tensor]) -> bool:
        """Whether :meth:`attempt` may compute a call that reads no constant."""
        return not tensors or func._overloadpacket.__name__ in _LIKE

    def attempt(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """Result of a call, computed for real; ``TRACED`` if the call has to be traced.

        Args:
            func: the operator.
            tensors: those among its arguments.
            args, kwargs: all of its arguments.
        """
        real = self._call(func, tensors, args, kwargs)
        if real is not None and self._is_small(*real):
            function, args, kwargs = real
            with _torch.real_tensors():
                result = function(*args, **kwargs)
            self.known.update((id(leaf), leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            return result
        constants = [tensor for tensor in tensors if id(tensor) in self.known]
        if constants and func._schema.is_mutable:
            raise RuntimeError("forward writes to a constant")
        self.read.update(_torch.storage_key(tensor) for tensor in constants)
        return TRACED

    def _call(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> RealCall | None:
        """The operator as a call on constants or on nothing; None if it has to be traced."""
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        name = func._overloadpacket.__name__
        if name == "lift_fresh":
            return _same, args, kwargs
        if tensors and name in _LIKE:  # of its input such an operator takes no more than type and device
            given = {"dtype": tensors[0].dtype, "device": tensors[0].device, **kwargs}
            return _LIKE[name], args[1:], given
        if not tensors:
            return (func, args, kwargs) if name in _FACTORIES else None
        if not all(id(tensor) in self.known and not tensor.requires_grad for tensor in tensors):
            return None
        written = func._schema.is_mutable and any(_torch.storage_key(tensor) in self.read for tensor in tensors)
        return None if written else (func, args, kwargs)

    def _is_small(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the result is, told without computing it."""
        try:
            with _torch.real_tensors():
                if function is not _same:
                    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
                    kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
                result = function(*args, **kwargs)
        except RuntimeError:
            return True  # a question about values; what it is about is small
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                if tensor.nbytes > (FLOAT_LIMIT_BYTES if inexact else LIMIT_BYTES) or (inexact and not self.floats):
                    return False
        return True


RealCall = tuple[Callable[..., Any], Any, dict[str, Any]]


def _same(tensor: Tensor) -> Tensor:
    return tensor
