"""Follow a module at other sizes: does its step consist of the same operator calls, and with which numbers?

The module's own Python code and real autograd run once more, on fake tensors. Each call is compared with the tape of
the first trace. What an operator makes of given sizes is remembered, so that most calls cost some microseconds.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from fxckpt import _torch
from fxckpt.constants import TRACED, RealConstants
from fxckpt.metas import answer_of, described, likeness, meta_answer
from fxckpt.recorder import TapeRecorder
from fxckpt.rehearsal import Rehearsal
from fxckpt.shapes import Answer, Seen, quick_result
from fxckpt.state import ModuleState
from fxckpt.tape import Call, Described, Result, Sizes, Tape, take_apart

__all__ = ["retrace"]

MOST_KNOWN = 20_000  # calls; some hundred bytes each
log = logging.getLogger(__name__)


def retrace(tape: Tape, seen: Seen, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes | None:
    """Run one training step of ``module`` on fake tensors and compare it with ``tape``.

    Args:
        tape: of a call of the same module with inputs of other sizes.
        seen: what operators made of their arguments; filled here, to be passed again for the same tape.
        module: as for ``capture``.
        args, kwargs: the new inputs.

    Returns:
        The numbers and sizes that differ; None if anything else does, in which case only a new trace can tell.
    """
    if len(seen.answers) > MOST_KNOWN:
        seen.clear()
    try:
        return _Retracing(tape, seen, module, args, kwargs).run()
    except Exception as error:  # of any kind, and whatever it is, a new trace will meet and explain it
        log.debug("not the same step: %s", error)
        return None


class _Differs(Exception):
    pass


class _Retracing(Rehearsal):
    def __init__(
        self, tape: Tape, seen: Seen, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(module, ModuleState.collect(module), args, kwargs)
        self.fake_mode = _torch.FakeMode(allow_non_fake_inputs=True)
        self.player = _Player(tape, seen, self.fake_mode)

    def run(self) -> Sizes:
        player = self.player
        descriptions = [self.player.seen.one(described) for described in _described(self.tensors)]
        fakes = [self._fake(*pair) for pair in zip(self.tensors, descriptions, strict=True)]
        player.number(fakes)
        with self.undone(), self.fake_mode, _torch.quiet_fakes(), player:
            output, outputs = self.forward(fakes)
            player.constants_mode = None
            used = [tensor for tensor in outputs if tensor.requires_grad]
            tangents = [torch.empty_like(tensor) for tensor in used]
            gradients = self.gradients(used, [fake for fake in fakes if fake.requires_grad], tangents)
        player.finish([*outputs, *gradients])
        if len(player.results) != len(player.expected.calls) or player.tape.results != player.expected.results:
            raise _Differs("it ends differently")
        return Sizes(
            calls=player.tape.calls, results=player.results, inputs=descriptions, constants=player.constants,
            same_storage=_same_storage(self.tensors), output=output, outputs=outputs, assigned=self.assigned,
        )  # fmt: skip

    def _fake(self, tensor: Tensor, described: Described) -> Tensor:
        fake = self.player.fake(described)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            self.player.maker.make_parameter(fake)
        return fake


def _described(tensors: list[Tensor]) -> list[Described]:
    found = described(tensors)
    if found is None:
        raise _Differs("a tensor is sparse or complex")
    return list(found)


def _same_storage(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first one in the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(_torch.storage_key(tensor), index) for index, tensor in enumerate(tensors)]


class _Player(_torch.BareMode, TapeRecorder):
    """Answers calls from what is known of them, and stops at the first that is not on the tape."""

    def __init__(self, expected: Tape, seen: Seen, mode: Any) -> None:
        super().__init__()
        self.expected, self.seen = expected, seen
        self.maker = _torch.FakeMaker(mode)
        self.constants_mode = None if expected.floats is None else RealConstants(expected.floats)
        self.results: list[Result] = []

    def fake(self, described: Described) -> _torch.FakeTensor:
        """A fake tensor that remembers how it is described; equal descriptions are one object."""
        fake = self.maker.make(*described[:4])
        fake._fxckpt_described = described  # type: ignore[attr-defined]
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.DEVICE_QUESTION:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        plain = take_apart(args, kwargs, Tensor, tensors)
        inputs: list[Any] = [getattr(tensor, "_fxckpt_described", None) for tensor in tensors]
        constants = self.constants_mode
        if None in inputs or (constants is not None and constants.may_concern(func, tensors)):
            result = TRACED if constants is None else constants.attempt(func, tensors, args, kwargs)
            if result is not TRACED:
                return result
            pairs = zip(tensors, inputs, strict=True)
            inputs = [self.seen.one(_described([tensor])[0]) if known is None else known for tensor, known in pairs]
        self._compare(Call(func, tuple([self.number_of(tensor) for tensor in tensors]), plain))
        key = func, plain, *map(id, inputs)
        found = self.seen.answers.get(key)
        if found is None:
            given = tuple(inputs)
            found = quick_result(func, plain, given) or self._by_meta(func, args, kwargs, given)
            found = self.seen.keep(key, found)
        if found is not None:
            result = self._again(found, tensors, inputs)
        else:
            result = self._new(key, inputs, func, tensors, args, kwargs)
        self.number(result if isinstance(result, (tuple, list)) else (result,))
        return result

    def _by_meta(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: tuple[Described, ...]) -> Answer | None:
        """The answer of the meta kernel, where it was right in the first trace."""
        expected = self.expected.likeness[len(self.tape.calls) - 1]
        if expected is None or expected != likeness(inputs):
            return None
        return meta_answer(func, args, kwargs, inputs)

    def _compare(self, call: Call) -> None:
        index = len(self.tape.calls)
        if index == len(self.expected.calls):
            raise _Differs(f"{call.func} is one call more")
        other = self.expected.calls[index]
        if call.func is not other.func or call.reads != other.reads or not _alike(call.plain, other.plain):
            raise _Differs(f"{call.func} instead of {other.func}, or of other values")
        self.tape.calls.append(call)

    def _again(self, found: tuple[Any, Any], tensors: list[Tensor], inputs: list[Described]) -> Any:
        kind, what = found
        if kind is Tensor:
            self.results.append(what)
            return self.fake(what)
        if kind is int:  # the operator writes to this argument and returns it
            self.results.append(inputs[what])
            return tensors[what]
        self.results.append(what)
        return kind([item and self.fake(item) for item in what])

    def _new(
        self, key: Any, inputs: list[Described], func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        answer = self.seen.keep(key, answer_of(result, tensors, inputs))
        if isinstance(result, Tensor):
            described = self.seen.one(_described([result])[0])
            result._fxckpt_described = described  # type: ignore[attr-defined]
            self.results.append(described)
            return result
        if answer is None:
            raise _Differs(f"{func} returns something else than new tensors")
        for item, one in zip(result, answer[1], strict=True):
            if item is not None:
                item._fxckpt_described = one
        self.results.append(answer[1])
        return result


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two calls have the same arguments but for numbers."""
    if one == other:
        return True
    if len(one) != len(other):
        return False
    return all(
        a is b or (a.__class__ is b.__class__ and (a == b or a.__class__ in (int, float)))
        for a, b in zip(one, other, strict=True)
    )
