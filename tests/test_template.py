from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fxckpt.template import Template

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    """Unknown to pytree."""

    loss: Tensor
    parts: list[Tensor]
    name: str


FAKES = [torch.zeros(1), torch.zeros(2)]
PLACES = {id(fake): index for index, fake in enumerate(FAKES)}
REAL = [torch.ones(1), torch.ones(2)]


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: b,
        lambda a, b: (a, [b, a], {"x": b, "n": 3, "none": None}),
        lambda a, b: OrderedDict(z=a, a=b),
        lambda a, b: Pair(b, (a,)),
        lambda a, b: [],
        lambda a, b: "text",
    ],
)
def test_the_structure_is_the_same_around_other_tensors(make: Any) -> None:
    filled = Template(make(*FAKES), PLACES).fill(REAL)
    assert _flat(filled) == _flat(make(*REAL))


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(key, _flat(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_flat(item) for item in value]
    return id(value) if isinstance(value, Tensor) else value


def test_objects_that_pytree_does_not_know_are_made_anew() -> None:
    fake = Output(FAKES[0], [FAKES[1]], "x")
    template = Template({"out": fake}, PLACES)
    first, second = template.fill(REAL)["out"], template.fill(REAL)["out"]
    assert type(first) is Output
    assert (first.loss is REAL[0], first.parts[0] is REAL[1], first.name) == (True, True, "x")
    assert first is not second
    assert first.parts is not second.parts
    assert fake.loss is FAKES[0]


def test_filled_containers_are_fresh() -> None:
    template = Template([FAKES[0]], PLACES)
    first = template.fill(REAL)
    first.append("changed by the caller")
    assert len(template.fill(REAL)) == 1
