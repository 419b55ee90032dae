"""A quick check that a call is of a kind seen before, without building its whole signature again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxckpt.signature import autocast_state, describe
from fxckpt.state import INTERNAL, SIMPLE

__all__ = ["Guard"]


class Guard:
    """Remembers model and inputs at planning time; :meth:`leaves` compares a later call with them.

    It may refuse a call that has the same signature (then the signature decides), but never accepts one that has not.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.inputs = [describe(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.plain_inputs = all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves)
        self.aliases = _aliases(leaves)
        self.autocast = autocast_state()
        self.modules: list[tuple[Any, ...]] = []
        self.tensors: list[tuple[Any, ...]] = []
        self.trainable: list[Tensor] = []
        buffers = Counter(id(buffer) for _, buffer in model.named_buffers(remove_duplicate=False))
        self.tied = {key for key, count in buffers.items() if count > 1}
        self.objects: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.usable = self.plain_inputs and all(self._note(module) for module in model.modules())
        self.has_gradients = all(parameter.grad is not None for parameter in self.trainable)

    def _note(self, module: nn.Module) -> bool:
        entries = vars(module)
        if "training" not in entries:
            return False  # TorchScript keeps its state elsewhere
        names = ["training"]
        for key in entries.keys() - INTERNAL:
            value = entries[key]
            if _is_plain(value):
                names.append(key)
            elif isinstance(value, (Tensor, list, dict, set)):
                return False  # its contents may change while it stays the same object
            else:
                self.objects[id(module), key] = (entries, key, value, *_simple_state(value))
        children = tuple(module._modules.values())
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        counts = tuple(map(len, hooks))
        values = tuple([_frozen(entries[key]) for key in names])
        sizes = len(module._parameters), len(module._buffers)
        self.modules.append((module, entries, len(entries), names, values, children, hooks, counts, *sizes))
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                fixed = table is module._parameters or id(tensor) in self.tied  # may not become another tensor
                if tensor is None:
                    self.tensors.append((table, key, None, True, None, None, None, None, None))
                    continue
                stride = tensor.stride() if tensor.dim() > 1 and tensor.layout is torch.strided else None
                needs = tensor.requires_grad
                facts = (tensor.shape, stride, tensor.dtype, tensor.device, needs)
                self.tensors.append((table, key, tensor, fixed, *facts))
                if needs and table is module._parameters:
                    self.trainable.append(tensor)
        return True

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Flat inputs if model and call are as they were, else None."""
        if not self.usable or not self._same_model():
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or autocast_state() != self.autocast:
            return None
        for leaf, known in zip(leaves, self.inputs, strict=True):
            if isinstance(leaf, Tensor):
                if describe(leaf) != known:
                    return None
            elif type(leaf) is not type(known) or leaf != known:
                return None
        return leaves if _aliases(leaves) == self.aliases else None

    def _same_model(self) -> bool:
        for _, entries, size, names, values, children, hooks, counts, parameters, buffers in self.modules:
            if (
                len(entries) != size
                or tuple([entries.get(name) for name in names]) != values
                or tuple(entries["_modules"].values()) != children
                or tuple([len(table) for table in hooks]) != counts
                or len(entries["_parameters"]) != parameters
                or len(entries["_buffers"]) != buffers
            ):
                return False
        for entries, key, value, state, known in self.objects.values():
            if entries.get(key) is not value or {k: v for k, v in state.items() if isinstance(v, SIMPLE)} != known:
                return False
        for table, key, tensor, fixed, shape, stride, dtype, device, needs in self.tensors:
            now = table.get(key)
            if now is not tensor and (fixed or now is None or type(now) is not type(tensor)):
                return False
            if now is not None and (
                now.shape != shape
                or now.dtype is not dtype
                or now.device != device
                or now.requires_grad is not needs
                or (stride is not None and now.stride() != stride)
            ):
                return False
        missing = any(parameter.grad is None for parameter in self.trainable)
        return missing is not self.has_gradients and torch.is_grad_enabled()


def _aliases(leaves: list[Any]) -> list[int] | None:
    """For each tensor the place of the first leaf that is the same tensor; None if all are different."""
    first: dict[int, int] = {}
    places = [first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return places if len(first) < len(places) else None


def _is_plain(value: Any) -> bool:
    """Whether ``==`` tells a change: plain values, and tuples and short lists of them."""
    if isinstance(value, (tuple, list)):
        return len(value) < 64 and all(_is_plain(item) for item in value)
    return isinstance(value, SIMPLE)


def _frozen(value: Any) -> Any:
    """A copy that later changes in place do not reach."""
    return type(value)(map(_frozen, value)) if type(value) in (list, tuple) else value


def _simple_state(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of an object that forward may look at (a config), and the plain ones among them as they are now."""
    state = getattr(value, "__dict__", None)
    if not isinstance(state, dict) or isinstance(value, (nn.Module, type)) or callable(value):
        return {}, {}
    return state, {key: item for key, item in state.items() if isinstance(item, SIMPLE)}
