"""Calls whose effect a trace would lose: they stop it, with the line that makes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Refuse", "Refused", "refuse_seeding"]


class Refused(Exception):
    """Raised at the call; the message is the reason."""


class Refuse(TorchFunctionMode):
    """Refuses hooks and ``backward`` in forward, and functions whose own C++ does something else under a trace."""

    refused: ClassVar[dict[Any, str]] = {
        torch.Tensor.register_hook: "a hook on a tensor is registered in forward",
        torch.Tensor.register_post_accumulate_grad_hook: "a hook on a tensor is registered in forward",
        torch.Tensor.retain_grad: "retain_grad() is called in forward",
        torch.Tensor.backward: "backward() is called in forward",
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.refused:
            raise Refused(self.refused[func])
        if func is torch.bilinear and torch.is_autocast_enabled(args[0].device.type):
            raise Refused("torch.bilinear under autocast, which casts within its kernel")
        weighted = kwargs.get("weight") is not None or (len(args) > 2 and args[2] is not None)
        if func is torch.nn.functional.cross_entropy and weighted and kwargs.get("label_smoothing"):
            raise Refused(
                "cross_entropy with weights and label smoothing, which sums in another order while it is traced"
            )
        return func(*args, **kwargs)


_SEEDING = ("manual_seed", "seed", "set_rng_state")


@contextlib.contextmanager
def refuse_seeding() -> Iterator[None]:
    """Refuses on this thread what sets torch's default generator, ``fork_rng`` among them.

    The operators in the graph draw from the generator as they find it: a seed set in between would be lost. These
    functions take no tensors, so that no mode of torch sees them; they are replaced for the time.
    """
    owner = threading.get_ident()

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                raise Refused(f"torch.{name} is called in forward")
            return original(*args, **kwargs)

        return call

    saved = [(module, name, getattr(module, name)) for module in (torch, torch.random) for name in _SEEDING]
    for module, name, original in saved:
        setattr(module, name, guarded(name, original))
    try:
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)
