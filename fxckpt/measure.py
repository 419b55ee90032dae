"""What a step really does: its peak memory by the allocator, and whether a planned step equals the plain one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxckpt import _torch
from fxckpt.snapshot import ModuleSnapshot, RandomState, copied, seed_all

__all__ = [
    "PeakMeasurement",
    "StepComparison",
    "compare_steps",
    "default_loss",
    "held_bytes",
    "measure_peak",
    "named_tensors",
    "same_bits",
]

OBJECTS = 3  # how deep steps are compared in objects that the output holds
CUDA_BLOCK = 512
"""The CUDA caching allocator hands out multiples of this many bytes."""

Loss = Callable[[Any], Tensor]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class PeakMeasurement:
    """Peak of one step.

    Attributes:
        peak_bytes: highest memory above what was allocated when the step began.
        held_bytes: what the tensors, modules and optimizers named by the caller held when it began.
    """

    peak_bytes: int
    held_bytes: int

    @property
    def total_bytes(self) -> int:
        """Peak of the whole step: the number that ``budget_gb`` limits."""
        return self.peak_bytes + self.held_bytes


def measure_peak(
    step: Callable[[], object], *, device: torch.device | str | None = None, held: object = ()
) -> PeakMeasurement:
    """Run ``step`` once and measure its peak memory.

    On CPU the peak comes from the allocator's own events and is exact to the byte; on CUDA from
    ``torch.cuda.max_memory_allocated`` (which this resets). Scratch memory that kernels take past torch's allocator,
    as some CPU libraries do, is not seen. On CPU, memory that was there before the step counts to its end even if the
    step frees it, so clear old gradients before and not within.

    Args:
        step: one training step. It should have run before, so that caches and lazy state exist already.
        device: device to measure; by default that of the first tensor in ``held``, else the CPU.
        held: tensors, modules, optimizers, or containers of them, whose memory counts although it was allocated
            before: parameters with their gradients, buffers, inputs, optimizer state.
    """
    place = torch.device(device) if device is not None else _device_of(held)
    gc.collect()
    before = held_bytes(held, place)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        start = torch.cuda.memory_allocated(place)
        step()
        torch.cuda.synchronize(place)
        return PeakMeasurement(torch.cuda.max_memory_allocated(place) - start, before)
    if place.type != "cpu":
        raise NotImplementedError(f"memory on {place.type!r} devices cannot be measured")
    live = peak = 0
    for count in _torch.cpu_allocations(step):
        live += count
        peak = max(peak, live)
    return PeakMeasurement(peak, before)


def held_bytes(held: object, device: torch.device | str = "cpu") -> int:
    """Bytes on ``device`` of the distinct storages that ``held`` reaches (see :func:`measure_peak`)."""
    place = torch.device(device)
    sizes = {}
    for tensor in _held_tensors(held):
        if tensor.device.type == place.type and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    if place.type == "cuda":
        return sum(-(-size // CUDA_BLOCK) * CUDA_BLOCK for size in sizes.values())
    return sum(sizes.values())


def _device_of(held: object) -> torch.device:
    return next((tensor.device for tensor in _held_tensors(held)), torch.device("cpu"))


def _held_tensors(held: object) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
        if held.is_leaf and held.grad is not None:
            yield held.grad
    elif isinstance(held, nn.Module):
        for tensor in (*held.parameters(), *held.buffers()):
            yield from _held_tensors(tensor)
    elif isinstance(held, torch.optim.Optimizer):
        yield from _held_tensors(held.state)
    elif isinstance(held, Mapping):
        yield from _held_tensors(list(held.values()))
    elif isinstance(held, (list, tuple, set)):
        for item in held:
            yield from _held_tensors(item)
    elif dataclasses.is_dataclass(held):
        yield from _held_tensors([getattr(held, field.name) for field in dataclasses.fields(held)])


def named_tensors(value: object, name: str = "output", objects: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested mappings, sequences and dataclasses, each with its path, e.g. ``output['logits'][0]``.

    Args:
        value: where to look.
        name: what to call it.
        objects: how deep to look into objects of other classes (a key/value cache, say).
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]", objects)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]", objects)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}", objects)
    elif objects and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for key, item in vars(value).items():
            yield from named_tensors(item, f"{name}.{key}", objects - 1)


def default_loss(output: object) -> Tensor:
    """The model's own loss if ``output`` carries a scalar one (``.loss`` or ``["loss"]``), else a sum of squares.

    Raises:
        ValueError: no tensor in ``output`` is differentiable.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    parts = [tensor for _, tensor in named_tensors(output) if tensor.requires_grad]
    if not parts:
        raise ValueError("no output of the model is differentiable, so there is no loss to train on")
    total: Tensor = _SumOfSquares.apply(parts[0])
    for part in parts[1:]:
        total = total + _SumOfSquares.apply(part)
    return total


class _SumOfSquares(torch.autograd.Function):
    """Allocates nothing but its result and its gradient, so that a measured peak is the model's and not the loss's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
        if flat.dtype in (torch.float16, torch.bfloat16):  # dot would make copies of these
            norm: Tensor = torch.linalg.vector_norm(flat)
            return norm.square()
        return torch.dot(flat, flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (tensor,) = ctx.saved_tensors
        return tensor * (2 * gradient)  # type: ignore[no-any-return]


def same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    """Equal dtype, shape and values; NaN equals NaN, and None equals only None."""
    if first is None or second is None:
        return first is second
    if first.layout != second.layout or first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_sparse:
        first, second = first.to_dense(), second.to_dense()
    first, second = first.detach(), second.detach()
    if torch.equal(first, second):
        return True
    if not (first.is_floating_point() or first.is_complex()):
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Outcome of :func:`compare_steps`.

    Attributes:
        differences: names of all that differs, e.g. ``"gradient of layer1.0.conv1.weight"``; empty if nothing does.
        compared: number of tensors and states that were compared.
        plain_loss: loss of the plain step.
        planned_loss: loss of the planned step.
        plain_peak: peak of the plain step, None if not measured.
        planned_peak: peak of the planned step, None if not measured.
    """

    differences: tuple[str, ...]
    compared: int
    plain_loss: float
    planned_loss: float
    plain_peak: PeakMeasurement | None = None
    planned_peak: PeakMeasurement | None = None

    @property
    def equal(self) -> bool:
        """Whether loss, outputs, gradients, buffers and random states are the same."""
        return not self.differences


def compare_steps(
    model: nn.Module,
    planned: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Loss = default_loss,
    seed: int | None = 0,
    *,
    context: Context = contextlib.nullcontext,
    measure: bool = False,
    held: object = (),
) -> StepComparison:
    """Run one step of ``model`` and one of ``planned`` from the same state and compare all they leave behind.

    Compared are the loss, every tensor of the output, gradients of parameters and inputs (None stays None), buffers,
    inputs written to by the forward, and the random states of CPU, CUDA, Python and NumPy. Afterwards parameters,
    gradients, buffers, plain attributes and random states are what they were before the call.

    Args:
        model: the plain model in training mode.
        planned: the same model after ``auto_checkpoint``; it may share parameters with ``model``.
        args: positional arguments of ``forward``; each step gets copies of the tensors in them.
        kwargs: keyword arguments of ``forward``, likewise.
        loss_fn: maps the output to a scalar.
        seed: seed of both steps; None starts both from the present random state.
        context: makes the context that forward and loss run in, e.g. autocast.
        measure: also measure the peaks, each in a second run of the step.
        held: what counts in the peaks besides model and inputs, e.g. an optimizer.
    """
    random_before = RandomState.now()
    if seed is not None:
        seed_all(seed)
    start = RandomState.now()
    before = ModuleSnapshot.of(model, planned)
    outcomes = []
    try:
        for module in (model, planned):
            steps = _Stepper(module, args, dict(kwargs or {}), loss_fn, context, start, before)
            outcomes.append(steps.outcome(measure, held))
    finally:
        before.restore()
        random_before.restore()
    (plain, plain_peak), (other, planned_peak) = outcomes
    names = [*plain, *(name for name in other if name not in plain)]
    missing = object()
    differences = tuple(n for n in names if not _same(plain.get(n, missing), other.get(n, missing)))
    losses = (float(plain["loss"].detach().float()), float(other["loss"].detach().float()))
    return StepComparison(differences, len(names), *losses, plain_peak, planned_peak)


def _same(first: Any, second: Any) -> bool:
    tensors = isinstance(first, (Tensor, type(None))) and isinstance(second, (Tensor, type(None)))
    return same_bits(first, second) if tensors else type(first) is type(second) and bool(first == second)


@dataclass(slots=True)
class _Stepper:
    """Runs steps of one module, each from the same state."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]
    loss_fn: Loss
    context: Context
    start: RandomState
    before: ModuleSnapshot

    def outcome(self, measure: bool, held: object) -> tuple[dict[str, Any], PeakMeasurement | None]:
        args, kwargs = copied((self.args, self.kwargs))
        self._prepare()
        output, loss = self._forward(args, kwargs)
        loss.backward()
        found = self._found(output, loss, args, kwargs)
        del output, loss
        if not measure:
            return found, None
        args, kwargs = copied((self.args, self.kwargs))
        self._prepare()
        return found, measure_peak(lambda: self._lean_step(args, kwargs), held=(self.module, args, kwargs, held))

    def _prepare(self) -> None:
        self.before.restore()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.start.restore()

    def _forward(self, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
        with self.context():
            output = self.module(*args, **kwargs)
            return output, self.loss_fn(output)

    def _lean_step(self, args: Any, kwargs: Any) -> None:
        """A step that holds what a training loop does: of a model with the loss inside it takes the loss alone."""
        output, loss = self._forward(args, kwargs)
        if any(tensor.data_ptr() == loss.data_ptr() for _, tensor in named_tensors(output)):
            del output
        loss.backward()

    def _found(self, output: Any, loss: Tensor, args: Any, kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": loss.detach().clone()}
        found.update(named_tensors(output, objects=OBJECTS))
        for name, parameter in self.module.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
        for name, buffer in self.module.named_buffers():
            found[f"buffer {name}"] = buffer.detach().clone()
        for name, tensor in named_tensors((args, kwargs), "input"):
            found[f"{name} after the step"] = tensor.detach().clone()
            if tensor.requires_grad:
                found[f"gradient of {name}"] = tensor.grad
        for name, state in RandomState.now().named().items():
            found[f"random state of {name} after the step"] = state
        return found
