"""Calls that may share a plan have equal keys, and no others do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt.signature import Call, read_call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.register_buffer("steps", torch.zeros(3))
        self.scale, self.sizes, self.config = 1, [1, 2], SimpleNamespace(depth=2, name="a")
        self.table = torch.ones(2)


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Call:
    return read_call(model, args or (torch.ones(2, 4),), kwargs)


def _ignore(module: nn.Module, args: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Any], object]] = {
    "eval mode of a part": lambda m: m.second[1].eval(),
    "a frozen parameter": lambda m: m.first.weight.requires_grad_(False),
    "another parameter": lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight.detach().clone())),
    "no bias": lambda m: setattr(m.first, "bias", None),
    "a parameter of another type": lambda m: m.first.to(torch.float64),
    "a longer buffer": lambda m: setattr(m, "steps", torch.zeros(4)),
    "a flag": lambda m: setattr(m, "scale", 2),
    "a flag of another type": lambda m: setattr(m, "scale", 1.0),
    "a new attribute": lambda m: setattr(m, "extra", None),
    "a list changed in place": lambda m: m.sizes.append(3),
    "a list with a value of another type": lambda m: m.sizes.__setitem__(0, 1.0),
    "an entry of a config object": lambda m: setattr(m.config, "depth", 3),
    "another config object": lambda m: setattr(m, "config", SimpleNamespace(depth=2, name="a")),
    "a tensor attribute of another shape": lambda m: setattr(m, "table", torch.ones(3)),
    "another activation": lambda m: m.second.__setitem__(1, nn.ReLU()),
    "one more layer": lambda m: m.second.append(nn.ReLU()),
    "a shared layer": lambda m: setattr(m, "first", m.second[0]),
    "a hook": lambda m: m.first.register_forward_pre_hook(_ignore),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_model_are_noticed(change: str) -> None:
    model = Net()
    before = _call(model)
    CHANGES[change](model)
    after = _call(model)
    assert after.structure != before.structure
    assert after.key != before.key


def test_values_make_no_difference() -> None:
    model = Net()
    before = _call(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), model.steps, model.table]:
            tensor.add_(1)
    model.load_state_dict(Net().state_dict())
    model.steps = torch.full((3,), 7.0)
    after = _call(model, torch.randn(2, 4))
    assert (after.key, hash(after.key)) == (before.key, hash(before.key))


PLAIN = torch.ones(2, 4)
INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "as before": ((PLAIN,), {}),
    "by keyword": ((), {"x": PLAIN}),
    "in a list": (([PLAIN],), {}),
    "two": ((PLAIN, PLAIN.clone()), {}),
    "the same one twice": ((PLAIN, PLAIN), {}),
    "shape": ((torch.ones(3, 4),), {}),
    "strides": ((torch.ones(4, 2).t(),), {}),
    "type": ((torch.ones(2, 4, dtype=torch.float64),), {}),
    "gradient": ((torch.ones(2, 4, requires_grad=True),), {}),
    "class": ((nn.Parameter(torch.ones(2, 4), requires_grad=False),), {}),
    "layout": ((torch.ones(2, 4).to_sparse(),), {}),
    "a number": ((PLAIN, 1), {}),
    "another number": ((PLAIN, 2), {}),
    "a float": ((PLAIN, 1.0), {}),
    "true": ((PLAIN, True), {}),
    "nothing": ((PLAIN, None), {}),
    "a string": ((PLAIN, "1"), {}),
    "a set": ((PLAIN, {1}), {}),
}


def test_every_kind_of_input_has_its_own_key() -> None:
    model = Net()
    calls = {name: read_call(model, *inputs) for name, inputs in INPUTS.items()}
    assert len({call.key for call in calls.values()}) == len(calls)
    again = {name: read_call(model, *inputs).key for name, inputs in INPUTS.items()}
    assert again == {name: call.key for name, call in calls.items()}
    assert calls["two"].leaves[0] is PLAIN


def test_autocast_is_part_of_the_key() -> None:
    model = Net()
    contexts = [
        contextlib.nullcontext(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autocast("cpu", dtype=torch.float16),
        torch.autocast("cpu", enabled=False),
    ]
    keys = []
    for context in contexts:
        with context:
            keys.append(_call(model).key)
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


def test_gradients_change_the_key_but_not_the_structure() -> None:
    model = Net()
    before = _call(model)
    model.first(torch.ones(1, 4)).sum().backward()
    some = _call(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    after = _call(model)
    assert (before.has_gradients, some.has_gradients, after.has_gradients) == (False, False, True)
    assert before.structure == after.structure
    assert before.key == some.key != after.key
