from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt.errors import CaptureError
from fxckpt.state import (
    ModuleState,
    contains_tensor,
    find_tensors,
    has_hooks,
    silent_hooks,
    storage_bytes,
    unchanged,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))
        self.table = torch.ones(2)
        self.tables = [torch.ones(1), "text"]
        self.by_name = {"a": torch.ones(1)}
        self.count = 0
        self.names = ["x"]
        self.generator = torch.Generator()


def test_each_tensor_once_with_all_its_places() -> None:
    model = Net()
    state = ModuleState.collect(model)
    found = {held.name: (held.kind, len(held.places)) for held in state.tensors}
    assert found == {
        "embed.weight": ("parameter", 2),
        "seen": ("buffer", 1),
        "table": ("attribute", 1),
        "tables.0": ("attribute", 1),
        "by_name.a": ("attribute", 1),
    }
    assert [path for path, _ in state.modules] == ["", "embed", "head"]


def test_a_tensor_of_another_class_is_refused_by_name() -> None:
    class Marked(Tensor):
        pass

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].mark = torch.ones(2).as_subclass(Marked)
    with pytest.raises(CaptureError, match="Marked") as caught:
        ModuleState.collect(model)
    assert caught.value.module == "0"


def _facts(model: nn.Module) -> list[Any]:
    return [(path, {key: id(value) for key, value in vars(m).items()}) for path, m in model.named_modules()]


def test_swapped_puts_fakes_everywhere_and_takes_them_back() -> None:
    model = Net()
    state = ModuleState.collect(model)
    before, weight, facts = dict(model.state_dict()), model.head.weight, _facts(model)
    fakes: list[Tensor] = [
        nn.Parameter(held.tensor.detach() + 1) if held.kind == "parameter" else held.tensor + 1
        for held in state.tensors
    ]
    assigned: list[tuple[str, str, Any]] = []
    with state.swapped(fakes, assigned):
        assert model.head.weight is model.embed.weight is fakes[0]
        assert model.tables[0] is fakes[3]
        assert model.by_name["a"] is fakes[4]
        model.seen = loss = torch.full((2,), 9.0)
        model.head.new = 3
        model.count += 1
    assert assigned == [("", "seen", loss), ("", "count", 1), ("head", "new", 3)]
    assert model.head.weight is model.embed.weight is weight
    assert all(value is before[name] or torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (_facts(model), model.tables[0].item(), model.count) == (facts, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.names.append("y"),
        lambda m: m.names.__setitem__(0, "y"),
        lambda m: m.by_name.update(b=1),
        lambda m: m.tables.__setitem__(0, torch.zeros(1)),
        lambda m: m.add_module("more", nn.ReLU()),
    ],
)
def test_containers_that_forward_changes_are_refused_and_restored(change: Any) -> None:
    model = Net()
    state = ModuleState.collect(model)
    with pytest.raises(CaptureError, match="in place"), state.swapped([h.tensor for h in state.tensors], []):
        change(model)
    assert (model.names, list(model.by_name), model.tables[0].item()) == (["x"], ["a"], 1)
    assert list(model._modules) == ["embed", "head"]


def test_swapped_restores_after_an_error() -> None:
    model = Net()
    facts, state = _facts(model), ModuleState.collect(model)

    def fails() -> None:
        model.count = 5
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), state.swapped([held.tensor + 0 for held in state.tensors], []):
        fails()
    assert _facts(model) == facts


def test_unchanged_takes_everything_back() -> None:
    model = Net()
    facts, version = _facts(model), model.seen._version
    drawn = [random.random(), torch.rand(1).item(), torch.rand(1, generator=model.generator).item()]
    random.seed(1)
    torch.manual_seed(1)
    model.generator.manual_seed(1)
    expected = [random.random(), torch.rand(1).item(), torch.rand(1, generator=model.generator).item()]
    random.seed(1)
    torch.manual_seed(1)
    model.generator.manual_seed(1)

    def fails() -> None:
        random.random(), torch.rand(5), torch.rand(5, generator=model.generator)
        model.count, model.extra = 7, 1
        model.names.append("y")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), unchanged(model):
        fails()
    assert _facts(model) == facts
    assert (model.names, model.count) == (["x"], 0)
    assert model.seen._version == version  # a write would trip autograd
    after = [random.random(), torch.rand(1).item(), torch.rand(1, generator=model.generator).item()]
    assert after == expected != drawn
    with unchanged(model):
        model.seen.add_(1)
    assert model.seen.tolist() == [0, 0]


@dataclass
class Record:
    value: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def test_tensors_are_found_through_containers_and_objects() -> None:
    tensors = [torch.ones(1) for _ in range(5)]
    shared = {"a": tensors[0], "b": (tensors[1], [tensors[0]])}
    value = [shared, Record(tensors[2]), SimpleNamespace(x=Slotted(tensors[3])), {tensors[4]}, "text", nn.Linear(1, 1)]
    value.append(value)  # a cycle
    found = find_tensors(value)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in tensors}
    assert len(found) == 5
    assert contains_tensor(value)
    assert not contains_tensor([1, "text", Record(2), nn.Linear(1, 1)])


def test_storages_count_once() -> None:
    x = torch.ones(4, 4)
    assert storage_bytes([x, x.t(), x[0], torch.ones(2), None, "text", torch.eye(2).to_sparse()]) == 64 + 8


def test_hooks_are_silent_for_a_while_and_still_counted() -> None:
    model, fired = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    nn.utils.spectral_norm(model[0])
    model[1].register_forward_hook(lambda *_: fired.append("forward"))
    model[1].register_forward_pre_hook(lambda module, args, kwargs: fired.append("before"), with_kwargs=True)
    before, vector = dict(model[1]._forward_hooks), model[0].weight_u.clone()
    with silent_hooks(model):
        assert (has_hooks(model[0]), has_hooks(model[1])) == (False, True)
        model(torch.ones(1, 2))
    assert fired == []
    assert not torch.equal(model[0].weight_u, vector)  # those of torch run
    assert dict(model[1]._forward_hooks) == before
    model(torch.ones(1, 2))
    assert fired == ["before", "forward"]
