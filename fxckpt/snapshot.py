"""State that a training step changes, remembered and set back: modules, random generators, inputs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ModuleSnapshot", "RandomState", "copied", "device_random_state", "seed_all", "set_device_random_state"]


def copied(value: Any, seen: dict[int, Tensor] | None = None) -> Any:
    """``value`` with its tensors copied; what was one tensor stays one."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: copied(item, seen) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(item, seen) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item, seen) for item in value)
    return value


def seed_all(seed: int) -> None:
    """Seed the default generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def device_random_state(device: torch.device) -> Tensor:
    """State of the default generator of ``device``, as a byte tensor in host memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state


def set_device_random_state(device: torch.device, state: Tensor) -> None:
    """Set the default generator of ``device`` to a state that :func:`device_random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        getattr(torch, device.type).set_rng_state(state, device)


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the default generators of CPU, every CUDA device, Python and NumPy."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: object
    numpy: Mapping[str, Any]

    @classmethod
    def now(cls) -> RandomState:
        """The present states."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Set all generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(dict(self.numpy))

    def named(self) -> dict[str, Any]:
        """The states by the name of their generator, comparable."""
        states: dict[str, Any] = {"cpu": self.cpu, "python": self.python, "numpy": repr(self.numpy)}
        states.update((f"cuda:{index}", state) for index, state in enumerate(self.cuda))
        return states


@dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """Parameters, gradients, buffers and plain attributes. Copies lie in host memory, where they do not count."""

    gradients: tuple[tuple[Tensor, Tensor | None], ...]
    values: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[nn.Module, dict[str, Tensor | None]], ...]
    attributes: tuple[tuple[nn.Module, dict[str, Any]], ...]

    @classmethod
    def of(cls, *modules: nn.Module) -> ModuleSnapshot:
        """Remember the state of ``modules``, which may share parts."""
        parts = list({id(part): part for module in modules for part in module.modules()}.values())
        parameters = {id(p): p for part in parts for p in part.parameters(recurse=False)}
        tensors = {**parameters, **{id(b): b for part in parts for b in part.buffers(recurse=False)}}
        plain = (bool, int, float, str, type(None))
        return cls(
            tuple((parameter, parameter.grad) for parameter in parameters.values()),
            tuple((tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()),
            tuple((part, dict(part._buffers)) for part in parts),
            tuple((p, {k: v for k, v in vars(p).items() if isinstance(v, plain)}) for p in parts),
        )

    def restore(self) -> None:
        """Set it back; tensors that did not change are not written to."""
        for module, buffers in self.buffers:
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, value in self.values:
                # A write would count as a change to values that autograd may have saved.
                if not torch.equal(tensor.cpu(), value):
                    tensor.copy_(value)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for module, attributes in self.attributes:
            vars(module).update(attributes)
