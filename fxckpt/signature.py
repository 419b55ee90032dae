"""What a plan depends on: the key under which planned graphs are cached, and the tensors that go into them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxckpt.errors import CaptureError
from fxckpt.state import INTERNAL, SIMPLE

__all__ = ["Call", "autocast_state", "describe", "read_call"]

MAX_ITEMS = 64  # longer plain containers on a module are compared by identity


class Call:
    """One call of a model, taken apart.

    Attributes:
        leaves: flat inputs.
        key: hashable; calls with equal keys run the same graph.
        structure: like ``key`` without what only changes the plan, not the captured graph (existing gradients).
        form: like ``structure`` without the sizes of the inputs and of tensors on plain attributes.
        has_gradients: every parameter that requires grad has a ``.grad``.
    """

    __slots__ = ("form", "has_gradients", "key", "leaves", "structure")

    def __init__(self, leaves: list[Any], structure: Hashable, form: Hashable, has_gradients: bool) -> None:
        self.leaves, self.structure, self.form, self.has_gradients = leaves, structure, form, has_gradients
        self.key = (structure, has_gradients)


def read_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Take a call apart.

    Args:
        model: the model about to run.
        args: positional inputs.
        kwargs: keyword inputs.

    Raises:
        CaptureError: an input is of a kind that no graph takes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    parts: list[Any] = [spec]
    forms: list[Any] = [spec]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                raise CaptureError("an input is a nested tensor", reason="nested tensor")
            parts.append((first.setdefault(id(leaf), index), describe(leaf)))
            forms.append((first[id(leaf)], _without_sizes(leaf)))
        else:
            parts.append(_plain(leaf))
            forms.append(parts[-1])
    reader = _ModelReader()
    reader.visit(model)
    autocast = autocast_state()
    structure = (tuple(parts), tuple(reader.parts), autocast)
    form = (tuple(forms), tuple(reader.form()), autocast)
    return Call(leaves, structure, form, reader.with_gradient > 0 and reader.without_gradient == 0)


def describe(tensor: Tensor) -> tuple[Hashable, ...]:
    """What of a tensor the captured graph depends on."""
    stride = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _without_sizes(tensor: Tensor) -> Hashable:
    return tensor.dim(), *describe(tensor)[2:]


def autocast_state() -> Hashable:
    """Autocast state of the devices for which it is on."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


class _ModelReader:
    """Walks modules: their flags, tensors and plain attributes."""

    def __init__(self) -> None:
        self.parts: list[Hashable] = []
        self.loose: dict[int, Hashable] = {}
        self.seen: set[int] = set()
        self.buffers: dict[int, int] = {}
        self.objects: dict[int, Hashable] = {}
        self.with_gradient = self.without_gradient = 0

    def visit(self, module: nn.Module) -> None:
        """Append all that ``module`` and what is below it contribute to the key."""
        self.seen.add(id(module))
        entries = module.__dict__
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        self.parts.append((id(type(module)), module.training, *hooks))
        for parameter in module._parameters.values():
            if parameter is not None:
                self.parts.append((id(parameter), describe(parameter)))
                if parameter.requires_grad:
                    if parameter.grad is None:
                        self.without_gradient += 1
                    else:
                        self.with_gradient += 1
        for buffer in module._buffers.values():
            if buffer is not None:
                self.parts.append((self.buffers.setdefault(id(buffer), len(self.buffers)), describe(buffer)))
        for key in entries.keys() - INTERNAL:
            value = entries[key]
            if isinstance(value, Tensor):
                self.loose[len(self.parts)] = key, _without_sizes(value)
            self.parts.append((key, self._attribute(value)))
        for name, child in module._modules.items():
            if child is not None:
                if id(child) in self.seen:
                    self.parts.append((name, id(child)))
                else:
                    self.visit(child)

    def form(self) -> list[Hashable]:
        """The parts without sizes of tensors that may be results of an earlier call."""
        form = list(self.parts)
        for index, part in self.loose.items():
            form[index] = part
        return form

    def _attribute(self, value: Any) -> Hashable:
        if isinstance(value, SIMPLE):
            return type(value), value  # 1, 1.0 and True are equal, and give results of other types
        if isinstance(value, Tensor):
            return describe(value)
        if isinstance(value, (list, tuple, dict)):
            return _plain(value)
        if id(value) not in self.objects:
            state = getattr(value, "__dict__", None)
            simple: tuple[Hashable, ...] = ()
            if isinstance(state, dict) and not isinstance(value, (nn.Module, type)) and not callable(value):
                simple = tuple((key, item) for key, item in state.items() if isinstance(item, SIMPLE))
            self.objects[id(value)] = (id(value), simple)
        return self.objects[id(value)]


def _plain(value: Any) -> Hashable:
    """A hashable stand-in: the value itself if it is plain, else its contents or its identity."""
    if isinstance(value, SIMPLE):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
        return (type(value).__name__, *(_plain(item) for item in value))
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return ("dict", *((str(key), _plain(item)) for key, item in value.items()))
    return (type(value).__name__, id(value))
