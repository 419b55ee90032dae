"""Results of the most frequent operators by arithmetic: what a fake kernel says too, at a hundredth of the time.

Only where strides leave no doubt: inputs that fill their storages, in the same order of dimensions. Everything else
gets no answer here. ``tests/test_resize.py`` compares with the fake kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxckpt.tape import Described, Result

__all__ = ["Answer", "Seen", "quick_result"]

aten = torch.ops.aten
Rule = Callable[[tuple[Any, ...], tuple[Described, ...]], Result | None]
Answer = tuple[type, Any]
"""Class of the result with its descriptions; or ``int`` and which argument the operator writes to and returns."""


class Seen:
    """What operators made of their arguments.

    Attributes:
        answers: by operator, plain arguments and identity of the descriptions of its tensors.
        descriptions: one object for each description; it lives as long as keys have its identity.
    """

    def __init__(self) -> None:
        self.answers: dict[Any, Answer] = {}
        self.descriptions: dict[Described, Described] = {}

    def one(self, described: Described) -> Described:
        """The object for this description."""
        return self.descriptions.setdefault(described, described)

    def keep(self, key: Any, answer: Answer | None) -> Answer | None:
        """Remember ``answer``, if there is one."""
        if answer is None:
            return None
        kind, what = answer
        if kind is Tensor:
            what = self.one(what)
        elif kind is not int:
            what = tuple(one and self.one(one) for one in what)
        self.answers[key] = kind, what
        return self.answers[key]

    def clear(self) -> None:
        """Forget everything."""
        self.answers.clear()
        self.descriptions.clear()


# Elementwise, with a result of the type of their inputs.
_LIKE = frozenset({
    "add", "sub", "mul", "relu", "gelu", "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward", "sigmoid",
    "sigmoid_backward", "threshold_backward", "neg", "exp", "rsqrt", "clone", "hardtanh", "hardtanh_backward",
    "hardswish", "hardswish_backward", "leaky_relu", "leaky_relu_backward", "elu", "sqrt", "cos", "sin",
})  # fmt: skip
_IN_PLACE = frozenset({"relu_", "add_", "mul_", "sub_", "div_", "hardtanh_", "hardswish_", "silu_", "leaky_relu_"})


def quick_result(func: Any, plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Answer | None:
    """What the operator returns for inputs of these sizes, None if only its kernel can tell.

    Args:
        func: the operator.
        plain: its arguments as :func:`fxckpt.tape.take_apart` gives them.
        inputs: its tensors.
    """
    if not inputs or func.namespace != "aten":
        return None
    name = func._overloadpacket.__name__
    rule = _RULES.get(name)
    if rule is not None:
        result = rule(plain, inputs)
        return None if result is None else (Tensor if isinstance(result, Described) else tuple, result)
    if name in _LIKE and _all_like(inputs) and (name != "clone" or len(plain) == 1):
        return Tensor, _alone(inputs[0])
    if name in _IN_PLACE and _all_like(inputs):
        return int, 0
    return None


def _all_like(inputs: tuple[Described, ...]) -> bool:
    """Whether all have the same floating type and lie in memory alike, without gaps."""
    first = inputs[0]
    same = all(other[:4] == first[:4] for other in inputs[1:])
    return same and first.dtype.is_floating_point and _fills(first)


def _fills(one: Described) -> bool:
    return one.is_dense and 0 not in (*one.shape, *one.stride)


def _alone(like: Described) -> Described:
    return like._replace(storage_bytes=like.least_bytes)


def _contiguous(like: Described, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Described:
    """A contiguous tensor of its own."""
    dtype = dtype or like.dtype
    return Described(shape, _steps(shape), dtype, like.device, math.prod(shape) * dtype.itemsize)


def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _is_contiguous(one: Described) -> bool:
    return one.stride == _steps(one.shape) and 0 not in one.shape


def _view(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    source, shape = inputs[0], list(plain[3:])
    if not _is_contiguous(source):
        return None
    if -1 in shape:
        rest = -math.prod(shape)
        if rest <= 0:
            return None
        shape[shape.index(-1)] = math.prod(source.shape) // rest
    if math.prod(shape) != math.prod(source.shape) or min(shape, default=1) < 0:
        return None
    return source._replace(shape=tuple(shape), stride=_steps(tuple(shape)))


def _same(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    return inputs[0]


def _slice(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    source = inputs[0]
    given = list(plain[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    if not source.shape or 0 in source.shape:
        return None
    size = source.shape[dim]
    places = range(*slice(start, end, step).indices(size))
    if not places or dim < 0:
        return None
    shape = (*source.shape[:dim], len(places), *source.shape[dim + 1 :])
    stride = (*source.stride[:dim], source.stride[dim] * (step or 1), *source.stride[dim + 1 :])
    return source._replace(shape=shape, stride=stride)


def _permuted(order: Callable[[int, tuple[Any, ...]], list[int]]) -> Rule:
    """Rule of a view with its dimensions in another order."""

    def rule(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
        source = inputs[0]
        places = order(len(source.shape), plain)
        shape, stride = tuple(source.shape[i] for i in places), tuple(source.stride[i] for i in places)
        return source._replace(shape=shape, stride=stride)

    return rule


def _swapped(count: int, plain: tuple[Any, ...]) -> list[int]:
    places, (one, other) = list(range(count)), plain[1:3]
    places[one], places[other] = places[other], places[one]
    return places


def _product(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    left, right = inputs[-2:]
    return _contiguous(left, (left.shape[0], right.shape[1]))


def _first_contiguous(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    """One type throughout: the result may be asked for in another one."""
    same = all(_is_contiguous(one) and one.dtype is inputs[0].dtype for one in inputs)
    asked = [value for value in plain if isinstance(value, torch.dtype) and value is not inputs[0].dtype]
    return _alone(inputs[0]) if same and not asked and plain[-1] is not True else None


def _nll_loss(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    """Without weights, reduced to a number."""
    scores = inputs[0]
    if plain[2] is not None or plain[3] == 0 or len(scores.shape) != 2:
        return None
    return _contiguous(scores, ()), _contiguous(scores, ())


def _nll_loss_backward(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    scores = inputs[1]
    return _alone(scores) if plain[3] is None and len(scores.shape) == 2 and _is_contiguous(scores) else None


def _layer_norm(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    x, count = inputs[0], plain[2]
    if not _is_contiguous(x) or any(other.dtype is not torch.float32 for other in inputs):
        return None
    outer = x.shape[: len(x.shape) - count]
    statistics = _contiguous(x, (*outer, *([1] * count)))
    return _alone(x), statistics, statistics


def _layer_norm_backward(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    x = inputs[1]
    if len(inputs) != 6 or plain[-6:] != (bool, True) * 3 or not all(map(_is_contiguous, inputs)):
        return None
    if any(other.dtype is not torch.float32 for other in inputs):
        return None
    return _alone(x), _alone(inputs[4]), _alone(inputs[5])


def _batch_norm(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    """Training mode; plain ends with ``bool, training, float, momentum, float, eps``."""
    x = inputs[0]
    if plain[-6:-4] != (bool, True) or not _fills(x) or x.dtype not in (torch.float32, torch.float64):
        return None
    if not _is_contiguous(x):
        return None
    statistics = _contiguous(x, (x.shape[1],))
    return _alone(x), statistics, statistics


def _batch_norm_backward(plain: tuple[Any, ...], inputs: tuple[Described, ...]) -> Result | None:
    gradient, x = inputs[:2]
    if plain[-6:] != (bool, True) * 3 or Tensor not in plain[2:3] or x.dtype not in (torch.float32, torch.float64):
        return None
    if not (_is_contiguous(x) and gradient[:3] == x[:3]):
        return None
    channels = _contiguous(x, (x.shape[1],))
    return _alone(x), channels, channels


_RULES: dict[str, Rule] = {
    "view": _view,
    "_unsafe_view": _view,
    "detach": _same,
    "alias": _same,
    "slice": _slice,
    "transpose": _permuted(_swapped),
    "t": _permuted(lambda count, plain: list(range(count))[::-1]),
    "permute": _permuted(lambda count, plain: [place % count for place in plain[3:]]),
    "_softmax": _first_contiguous,
    "_log_softmax": _first_contiguous,
    "_safe_softmax": _first_contiguous,
    "_softmax_backward_data": _first_contiguous,
    "_log_softmax_backward_data": _first_contiguous,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "mm": _product,
    "addmm": _product,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
}
