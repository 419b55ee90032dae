"""Writes the tape of a step while it is traced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.metas import answer_of, described, likeness, meta_answer
from fxckpt.tape import Call, Described, Number, Tape, take_apart

__all__ = ["TapeRecorder"]


class TapeRecorder(TorchDispatchMode):
    """Above the tracer: writes a :class:`Tape`. Tensors carry their number as an attribute, constants (real tensors
    that the tracer did not make) are known by identity.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.count = 0
        self.constants: list[Tensor] = []
        self.constant_numbers: dict[int, Number] = {}
        self.judged: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **(kwargs or {}))
        tensors: list[Tensor] = []
        plain = take_apart(args, kwargs or {}, Tensor, tensors)
        self.tape.calls.append(Call(func, tuple([self.number_of(tensor) for tensor in tensors]), plain))
        self.tape.names.append([])
        inputs = described(tensors)
        result = func(*args, **(kwargs or {}))
        self.tape.likeness.append(self._judge(func, plain, inputs, (args, kwargs or {}), tensors, result))
        self.number(result if isinstance(result, (tuple, list)) else (result,))
        return result

    def _judge(
        self, func: Any, plain: tuple[Any, ...], inputs: tuple[Described, ...] | None, given: Any,
        tensors: list[Tensor], result: Any,
    ) -> Any:  # fmt: skip
        """What inputs have to be like for the meta kernel's answer to be right, as it is for these."""
        if inputs is None:
            return None
        key = func, plain, inputs
        if key not in self.judged:
            answers = answer_of(result, tensors, inputs), meta_answer(func, given[0], given[1], inputs)
            # The tracer may return another object than the one that was written to.
            one, other = ((Tensor, inputs[a[1]]) if a is not None and a[0] is int else a for a in answers)
            self.judged[key] = likeness(inputs) if one is not None and one == other else None
        return self.judged[key]

    def note(self, name: str) -> None:
        """The call that is running makes the node ``name``."""
        if self.tape.names:
            self.tape.names[-1].append(name)

    def number(self, tensors: Iterable[Any]) -> None:
        """Give the next numbers to ``tensors``."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor._fxckpt_number = self.count  # type: ignore[attr-defined]
                self.count += 1

    def number_of(self, tensor: Tensor) -> Number:
        """Number of a tensor that a call reads; one never seen is a constant."""
        number = getattr(tensor, "_fxckpt_number", None)
        if number is None:
            number = self.constant_numbers.get(id(tensor))
        if number is None:
            self.constants.append(tensor)
            number = self.constant_numbers[id(tensor)] = -len(self.constants)
        return number

    def finish(self, results: Iterable[Tensor | None]) -> None:
        """The step ends with these tensors."""
        self.tape.results = tuple(None if tensor is None else self.number_of(tensor) for tensor in results)
