"""Counted work: roofline seconds of every ATen operator that a step executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.device import Device, find_device, op_seconds

__all__ = ["CountingInterpreter", "WorkCounter", "counted_seconds"]


class WorkCounter(TorchDispatchMode):
    """Adds up the roofline seconds of the operators dispatched while it is active."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0
        self.active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seconds += op_seconds(func, args, kwargs or {}, out, self.device)
        return out


class CountingInterpreter(fx.Interpreter):
    """Runs a compiled graph node by node and adds its work to ``counter``, which the compiler cannot see otherwise."""

    def __init__(self, module: fx.GraphModule, counter: WorkCounter) -> None:
        super().__init__(module)
        self.counter = counter

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        if isinstance(target, torch._ops.OpOverload):
            self.counter.seconds += op_seconds(target, args, kwargs, out, self.counter.device)
        return out


def counted_seconds(step: Callable[[], object], device: str = "a100") -> float:
    """Roofline seconds of all operators that ``step`` executes, on ``device``."""
    with WorkCounter(find_device(device)) as counter:
        step()
    return counter.seconds
