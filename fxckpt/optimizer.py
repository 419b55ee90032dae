"""Memory of an optimizer: the state it holds, or will hold after its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["optimizer_state_bytes"]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the state tensors of ``optimizer``.

    Before the first step there is no state yet. It is then counted from what a step leaves behind on a one-element
    stand-in for each parameter: a state tensor of the parameter's shape counts as large as the parameter.

    Args:
        optimizer: any ``torch.optim`` optimizer, or None for 0.
    """
    if optimizer is None:
        return 0
    held = sum(int(tensor.untyped_storage().nbytes()) for tensor in _tensors(list(optimizer.state.values())))
    return held + sum(_future(optimizer, group) for group in optimizer.param_groups)


def _future(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    missing = [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
    if not missing:
        return 0
    stand_in = torch.nn.Parameter(torch.zeros(2, 3))
    stand_in.grad = torch.zeros(2, 3)
    options = {key: value for key, value in group.items() if key in optimizer.defaults}
    make: Any = type(optimizer)
    try:
        twin = make([{"params": [stand_in], **options}])
        twin.step()
    except Exception:  # an optimizer with needs of its own (a closure): its state is unknown
        return 0
    like = sum(1 for tensor in _tensors(list(twin.state.values())) if tensor.shape == stand_in.shape)
    return like * sum(int(parameter.numel() * parameter.element_size()) for parameter in missing)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
