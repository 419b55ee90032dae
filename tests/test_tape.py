"""Calls taken apart and put together again, and descriptions of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxckpt.recorder import TapeRecorder
from fxckpt.tape import describe, put_in, take_apart

aten = torch.ops.aten
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("x", [2, 3]), {}),
    ((["x", "x"], -1), {}),
    (("x", 0.5, True, None), {"dtype": torch.float16, "generator": None}),
    (("x", [None, "x"], [], 1), {"alpha": 2.0, "layout": torch.strided}),
]


def _with(value: Any, stand_in: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_with(item, stand_in) for item in value)
    return stand_in if isinstance(value, str) else value


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS)
def test_arguments_come_back(args: Any, kwargs: dict[str, Any]) -> None:
    node = fx.Graph().placeholder("x")
    found: list[Any] = []
    plain = take_apart(_with(args, node), kwargs, fx.Node, found)
    hash(plain)
    tensors: list[Any] = []
    assert take_apart(_with(args, torch.ones(1)), kwargs, Tensor, tensors) == plain
    assert len(found) == len(tensors)
    again, named = put_in(_with(args, node), kwargs, plain)
    assert (again, named) == (_with(args, node), {k: v for k, v in kwargs.items() if v is not None})


def test_other_numbers_are_put_in() -> None:
    node = fx.Graph().placeholder("x")
    plain = take_apart((node, [4, 5], 0.25, False), {"alpha": 3}, fx.Node, [])
    assert put_in((node, [2, 3], 0.5, True), {"alpha": 1}, plain) == ((node, [4, 5], 0.25, False), {"alpha": 3})


def test_integers_floats_and_truth_values_differ() -> None:
    taken = {take_apart((value,), {}, Tensor, []) for value in (1, 1.0, True)}
    assert len(taken) == 3


def test_a_tape_tells_who_reads_whom() -> None:
    recorder = TapeRecorder()
    x, constant = torch.randn(4, 6), torch.ones(6)
    recorder.number([x])
    with recorder:
        one, two = (x.t().contiguous().t() + constant).split(2)
        y = one.add_(two) * constant
    recorder.finish([y, None])
    tape = recorder.tape
    names = [call.func._overloadpacket.__name__ for call in tape.calls]
    assert names == ["t", "clone", "t", "add", "split", "add_", "mul"]
    assert [call.reads for call in tape.calls] == [(0,), (1,), (2,), (3, -1), (4,), (5, 6), (7, -1)]
    assert tape.results == (8, None)
    assert recorder.constants == [constant]


@pytest.mark.parametrize(
    ("tensor", "least", "dense"),
    [
        (torch.ones(2, 3), 24, True),
        (torch.ones(2, 3).t(), 24, True),
        (torch.ones(4, 6)[:, :3], 84, False),
        (torch.ones(1).expand(5), 4, False),
        (torch.ones(0, 3), 0, True),
        (torch.ones(3, 1, 2, dtype=torch.float16), 12, True),
    ],
)
def test_descriptions(tensor: Tensor, least: int, dense: bool) -> None:
    described = describe(tensor)
    assert described[:4] == (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    assert described.storage_bytes == tensor.untyped_storage().nbytes()
    assert (described.least_bytes, described.is_dense) == (least, dense)
