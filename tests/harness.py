"""Comparison of a planned model with eager, bit for bit.

Both sides are built from the same seeds, run the same steps, and everything that a training script can see
afterwards is recorded: outputs with their types, strides and aliases, the loss, gradients, buffers, attributes of
modules, probes and the random states. :func:`compare` returns the names of what differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

__all__ = ["Batch", "Build", "MakePlanned", "compare", "differences", "freeze", "record", "seed_all"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
MakePlanned = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], nn.Module]

SEED = 1234


def seed_all(seed: int = SEED) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def compare(
    build: Build,
    loss: Callable[[Any], torch.Tensor],
    *,
    make_planned: MakePlanned,
    rounding: float = 0.0,
    **options: Any,
) -> list[str]:
    """Run ``build``'s model plain and planned and name what differs; an empty list means right.

    Args:
        build: returns ``(model, args, kwargs)``; called once for each side, from the same seeds.
        loss: scalar of the model's output.
        make_planned: turns ``(model, args, kwargs)`` into the model to compare.
        rounding: see :func:`differences`.
        **options: see :func:`record`.
    """
    plain = record(build, loss, **options)
    planned = record(build, loss, make_planned=make_planned, **options)
    return list(differences(plain, planned, rounding=rounding))


def record(
    build: Build,
    loss: Callable[[Any], torch.Tensor],
    *,
    make_planned: MakePlanned | None = None,
    context: Callable[[], Any] | None = None,
    extra_batches: Callable[[], list[Batch]] | None = None,
    mutate: Callable[[nn.Module, int], None] | None = None,
    between: Callable[[nn.Module], None] | None = None,
    probe: Callable[[nn.Module], Any] | None = None,
    grad_api: str = "backward",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    repeat: int = 1,
    accumulate: bool = False,
) -> dict[str, Any]:
    """Run all steps of one side and return what can be observed, by name.

    Args:
        build: as in :func:`compare`.
        loss: as in :func:`compare`.
        make_planned: as in :func:`compare`; None runs the model as built.
        context: context manager around forward (and around planning).
        extra_batches: further ``(args, kwargs)`` to run after the first.
        mutate: called with the model and the number of the step before each step.
        between: called with the model after forward, before backward.
        probe: values of the model to compare after the last step.
        grad_api: ``"backward"``, ``"grad"`` (autograd.grad on the parameters) or ``"twice"`` (retain_graph).
        optimizer: makes an optimizer that steps after each backward.
        repeat: how often the first batch runs.
        accumulate: leave gradients where they are between steps.
    """
    seed_all()
    model, args, kwargs = build()
    batches = [(args, kwargs)] * repeat + (extra_batches() if extra_batches else [])
    context = context or contextlib.nullcontext
    if make_planned is not None:
        with context():
            model = make_planned(model, args, kwargs)
    optim = optimizer(model) if optimizer else None
    seed_all()
    seen: dict[str, Any] = {}
    for step, (step_args, step_kwargs) in enumerate(batches):
        if mutate:
            mutate(model, step)
        if not accumulate:
            _clear_gradients(model, step_args, step_kwargs)
        prefix = f"step {step} "
        try:
            output = _forward(model, step_args, step_kwargs, context, seen, prefix)
            if between:
                between(model)
            _backward(model, loss(output), grad_api, seen, prefix)
        except Exception as error:  # what eager raises, the planned model has to raise too
            seen[prefix + "error"] = f"{type(error).__name__}: {error}"
            break
        del output
        _record_state(model, step_args, step_kwargs, seen, prefix)
        if optim:
            optim.step()
    if probe:
        seen["probe"] = freeze(probe(model))
    return seen


def _forward(model: nn.Module, args: Any, kwargs: Any, context: Any, seen: dict[str, Any], prefix: str) -> Any:
    with context():
        output = model(*args, **kwargs)
    inputs = list(_tensors((args, kwargs)))
    outputs = list(_tensors(output))
    seen[prefix + "output"] = freeze(output, objects=3)
    seen[prefix + "aliases of inputs"] = [[a is b for a in inputs] for b in outputs]
    pointers = [
        a.untyped_storage().data_ptr() if a.layout == torch.strided and a.numel() else 0 for a in inputs + outputs
    ]
    seen[prefix + "shared storages"] = [
        (i, j) for i in range(len(pointers)) for j in range(i) if pointers[i] and pointers[i] == pointers[j]
    ]
    seen[prefix + "random state after forward"] = _random_state()
    return output


def _backward(model: nn.Module, loss: torch.Tensor, grad_api: str, seen: dict[str, Any], prefix: str) -> None:
    seen[prefix + "loss"] = freeze(loss)
    if grad_api == "grad":
        wanted = [p for p in model.parameters() if p.requires_grad]
        seen[prefix + "autograd.grad"] = freeze(torch.autograd.grad(loss, wanted, allow_unused=True))
    elif grad_api == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        loss.backward()


def _record_state(model: nn.Module, args: Any, kwargs: Any, seen: dict[str, Any], prefix: str) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen[f"{prefix}parameter {name}"] = freeze(parameter)
        seen[f"{prefix}gradient {name}"] = freeze(parameter.grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        seen[f"{prefix}buffer {name}"] = freeze(buffer)
    for index, tensor in enumerate(_tensors((args, kwargs))):
        seen[f"{prefix}input {index}"] = freeze(tensor)
        if tensor.is_leaf:
            seen[f"{prefix}input gradient {index}"] = freeze(tensor.grad)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and not isinstance(value, nn.Module):
                seen[f"{prefix}attribute {name}.{key}"] = freeze(value)
    seen[prefix + "random state after step"] = _random_state()


def _clear_gradients(model: nn.Module, args: Any, kwargs: Any) -> None:
    model.zero_grad(set_to_none=True)
    for tensor in _tensors((args, kwargs)):
        if tensor.is_leaf:
            tensor.grad = None


def _random_state() -> Any:
    kind, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state(), hash(random.getstate()), (kind, keys.tobytes(), *rest)]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))


def freeze(value: Any, objects: int = 0) -> Any:
    """A copy of ``value`` that later steps cannot change, comparable with :func:`differences`.

    Args:
        value: anything.
        objects: how deep to look into objects of classes that are not containers (a key/value cache, say).
    """
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value)
    if isinstance(value, Mapping):
        return {"type": type(value).__qualname__, **{repr(key): freeze(entry, objects) for key, entry in value.items()}}
    if isinstance(value, (list, tuple)):
        return {
            "type": type(value).__qualname__,
            **{str(index): freeze(entry, objects) for index, entry in enumerate(value)},
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: freeze(getattr(value, field.name), objects) for field in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)):
        return value
    if objects and hasattr(value, "__dict__") and not callable(value):
        return {
            "type": type(value).__qualname__,
            **{key: freeze(entry, objects - 1) for key, entry in vars(value).items()},
        }
    return type(value).__qualname__


def _freeze_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    facts = {
        "type": type(tensor).__qualname__,
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
    }
    data = tensor.detach()
    if data.layout == torch.sparse_coo:
        return {**facts, "indices": data._indices().clone(), "values": data._values().clone()}
    return {**facts, "stride": _significant_strides(data), "data": data.clone(memory_format=torch.contiguous_format)}


def _significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    # Strides of dimensions of size one say nothing about the layout, and kernels do not agree on them.
    return tuple(s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def differences(plain: Any, planned: Any, path: str = "", rounding: float = 0.0) -> Iterator[str]:
    """Names of the entries of two recordings that are not bit-equal.

    Args:
        plain: eager's recording.
        planned: the other.
        path: name of the entry.
        rounding: floating point tensors may differ by this share of their largest element, or of 0.1. Only second
            derivatives need it: eager adds the gradients that reach a node from the first and from the second backward
            before it multiplies, a segment whose backward was replayed multiplies first.
    """
    if isinstance(plain, torch.Tensor) and isinstance(planned, torch.Tensor):
        if not _same_bits(plain, planned) and not _nearly(plain, planned, rounding):
            yield f"{path}: {_distance(plain, planned)}"
    elif isinstance(plain, dict) and isinstance(planned, dict):
        # An error of the planned model is an entry that eager does not have; attributes it adds are its own affair.
        for key in [key for key in planned if key not in plain]:
            if not key.rpartition("step ")[2].partition(" ")[2].startswith("attribute ."):
                yield f"{path} / {key}: only in the planned run ({_short(planned[key])})"
        for key, entry in plain.items():
            name = f"{path} / {key}" if path else key
            if key not in planned:
                yield f"{name}: missing"
            else:
                yield from differences(entry, planned[key], name, rounding)
    elif isinstance(plain, (list, tuple)) and isinstance(planned, (list, tuple)) and len(plain) == len(planned):
        for index, (a, b) in enumerate(zip(plain, planned, strict=True)):
            yield from differences(a, b, f"{path}[{index}]", rounding)
    elif isinstance(plain, float) and isinstance(planned, float) and plain != plain:
        if planned == planned:
            yield f"{path}: nan is {planned}"
    elif type(plain) is not type(planned) or plain != planned:
        yield f"{path}: {_short(plain)} is {_short(planned)}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _nearly(a: torch.Tensor, b: torch.Tensor, rounding: float) -> bool:
    if not rounding or a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        return False
    return bool((a - b).abs().max() <= rounding * max(0.1, a.abs().max().item()))


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} is {b.dtype} {tuple(b.shape)}"
    if a.is_floating_point() or a.is_complex():
        return f"values differ by up to {(a - b).abs().max().item():.3g} of {a.abs().max().item():.3g}"
    return f"{int((a != b).sum())} of {a.numel()} values differ"


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict) else f"{value.get('type')} of {len(value)} entries"
    return text if len(text) < 300 else text[:300] + "..."
