"""What the command line names by strings: models, inputs, losses, optimizers, budgets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxckpt.errors import InvalidArgumentError
from fxckpt.measure import default_loss
from fxckpt.units import GIB, MIB

__all__ = ["Budget", "Setup", "parse_budget", "parse_input", "resolve"]

_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
}
_UNITS = {"": GIB, "gib": GIB, "mib": MIB, "kib": 1024, "b": 1}


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as typed: ``bytes``, or ``fraction`` of the plain step's peak."""

    bytes: int | None = None
    fraction: float | None = None

    def gib(self, plain_peak_bytes: Callable[[], int]) -> float:
        """GiB of the whole step; ``plain_peak_bytes`` is called only if a fraction was typed."""
        count = plain_peak_bytes() * self.fraction if self.fraction is not None else self.bytes or 0
        return count / GIB


def parse_budget(text: str) -> Budget:
    """``"5.5"`` and ``"5.5GiB"`` as GiB, ``"800MiB"``, or ``"60%"`` of the plain step's peak.

    Raises:
        InvalidArgumentError: the text is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?\d+)?)\s*(%|[a-zA-Z]*)\s*", text)
    try:
        number = float(match.group(1)) if match else 0.0
    except ValueError:
        number = 0.0
    unit = match.group(2).lower() if match else ""
    if number <= 0 or (unit != "%" and unit not in _UNITS):
        raise InvalidArgumentError(
            f"budget {text!r} is not a positive number of GiB ('5.5'), with a unit ('800MiB') or in percent ('60%')"
        )
    return Budget(fraction=number / 100) if unit == "%" else Budget(bytes=round(number * _UNITS[unit]))


def parse_input(text: str) -> Tensor:
    """Random tensor for ``SHAPE[:dtype[:high]]``, e.g. ``"8x3x224x224"``, ``"1x512:int64:50257"``.

    Floating point values are normal; integers lie in ``[0, high)``, by default 0 or 1, which every embedding has.

    Raises:
        InvalidArgumentError: the text has another form, or names no dtype.
    """
    match = re.fullmatch(r"(\d+(?:[x,]\d+)*)(?::(\w+))?(?::(\d+))?", text.replace(" ", ""))
    if match is None:
        raise InvalidArgumentError(f"input {text!r} is not SHAPE[:dtype[:high]], e.g. 8x3x224x224 or 1x512:int64:50257")
    shape = [int(size) for size in re.split("[x,]", match.group(1))]
    name = match.group(2) or "float32"
    dtype = _DTYPES.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"input {text!r}: torch has no dtype {name!r}")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, int(match.group(3) or 2), shape, dtype=dtype)


def resolve(spec: str, what: str) -> Any:
    """The object that ``package.module:name`` means; the working directory is searched too.

    Raises:
        InvalidArgumentError: the module or the name does not exist.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise InvalidArgumentError(f"{what} {spec!r} is not of the form package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        hint = ""
        if module.split(".")[0] in ("torchvision", "timm", "transformers"):
            hint = "; pip install 'fxckpt[models]'"
        raise InvalidArgumentError(f"{what} {spec!r}: cannot import {module!r}: {error}{hint}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidArgumentError(f"{what} {spec!r}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


@dataclass(slots=True)
class Setup:
    """A model in training mode with the inputs of one step."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    amp: torch.dtype | None

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        model_kwargs: str = "{}",
        inputs: tuple[str, ...] = (),
        input_fn: str | None = None,
        loss: str | None = None,
        optimizer: str | None = None,
        device: str = "cpu",
        amp: str | None = None,
        seed: int = 0,
    ) -> Setup:
        """Build all that the options of the command line name.

        Raises:
            InvalidArgumentError: one of them does not exist or does not fit.
        """
        try:
            place = torch.device(device)
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError) as error:
            raise InvalidArgumentError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from error
        torch.manual_seed(seed)
        model = _model(spec, model_kwargs).to(place).train()
        args, kwargs = _inputs(inputs, input_fn)
        return cls(
            model=model,
            args=_moved(args, place),
            kwargs=_moved(kwargs, place),
            loss=resolve(loss, "loss") if loss else default_loss,
            optimizer=_optimizer(optimizer, model) if optimizer else None,
            device=place,
            amp={"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[amp],
        )

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that forward runs in: autocast, or nothing."""
        if self.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.amp)


def _model(spec: str, kwargs: str) -> nn.Module:
    factory = resolve(spec, "model")
    try:
        options = json.loads(kwargs)
        assert isinstance(options, dict)
    except (ValueError, AssertionError) as error:
        raise InvalidArgumentError(f"--kwargs {kwargs!r} is not a JSON object") from error
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory(**options)
    except Exception as error:
        raise InvalidArgumentError(f"model {spec!r} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model {spec!r} gave {type(model).__name__}, not a torch.nn.Module")
    return model


def _inputs(inputs: tuple[str, ...], input_fn: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if input_fn is None:
        if not inputs:
            raise InvalidArgumentError("no inputs: give --input SHAPE[:dtype] for each argument, or --input-fn mod:fn")
        return tuple(parse_input(text) for text in inputs), {}
    if inputs:
        raise InvalidArgumentError("--input and --input-fn exclude each other")
    made = resolve(input_fn, "input function")()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
        return made
    if isinstance(made, Mapping):
        return (), dict(made)
    return (made if isinstance(made, tuple) else (made,)), {}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return value


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Optimizer of ``torch.optim`` with its state in place, as after the first step of a training run."""
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise InvalidArgumentError(f"torch.optim has no {name!r}; it has {', '.join(sorted(known))}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make: Callable[..., torch.optim.Optimizer] = known[name.lower()]
    optimizer = make(parameters, lr=0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer
