"""What a device can do, and how long an operator takes on it by the roofline model.

Figures are datasheet values times 0.7, which large matrix products and copies reach in practice. Sources: NVIDIA
A100 (80 GB SXM), H100 SXM and H200 SXM datasheets, dense rates; fp32 without TF32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fxckpt.errors import InvalidArgumentError

__all__ = [
    "DEVICES",
    "HALF",
    "Device",
    "estimate_device",
    "find_device",
    "is_half",
    "is_view",
    "op_seconds",
    "op_work",
    "roofline_seconds",
    "sum_seconds",
]


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of a device.

    Attributes:
        flops: floating point operations per second for 4-byte types.
        half_flops: the same for 2-byte types.
        bandwidth: bytes per second to and from memory.
        launch_seconds: fixed time of one kernel.
    """

    name: str
    flops: float
    half_flops: float
    bandwidth: float
    launch_seconds: float


HALF = (torch.bfloat16, torch.float16)
_SHARE = 0.7
DEVICES = {
    "a100": Device("a100", _SHARE * 19.5e12, _SHARE * 312e12, _SHARE * 2.0e12, 4e-6),
    "h100": Device("h100", _SHARE * 67e12, _SHARE * 989e12, _SHARE * 3.35e12, 4e-6),
    "h200": Device("h200", _SHARE * 67e12, _SHARE * 989e12, _SHARE * 4.8e12, 4e-6),
    "cpu": Device("cpu", 60e9, 30e9, 8e9, 3e-6),
}


def find_device(name: str | torch.device | Device | None = None) -> Device:
    """Device by name, or the one that stands closest to a ``torch.device``; None means the CPU.

    Raises:
        InvalidArgumentError: no such device is known.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, torch.device):
        return _installed(name)
    if name is None:
        name = "cpu"
    if name not in DEVICES:
        raise InvalidArgumentError(f"unknown device {name!r}; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def _installed(device: torch.device) -> Device:
    if device.type != "cuda":
        return DEVICES["cpu"]
    title = torch.cuda.get_device_name(device).lower()
    known = next((DEVICES[name] for name in ("h200", "h100", "a100") if name in title), None)
    return known or estimate_device(torch.cuda.get_device_properties(device))


def estimate_device(properties: Any) -> Device:
    """Rates of a CUDA device from its properties; those of an A100 where a property is missing.

    Two operations per lane and clock, 64 fp32 lanes in a multiprocessor of compute capability 7.x and 8.0 and 128 in
    later ones; tensor cores do 8 times as much in 7.x, 16 times in 8.0 and 9.x or later, 4 times in 8.6 and 8.9.
    Source: NVIDIA's architecture white papers. Memory moves two words per clock.

    Args:
        properties: what ``torch.cuda.get_device_properties`` returns; clocks in kHz, bus width in bits.
    """
    a100, capability = DEVICES["a100"], (properties.major, properties.minor)
    lanes = 64 if capability <= (8, 0) else 128
    tensor_cores = 8 if capability < (8, 0) else 4 if (8, 0) < capability < (9, 0) else 16
    clock = 1e3 * getattr(properties, "clock_rate", 0)
    memory_clock, bits = 1e3 * getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    flops = _SHARE * 2 * lanes * properties.multi_processor_count * clock or a100.flops
    half = tensor_cores * flops if clock else a100.half_flops
    bandwidth = _SHARE * 2 * memory_clock * bits / 8 or a100.bandwidth
    return Device(properties.name, flops, half, bandwidth, a100.launch_seconds)


# Operators that move no data: they make a view, an uninitialised tensor, or pick one result out of several.
_FREE = frozenset({
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "alias", "detach", "as_strided", "unbind", "narrow", "_reshape_alias", "reshape", "view_as",
    "unfold", "diagonal", "real", "imag", "view_as_real", "view_as_complex", "chunk", "movedim", "lift_fresh",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_conj", "_neg_view", "unsafe_split",
    "unsafe_chunk", "adjoint", "mT", "mH", "swapaxes", "swapdims", "squeeze_", "unsafe_split_with_sizes",
    "in_shape_of",
})  # fmt: skip


def _short_name(func: Any) -> str:
    packet = getattr(func, "_overloadpacket", None)
    return str(packet.__name__) if packet is not None else str(getattr(func, "__name__", func))


def is_view(func: Any) -> bool:
    """Whether the operator moves no data."""
    return func is operator.getitem or _short_name(func) in _FREE


def _tensors(*values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def op_work(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Floating point operations and bytes moved by one call of an ATen operator; (0, 0) if it moves no data.

    Args:
        func: the operator overload.
        args, kwargs: its arguments; tensors may be fake.
        out: its result.
    """
    if is_view(func):
        return 0, 0
    moved = sum(_touched(tensor) for tensor in _tensors(args, kwargs, out))
    packet = getattr(func, "_overloadpacket", None)
    flops = int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
    return flops, moved


def _touched(tensor: Tensor) -> int:
    """Bytes of the elements that a kernel has to read; a broadcast dimension is read once."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel() * tensor.element_size())
    count = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return int(count * tensor.element_size())


def op_seconds(func: Any, args: Any, kwargs: Any, out: Any, device: Device) -> float:
    """Roofline time of one call. Seconds; arguments as in :func:`op_work`."""
    if is_view(func):
        return 0.0
    flops, moved = op_work(func, args, kwargs, out)
    return roofline_seconds(device, flops, moved, is_half(_tensors(args, out)))


def sum_seconds(device: Device, size: int) -> float:
    """Time of adding one gradient of ``size`` bytes to another: two are read, one is written."""
    return 3 * size / device.bandwidth + device.launch_seconds


def is_half(tensors: Iterable[Any]) -> bool:
    """Whether a tensor of a 2-byte floating type is among them."""
    return any(isinstance(one, Tensor) and one.dtype in HALF for one in tensors)


def roofline_seconds(device: Device, flops: int, moved_bytes: int, half: bool) -> float:
    """The longer of compute and memory traffic, plus the launch."""
    return max(flops / (device.half_flops if half else device.flops), moved_bytes / device.bandwidth) + (
        device.launch_seconds
    )
