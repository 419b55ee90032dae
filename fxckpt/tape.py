"""The operator calls of a traced step in order, in a form in which the same step at other sizes can be recognised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = ["Call", "Described", "Result", "Sizes", "Tape", "describe", "put_in", "take_apart"]

Number = int
"""Of a tensor: inputs first, then results of calls in order; constants count down from -1."""


class Described(NamedTuple):
    """What the size of a tensor decides; ``storage_bytes`` is of the whole storage that it lies in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @property
    def least_bytes(self) -> int:
        """Size of a storage that holds this tensor alone."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a stretch of memory without gaps and overlap."""
        if 0 in self.shape:
            return True
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step != expected:
                    return False
                expected *= size
        return True


def describe(tensor: Tensor) -> Described:
    """Description of a strided tensor."""
    size = int(tensor.untyped_storage().nbytes())
    return Described(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, size)


class Call(NamedTuple):
    """One operator call.

    Attributes:
        func: the operator.
        reads: its tensors in order.
        plain: the rest of its arguments, see :func:`take_apart`.
    """

    func: Any
    reads: tuple[Number, ...]
    plain: tuple[Any, ...]


@dataclass(slots=True)
class Tape:
    """All calls of a step.

    Attributes:
        calls: in order.
        names: for each call the graph nodes that the tracer made for it.
        results: the step's outputs, then its gradients, None where an input gets none.
        floats: which constants stayed real during the trace: floating point ones too, others only, or (None) none.
        likeness: for each call what inputs have to be like for :func:`fxckpt.metas.meta_answer` to be taken for its
            result; None if it cannot.
    """

    calls: list[Call] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    results: tuple[Number | None, ...] = ()
    floats: bool | None = None
    likeness: list[Any] = field(default_factory=list)

    def same_step(self, other: Tape) -> bool:
        """Whether both are the same calls with the same data flow and plain arguments."""
        return self.calls == other.calls and self.results == other.results


Result = Described | tuple[Described | None, ...]
"""What a call returns: a tensor, or several."""


@dataclass(slots=True)
class Sizes:
    """The same step at other sizes.

    Attributes:
        calls: those of the tape with other numbers among their arguments.
        results: what each of them returns.
        inputs: the module's tensors and the arguments.
        constants: in the order of their numbers.
        same_storage: for each input the first one that lies in the same storage.
        output: the module's output with fake tensors as leaves; ``outputs`` lists them.
        assigned: (module path, attribute, value) for attributes that forward set.
    """

    calls: list[Call]
    results: list[Result]
    inputs: list[Described]
    constants: list[Tensor]
    same_storage: list[int]
    output: Any
    outputs: list[Tensor]
    assigned: list[tuple[str, str, Any]]


def take_apart(args: Any, kwargs: dict[str, Any], kind: type, found: list[Any]) -> tuple[Any, ...]:
    """Arguments of a call as a flat, hashable tuple in which the class stands for each object of class ``kind``.

    Args:
        kind: ``Tensor`` for a call that runs, ``fx.Node`` for a node of a graph.
        found: gets the objects of that class, in order.
    """
    plain: list[Any] = []
    _take(args, kind, found, plain)
    for key, value in kwargs.items():
        if value is not None:  # the tracer leaves such arguments out
            plain.append(key)
            _take((value,), kind, found, plain)
    return tuple(plain)


def _take(args: Any, kind: type, found: list[Any], plain: list[Any]) -> None:
    for value in args:
        cls = value.__class__
        if isinstance(value, kind):
            found.append(value)
            plain.append(Tensor)
        elif isinstance(value, (list, tuple)):
            plain += (list, len(value))
            _take(value, kind, found, plain)
        elif cls is int:
            plain.append(value)
        else:
            if cls is float or cls is bool:  # 1, 1.0 and True are equal
                plain.append(cls)
            plain.append(value)


def put_in(args: Any, kwargs: Any, plain: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a node with the plain values of another call of the same operator."""
    values = iter(plain)

    def again(value: Any) -> Any:
        if isinstance(value, fx.Node):
            next(values)
            return value
        if isinstance(value, (list, tuple)):
            next(values), next(values)
            return [again(item) for item in value]
        new = next(values)
        return next(values) if new is float or new is bool else new

    positional = tuple(again(value) for value in args)
    named = {}
    for key, value in kwargs.items():
        if value is not None:
            next(values)
            named[key] = again(value)
    return positional, named
