"""The quick check accepts what the signature calls the same, and never what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt import auto_checkpoint
from fxckpt.guard import Guard
from fxckpt.signature import read_call
from tests import test_signature


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("same", self.steps)
        self.scale, self.sizes, self.config = 1, [1, [2]], SimpleNamespace(depth=2, name="a")


X = torch.ones(2, 4)


def _accepts(guard: Guard, *args: Any, **kwargs: Any) -> bool:
    return guard.leaves(args or (X,), kwargs) is not None


def test_the_same_kind_of_call_gets_its_leaves() -> None:
    model = Net()
    guard = Guard(model, (X, {"n": 3}), {})
    other = torch.zeros(2, 4)
    leaves = guard.leaves((other, {"n": 3}), {})
    assert leaves is not None
    assert (leaves[0] is other, leaves[1]) == (True, 3)
    model.load_state_dict(model.state_dict())
    assert _accepts(guard, X, {"n": 3})


CHANGES = {
    **{name: change for name, change in test_signature.CHANGES.items() if name not in ("a flag of another type",)},
    "a nested list changed in place": lambda m: m.sizes[1].append(3),
    "channels last": lambda m: setattr(m.first.weight, "data", m.first.weight.data.t()),
    "one of two buffers that were one": lambda m: setattr(m, "steps", m.steps.clone()),
    "the other of two buffers that were one": lambda m: setattr(m, "same", m.steps.clone()),
    "gradients": lambda m: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
}
for _name in ("a tensor attribute of another shape", "a list with a value of another type"):
    del CHANGES[_name]  # the first makes a guard unusable, see below; equal numbers of two types are taken as one


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_the_signature_sees_are_refused(change: str) -> None:
    model = Net()
    guard, key = Guard(model, (X,), {}), read_call(model, (X,), {}).key
    assert _accepts(guard)
    CHANGES[change](model)
    assert read_call(model, (X,), {}).key != key
    assert not _accepts(guard)


def test_inputs_of_other_kinds_are_refused() -> None:
    model = Net()
    names = list(test_signature.INPUTS)
    keys = {name: read_call(model, *test_signature.INPUTS[name]).key for name in names}
    for known in names:
        guard = Guard(model, *test_signature.INPUTS[known])
        for name in names:
            accepted = guard.leaves(*test_signature.INPUTS[name]) is not None
            assert not accepted or keys[name] == keys[known], (known, name)
            assert accepted or name != known or not guard.usable


def test_no_grad_and_autocast_are_noticed() -> None:
    guard = Guard(Net(), (X,), {})
    with torch.no_grad():
        assert not _accepts(guard)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not _accepts(guard)
    assert _accepts(guard)


def test_a_tensor_attribute_leaves_the_decision_to_the_signature() -> None:
    model = Net()
    model.table = torch.ones(2)
    assert not _accepts(Guard(model, (X,), {}))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + 10 * y + 100 * z) * self.weight


def test_which_inputs_are_one_tensor_matters() -> None:
    model, a, b = Three(), torch.ones(2), torch.full((2,), 2.0)
    planned = auto_checkpoint(model, a, a, b, strategy="none")
    for args in ((a, a, b), (a, b, b), (b, a, b), (a, b, a.clone()), (a, a, a)):
        assert torch.equal(planned(*args), model(*args))
