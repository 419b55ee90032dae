from __future__ import annotations

import contextvars
import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxckpt import auto_checkpoint
from fxckpt.errors import CaptureError
from fxckpt.joint import Trace
from fxckpt.passes.capture import capture
from tests import harness

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.steps += 1
        hidden = self.first(x).relu()
        return {"out": self.second(hidden) * scale, "hidden": hidden, "n": 3}


def _targets(trace: Trace, tags: dict[str, int]) -> list[Any]:
    return [node.target for node in trace.graph_module.graph.nodes if node.name in tags and node.op == "call_function"]


def test_inputs_output_and_phases() -> None:
    trace = capture(Net(), (torch.ones(3, 4),), {"scale": 2.0})
    assert [(entry.kind, entry.name, entry.requires_grad) for entry in trace.inputs] == [
        ("parameter", "first.weight", True),
        ("parameter", "first.bias", True),
        ("parameter", "second.weight", True),
        ("parameter", "second.bias", True),
        ("buffer", "steps", False),
        ("argument", "0", False),
    ]
    assert trace.output["n"] == 3
    assert trace.output["out"] is trace.outputs[0]
    assert [tuple(tensor.shape) for tensor in trace.outputs] == [(3, 2), (3, 4)]
    assert all(edge is not None for edge in trace.output_edges)
    forward = _targets(trace, trace.forward_tag)
    assert [forward.count(op) for op in (aten.add_.Tensor, aten.addmm.default, aten.relu.default)] == [1, 2, 1]
    backward = _targets(trace, trace.backward_tag)
    assert aten.threshold_backward.default in backward
    assert aten.addmm.default not in backward
    assert not trace.forward_tag.keys() & trace.backward_tag.keys()


def test_backward_nodes_belong_to_the_autograd_node_that_ran() -> None:
    trace = capture(Net(), (torch.ones(3, 4),), {})
    names = {record.index: record.name for record in trace.records}
    nodes = {node.name: node for node in trace.graph_module.graph.nodes}
    owner = {nodes[name].target: names[index] for name, index in trace.backward_tag.items() if name in nodes}
    assert owner[aten.threshold_backward.default] == "ReluBackward0"
    assert owner[aten.mm.default] == "AddmmBackward0"
    assert [record.name for record in trace.records if "Accumulate" not in record.name] == [
        "MulBackward0", "AddmmBackward0", "TBackward0", "ReluBackward0", "AddmmBackward0", "TBackward0",
    ]  # fmt: skip
    relu = next(record for record in trace.records if record.name == "ReluBackward0")
    assert len(relu.contributions) == 1
    tags = {nodes[name].target: tag for name, tag in trace.forward_tag.items() if name in nodes}
    assert tags[aten.relu.default] == relu.sequence + 1


def test_nodes_know_module_and_line() -> None:
    trace = capture(Net(), (torch.ones(3, 4),), {})
    nodes = {node.name: node for node in trace.graph_module.graph.nodes}
    source, first = inspect.getsourcelines(Net.forward)
    line = first + next(index for index, text in enumerate(source) if "relu" in text)
    places = [trace.places[name] for name, node in nodes.items() if node.target is aten.relu.default]
    assert places == [("", f"{__file__}:{line}")]
    modules = [trace.places[name][0] for name, node in nodes.items() if node.target is aten.addmm.default]
    assert modules == ["first", "second"]


def test_model_and_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Net())
    before = harness.freeze(model.state_dict())
    entries = [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]
    x = torch.randn(3, 4)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    capture(model, (x,), {})
    assert list(harness.differences(before, harness.freeze(model.state_dict()))) == []
    assert [{key: id(value) for key, value in vars(module).items()} for module in model.modules()] == entries
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
    assert all(parameter.grad is None for parameter in model.parameters())


class Odd(nn.Module):
    """Runs a piece of trouble in a submodule."""

    def __init__(self, trouble: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = _Inner(trouble)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class _Inner(nn.Module):
    def __init__(self, trouble: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.trouble, self.count = nn.Linear(4, 4), trouble, 0

    def forward(self, x: Tensor) -> Any:
        return self.trouble(self, self.layer(x))


def _branch(module: Any, h: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def _item(module: Any, h: Tensor) -> Tensor:
    return h * h.max().item()


def _hook(module: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def _retain(module: Any, h: Tensor) -> Tensor:
    h.retain_grad()
    return h


def _backward(module: Any, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)
    return h


def _python_random(module: Any, h: Tensor) -> Tensor:
    return h * random.random()


def _numpy_random(module: Any, h: Tensor) -> Tensor:
    return h * float(numpy.random.rand())


def _counter(module: Any, h: Tensor) -> Tensor:
    module.count += 1
    return h


TROUBLE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "branch": (_branch, "inner"),
    "item": (_item, "inner"),
    "hook": (_hook, "inner"),
    "retain_grad": (_retain, "inner"),
    "backward": (_backward, "inner"),
    "Python or NumPy": (_python_random, ""),
    "Python or NumPy random": (_numpy_random, ""),
    "attribute 'count'": (_counter, "inner"),
    "nothing requires grad": (lambda module, h: h.detach(), ""),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_what_cannot_be_followed_is_refused_with_module_and_reason(name: str) -> None:
    trouble, module = TROUBLE[name]
    model = Odd(trouble)
    weight, state = model.inner.layer.weight, random.getstate()
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(2, 4),), {})
    error = caught.value
    assert error.module == module
    if name not in ("branch", "item"):
        assert name in error.reason
    if module and name != "attribute 'count'":
        source, first = inspect.getsourcelines(trouble)
        path, _, line = error.source.rpartition(":")
        assert path == __file__
        assert first <= int(line) < first + len(source)
        assert error.source in str(error)
    assert model.inner.layer.weight is weight
    assert (model.inner.count, weight.grad, random.getstate()) == (0, None, state)
    assert isinstance(model(torch.randn(2, 4)), Tensor)  # still usable


def test_hooks_on_submodules_are_refused_but_not_those_of_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.utils.parametrizations.weight_norm(model[0])
    model.register_forward_hook(lambda *_: None)  # runs outside of the graph
    capture(model, (torch.ones(2, 4),), {})
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks") as caught:
        capture(model, (torch.ones(2, 4),), {})
    assert caught.value.module == "1"


def test_an_input_of_an_unknown_class_is_refused() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Opens(nn.Linear):
        def forward(self, box: Any) -> Tensor:
            return functional.linear(box.value, self.weight)

    with pytest.raises(CaptureError, match="Box"):
        capture(Opens(4, 4), (Box(torch.ones(2, 4)),), {})


def test_attributes_that_hold_new_tensors_are_recorded() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.aux = (out.square().mean(), "text")
            return out

    model = Keeps(4, 4)
    trace = capture(model, (torch.ones(2, 4),), {})
    ((path, name, (loss, text)),) = trace.assigned
    assert (path, name, text, loss.shape) == ("", "aux", "text", torch.Size([]))
    assert len(trace.outputs) == 2
    assert not hasattr(model, "aux")


class Memory:
    """Collects what passes by, like a key/value cache."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.count = 0


class Remembers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.memory = nn.Linear(2, 2), how, Memory()

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "list":
            memory.append(y)
        elif self.how == "dict":
            memory.pop("x", None)
        elif self.how == "object":
            memory.layers.append(y)
        elif self.how == "attribute":
            self.memory.count += 1
        return y


@pytest.mark.parametrize(
    ("how", "memory", "says"),
    [
        ("list", [], "container"),
        ("dict", {"x": 1}, "container"),
        ("object", Memory(), "an input, a Memory"),
        ("attribute", None, "attribute 'memory'"),
    ],
)
def test_what_forward_does_to_objects_is_refused_and_undone(how: str, memory: Any, says: str) -> None:
    module = Remembers(how)
    with pytest.raises(CaptureError, match=says):
        capture(module, (torch.ones(2, 2),), {"memory": memory})
    assert memory == {"x": 1} if how == "dict" else not getattr(memory, "layers", memory)
    assert module.memory.count == 0


def test_what_a_failed_trace_did_to_objects_is_undone() -> None:
    class Fails(Remembers):
        def forward(self, x: Tensor, memory: Any = None) -> Tensor:
            super().forward(x, memory)
            return x * float(x.sum())

    memory = Memory()
    with pytest.raises(CaptureError, match="test_capture"):
        capture(Fails("object"), (torch.ones(2, 2),), {"memory": memory})
    assert memory.layers == []


def test_a_collector_in_a_context_variable_gets_no_fakes() -> None:
    collector: contextvars.ContextVar[Any] = contextvars.ContextVar("collector", default=None)

    class Collects(Remembers):
        def forward(self, x: Tensor, memory: Any = None) -> Tensor:
            y = super().forward(x)
            if collector.get() is not None:
                collector.get().append(y)
            return y

    capture(Collects(""), (torch.ones(2, 2),), {})
    found: list[Tensor] = []
    token = collector.set(found)
    with pytest.raises(CaptureError, match="context variable 'collector'"):
        capture(Collects(""), (torch.ones(2, 2),), {})
    collector.reset(token)
    assert found == []


def test_hooks_of_a_library_that_only_collects_are_traced() -> None:
    class Installs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            found: list[Tensor] = []

            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                found.append(output)

            hook.__module__ = "transformers.utils.output_capturing"
            handle = self.linear.register_forward_hook(hook)
            if not hasattr(self, "_output_capturing_hooks_installed"):
                self._output_capturing_hooks_installed = True
            else:
                handle.remove()
            return {"y": self.linear(x), "found": found}

    module = Installs()
    trace = capture(module, (torch.ones(2, 2),), {})
    assert len(trace.output["found"]) == 1
    assert not module.linear._forward_hooks
    module(torch.ones(2, 2))
    assert module.linear._forward_hooks
    capture(module, (torch.ones(2, 2),), {})


def test_objects_that_forward_only_reads_are_fine() -> None:
    capture(Remembers(""), (torch.ones(2, 2),), {"memory": Memory()})


class Settling(nn.Module):
    """Finds out at its first call what kind of model it is; ``how`` says where it remembers that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.kind, self.memory = nn.Linear(2, 2), how, None, Memory()
        self.memory.kind = None  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        place: Any = self if "attribute" in self.how else self.memory
        first, again = place.kind is None, "again" in self.how
        if first or again:
            place.kind = x.shape[0] if not again else (0 if first else place.kind + 1)
        return self.linear(x) * (2 if first and "steers" in self.how else 1)


@pytest.mark.parametrize("how", ["attribute", "object"])
def test_what_forward_settles_once_and_for_all_stays(how: str) -> None:
    model = Settling(how)
    assert len(capture(model, (torch.ones(3, 2),), {}).tape.calls) > 3
    assert (model if how == "attribute" else model.memory).kind == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["attribute steers", "object steers", "attribute again", "object again"])
def test_what_steers_forward_or_changes_again_is_refused_and_undone(how: str) -> None:
    model = Settling(how)
    before = dict(vars(model.memory))
    with pytest.raises(CaptureError, match="forward changes attribute"):
        capture(model, (torch.ones(3, 2),), {})
    assert model.kind is None
    assert vars(model.memory) == before


@pytest.mark.parametrize("how", ["attribute", "object", "attribute steers", "object again"])
def test_a_model_that_settles_trains_as_in_eager(how: str) -> None:
    torch.manual_seed(0)
    plain = Settling(how)
    planned = auto_checkpoint(copy.deepcopy(plain), strategy="sqrtn")
    for size in (3, 3, 5):
        x = torch.randn(size, 2)
        for model in (plain, planned):
            model.zero_grad()
        results = [model(x) for model in (plain, planned)]
        for result in results:
            result.sum().backward()
        assert torch.equal(*results)
        assert torch.equal(plain.linear.weight.grad, planned.linear.weight.grad)  # type: ignore[arg-type, union-attr]
        assert (plain.kind, plain.memory.kind) == (planned.kind, planned.memory.kind)  # type: ignore[attr-defined, union-attr]
