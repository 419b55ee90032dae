"""Other sizes of the inputs: had from the first trace, exactly as a new trace would have them, or traced anew."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxckpt import auto_checkpoint, get_graph_module, get_report
from fxckpt.captures import MAX_KINDS
from fxckpt.device import find_device
from fxckpt.measure import compare_steps
from fxckpt.model import planner_of
from fxckpt.passes import retrace as retrace_module
from fxckpt.pipeline import Captured, build_graph, capture_region, resize_region
from fxckpt.plan import Graph, Node, Timeline
from fxckpt.shapes import Seen
from tests import harness, models

CPU = find_device("cpu")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def repeated(args: Any, kwargs: Any, times: int) -> Inputs:
    """Inputs with ``times`` as many rows; what was one tensor stays one tensor."""
    made: dict[int, Tensor] = {}

    def repeat(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        return made.setdefault(id(leaf), torch.cat([leaf] * times).contiguous())

    result: Inputs = pytree.tree_map(repeat, (args, kwargs))
    return result


def resized_captures(planned: nn.Module) -> list[bool]:
    """Of each kind of call that was planned whether it was had from another one."""
    return [captured.resized is not None for captured, _ in planner_of(planned).captures.known.values()]


def _context(case: models.ModelCase) -> Any:
    return case.context() if case.context else contextlib.nullcontext()


def _node(node: Node) -> Node:
    """Without what is an estimate, and without the line: the call of the model is on another one here."""
    return dataclasses.replace(node, workspace_bytes=0, seconds=round(node.seconds, 12), source="")


def _used(graph: Graph) -> dict[int, int]:
    """Bytes of the storages that some node makes or that come in."""
    used = {storage for node in graph.nodes for storage in node.allocates}
    used |= {storage for node in graph.nodes if node.phase == "input" for storage in node.storages}
    return {storage: graph.storage_bytes[storage] for storage in used}


def _arguments(captured: Captured) -> list[str]:
    joint = captured.joint
    return [repr(fx.node.map_arg(joint.arguments(node), lambda source: source.name)) for node in joint.nodes]


@pytest.mark.parametrize("times", [3, 5])
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_resized_graph_is_that_of_a_new_trace(name: str, times: int) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    other = repeated(args, kwargs, times)
    with _context(case):
        first = capture_region(model, *repeated(args, kwargs, 2))
        build_graph(first, CPU, fresh_gradients=True)
        found, traced = resize_region(first, CPU, model, *other), capture_region(model, *other)
    assert found is not None
    graph, expected = build_graph(found, CPU, fresh_gradients=True), build_graph(traced, CPU, fresh_gradients=True)
    assert _arguments(found) == _arguments(traced)
    assert [*map(_node, graph.nodes)] == [*map(_node, expected.nodes)]
    assert _used(graph) == _used(expected)
    assert [slot.bytes for slot in graph.slots] == [slot.bytes for slot in expected.slots]
    assert (graph.fixed, graph.outputs, graph.forbidden) == (expected.fixed, expected.outputs, expected.forbidden)
    shapes = [found.joint.shape(node) for node in found.joint.forward if isinstance(node.meta["val"], Tensor)]
    values = [node.meta["val"] for node in traced.joint.forward]
    assert shapes == [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    timeline = Timeline((2**60,) * len(graph.nodes), 0, 0, 0, "", (), (), tuple((0, "", n.name) for n in graph.nodes))
    assert found.resized is not None
    for value, (node, other_node) in enumerate(zip(graph.nodes, expected.nodes, strict=True)):
        assert node.workspace_bytes + found.resized.extra_scratch(value, node) >= other_node.workspace_bytes, node.name
    measured = found.resized.measured(graph, timeline, 0) or graph
    for node, other_node in zip(measured.nodes, expected.nodes, strict=True):
        assert node.workspace_bytes >= other_node.workspace_bytes
        if other_node.op.startswith("aten.convolution"):
            assert node.workspace_bytes == other_node.workspace_bytes


WAYS: dict[str, Callable[..., nn.Module]] = {
    "none": lambda model, args, kwargs: auto_checkpoint(model, *args, example_kwargs=kwargs, strategy="none"),
    "sqrtn": lambda model, args, kwargs: auto_checkpoint(model, *args, example_kwargs=kwargs, strategy="sqrtn"),
    "smallest": lambda model, args, kwargs: auto_checkpoint(
        model, *args, example_kwargs=kwargs, budget_gb=1e-9, on_infeasible="best"
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_numbers_are_eagers_at_all_sizes(name: str, way: str) -> None:
    case = models.get(name)
    found: list[nn.Module] = []

    def build() -> Any:
        model, args, kwargs = case.build()
        return model, *repeated(args, kwargs, 2)

    def others() -> list[Inputs]:
        _, args, kwargs = case.build()
        return [repeated(args, kwargs, times) for times in (3, 2, 3, 4)]

    def plan(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        found.append(WAYS[way](model, args, kwargs))
        return found[0]

    differences = harness.compare(build, case.loss, make_planned=plan, extra_batches=others, context=case.context)
    assert differences == []
    assert resized_captures(found[0]) == [False, True, True]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["chain64_gelu", "gpt2", "resnet", "unet"])
def test_peaks_stay_within_the_budget_at_all_sizes(name: str) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    big = repeated(args, kwargs, 4)
    most = get_report(auto_checkpoint(model, *big[0], example_kwargs=big[1], strategy="none"))
    least = get_report(WAYS["smallest"](model, *big))
    budget = (most.peak_bytes + 2 * least.peak_bytes) // 3
    first = repeated(args, kwargs, 2)
    planned = auto_checkpoint(model, *first[0], example_kwargs=first[1], budget_gb=budget / 2**30)
    for times in (3, 4):
        other = repeated(args, kwargs, times)
        result = compare_steps(model, planned, *other, case.loss, measure=True)
        assert result.equal
        assert result.planned_peak is not None
        peak, report = result.planned_peak.total_bytes, get_report(planned)
        assert peak <= report.peak_bytes <= budget
        assert peak > 0.9 * report.peak_bytes
    assert resized_captures(planned) == [False, True, True]


class Chooses(nn.Module):
    """Does something else from five rows on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) >= 5:
            return self.two(x).relu() * len(x)
        return self.one(x).tanh() / len(x)


def test_another_way_through_the_code_is_traced_anew() -> None:
    model = Chooses()
    planned = auto_checkpoint(model, torch.randn(2, 4), strategy="none")
    for rows in (3, 5, 6, 4, 7):
        assert compare_steps(model, planned, (torch.randn(rows, 4),)).equal
    assert resized_captures(planned) == [False, True, False, True, True, True]


def test_few_kinds_of_traces_are_tried() -> None:
    class Unrolls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for row in x:
                x = x + self.linear(row)
            return x

    model = Unrolls()
    planned = auto_checkpoint(model, torch.randn(1, 4), strategy="none", max_signatures=8)
    for rows in range(2, 9):
        assert compare_steps(model, planned, (torch.randn(rows, 4),)).equal
    assert not any(resized_captures(planned))
    assert [len(kinds) for kinds in planner_of(planned).captures.forms.values()] == [MAX_KINDS]


class Writes(nn.Module):
    """In-place operators on views that gradients flow through: part of a clone, all of a view, parts of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.first.bias.clone()
        bias[2:4].zero_()
        h = nn.functional.relu(nn.functional.linear(x, self.first.weight, bias), inplace=True)
        shifted = h.new_zeros(h.shape)
        shifted[:, 1:] = self.second(h)[:, :-1]
        shifted[:, 0] = 0.5
        flat = nn.functional.dropout(self.norm(shifted + h).flatten(1), 0.5, inplace=True)
        return flat.view(h.shape).mean(1)


@pytest.mark.filterwarnings("ignore:no plan fits")
@pytest.mark.parametrize("way", sorted(WAYS))
def test_writes_into_views_are_had_from_the_first_trace(way: str) -> None:
    torch.manual_seed(0)
    model = Writes()
    planned = WAYS[way](model, (torch.randn(3, 5, 4),), {})
    for rows, length in ((4, 5), (3, 9), (6, 7)):
        assert compare_steps(model, planned, (torch.randn(rows, length, 4),)).equal
    assert resized_captures(planned) == [False, True, True, True]


class Positions(nn.Module):
    """Numbers, constants and outputs that depend on the length; an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places, self.norm = nn.Linear(4, 4), nn.Embedding(32, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        length = x.shape[1]
        mask = torch.ones(length, length).tril().log()
        h = self.linear(x) + self.places(torch.arange(length))
        h = torch.softmax(h @ h.mT / length**0.5 + mask, -1) @ h
        self.last = h.mean(1)
        return {"h": self.norm(h.mT), "length": length, "half": h[:, : length // 2].sum(1)}


def _positions_loss(output: dict[str, Any]) -> Tensor:
    loss: Tensor = output["h"].square().mean() + output["half"].sum() / output["length"]
    return loss


@pytest.mark.parametrize("grad_api", ["backward", "grad", "twice"])
@pytest.mark.parametrize("way", ["none", "sqrtn"])
def test_values_that_depend_on_a_length(way: str, grad_api: str) -> None:
    found: list[nn.Module] = []

    def plan(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        found.append(WAYS[way](model, args, kwargs))
        return found[0]

    differences = harness.compare(
        lambda: (Positions(), (torch.randn(3, 6, 4),), {}), _positions_loss, make_planned=plan, grad_api=grad_api,
        extra_batches=lambda: [((torch.randn(2, length, 4),), {}) for length in (9, 6, 13)],
        probe=lambda model: model.last.detach(),
    )  # fmt: skip
    assert differences == []
    assert resized_captures(found[0]) == [False, False, True, True]  # after the first step there is an attribute


def test_gradients_that_exist_and_losses_that_use_other_outputs() -> None:
    model = Positions()
    planned = auto_checkpoint(model, torch.randn(3, 6, 4), strategy="sqrtn")
    gradients = []
    for each in (model, planned):
        torch.manual_seed(0)
        model.norm.reset_running_stats()
        model.zero_grad()
        for length in (6, 9, 9, 11):  # the second to the fourth meet gradients
            each(torch.randn(2, length, 4))["half"].square().sum().backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert not all(gradient is None for gradient in gradients[0])


def test_double_backward_at_another_size() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    planned = auto_checkpoint(model, torch.randn(2, 3).double(), strategy="sqrtn")
    x = torch.randn(5, 3).double().requires_grad_()
    found = []
    for each in (model, planned):
        model.zero_grad()
        (force,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        force.square().sum().backward()
        found.append([force.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert resized_captures(planned) == [False, False]  # x requires grad only here
    (force,) = torch.autograd.grad(planned(x[:4]).sum(), x, create_graph=True)
    assert resized_captures(planned) == [False, False, True]
    assert torch.allclose(force[:4], found[0][0][:4])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other)


def test_inputs_that_share_memory_differently_are_traced_anew() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linear(x) + self.linear(y)

    model, rows = Adds(), torch.randn(8, 4)
    planned = auto_checkpoint(model, torch.randn(2, 4), torch.randn(2, 4), strategy="none")
    for inputs in ((torch.randn(3, 4), torch.randn(3, 4)), (rows[:4], rows[4:])):
        assert torch.equal(planned(*inputs), model(*inputs))
    assert resized_captures(planned) == [False, True, False]


def test_dropout_with_another_probability_is_traced_anew() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x), 1 / len(x), training=True)

    model = Drops()
    planned = auto_checkpoint(model, torch.randn(2, 4), strategy="sqrtn")
    assert compare_steps(model, planned, (torch.randn(4, 4),)).equal
    assert resized_captures(planned) == [False, False]


def test_a_model_is_as_it_was_after_an_attempt() -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise ValueError("too many rows")
            return self.linear(x)

    model = Limited()
    planned = auto_checkpoint(model, torch.randn(2, 4), strategy="none")
    weight, x = model.linear.weight, torch.randn(3, 4)
    state = torch.get_rng_state()
    with pytest.raises(Exception, match="too many rows"):
        planned(x)
    assert model.linear.weight is weight
    assert torch.equal(state, torch.get_rng_state())
    assert planned(torch.randn(2, 4)).requires_grad


def test_the_graph_and_report_are_of_the_new_size() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    planned = auto_checkpoint(model, torch.randn(2, 4), strategy="sqrtn")
    planned(torch.randn(7, 4)).sum().backward()
    report = get_report(planned)
    assert "7x4" in report.title
    assert {name for name, _ in report.pass_seconds} >= {"retrace", "resize", "simulate", "rewrite"}
    assert get_graph_module(planned) is planner_of(planned).outcome().entry.graph_module  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_results_by_arithmetic_and_by_meta_kernels_are_those_of_the_fake_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    ways = {"arithmetic": ("quick_result", []), "metas": ("meta_answer", []), "kernels": ("", [])}
    found: dict[str, list[Any]] = {}

    def counted(function: Any, answered: list[Any]) -> Any:
        def count(*key: Any) -> Any:
            answer = function(*key)
            answered.extend([answer] if answer is not None else [])
            return answer

        return count

    with _context(case):
        tape = capture_region(model, *repeated(args, kwargs, 2)).joint.tape
        other = repeated(args, kwargs, 3)
        functions = {source: getattr(retrace_module, source) for source in ("quick_result", "meta_answer")}
        for way, (used, answered) in ways.items():
            for source, function in functions.items():
                answer = counted(function, answered) if source == used else lambda *key: None
                monkeypatch.setattr(retrace_module, source, answer)
            sizes = retrace_module.retrace(tape, Seen(), model, *other)
            assert sizes is not None
            found[way] = sizes.results
    assert len(ways["arithmetic"][1]) > 3
    assert len(ways["metas"][1]) > 3
    for call, quick, meta, slow in zip(tape.calls, *found.values(), strict=True):
        assert _look(quick) == _look(meta) == _look(slow), call


def _look(result: Any) -> Any:
    """A view's own storage is as large as that of its base, or as the view: nothing asks for it."""
    if isinstance(result, tuple) and isinstance(result[0], tuple) and len(result) == 5 and isinstance(result[4], int):
        return result[:4]
    return tuple(map(_look, result)) if isinstance(result, tuple) else result
