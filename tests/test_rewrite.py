"""The emitted module: its parts, and that running them gives eager's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxckpt.device import find_device
from fxckpt.joint import JointGraph
from fxckpt.passes.capture import capture
from fxckpt.passes.cost import cost
from fxckpt.passes.functionalize import functionalize
from fxckpt.passes.rewrite import rewrite
from fxckpt.passes.schedule import schedule
from fxckpt.plan import Graph, Plan, Program, Segment, SegmentProgram
from fxckpt.runtime import SegmentModule, replay_bernoulli
from fxckpt.snapshot import device_random_state

aten = torch.ops.aten


class Rewritten:
    """A model and the module that ``rewrite`` makes of it under a plan of ``count`` segments."""

    def __init__(self, model: nn.Module, x: Tensor, count: int = 1, kept: tuple[str, ...] = ()) -> None:
        self.model, self.x = model, x
        self.joint: JointGraph = functionalize(capture(model, (x,), {}))
        self.graph: Graph = cost(self.joint, find_device("cpu"))
        self.plan = Plan("dp", _segments(self.graph, count, kept))
        self.program: Program = schedule(self.graph, self.plan)
        self.asked: list[tuple[int, tuple[bool, ...]]] = []
        self.module: fx.GraphModule = rewrite(self.joint, self.graph, self.program, self._again)
        self.segments = [part for part in self.module.children() if isinstance(part, SegmentModule)]
        for segment in self.segments:
            segment.show()

    def _again(self, index: int, present: tuple[bool, ...]) -> SegmentProgram:
        self.asked.append((index, present))
        slots = self.program.segments[index].tangents
        arriving = {slot for slot, there in zip(slots, present, strict=True) if there}
        entries = tuple(
            dataclasses.replace(s, tangent=0 if i in arriving else -1) for i, s in enumerate(self.graph.slots)
        )
        alone = Plan("dp", (self.plan.segments[index],))
        return schedule(dataclasses.replace(self.graph, outputs=(), slots=entries), alone).segments[0]

    def __call__(self) -> list[Tensor]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), "0": self.x}
        inputs = [tensors[entry.name] for entry in self.joint.inputs]
        result: list[Tensor] = self.module(None, *inputs)
        return result


def _segments(graph: Graph, count: int, kept: tuple[str, ...]) -> tuple[Segment, ...]:
    length = len(graph.forward)
    blocked = {index for low, high in graph.forbidden for index in range(low + 1, high + 1)}
    free = [index for index in range(1, length) if index not in blocked]
    ends = [*(free[len(free) * i // count] for i in range(1, count)), length]
    spans = list(zip([0, *ends], ends, strict=False))
    names = [{graph.nodes[value].name for value in graph.forward[a:b]} for a, b in spans]
    return tuple(
        Segment(a, b, tuple(name for name in kept if name in own), name=f"layers.{a}")
        for (a, b), own in zip(spans, names, strict=True)
    )


def _mlp(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.GELU(), *extra, nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).train()


class Noise(nn.Module):
    """Draws by an operator that takes a device among its keywords, as drop path does in some models."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, dtype=x.dtype, device=x.device)


def _targets(code: fx.GraphModule) -> list[Any]:
    return [node.target for node in code.graph.nodes if node.op == "call_function"]


def _again(code: fx.GraphModule) -> list[Any]:
    return [node.target for node in code.graph.nodes if node.meta.get("recomputed")]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("extra", [nn.Identity, lambda: nn.BatchNorm1d(8), nn.Dropout, lambda: Noise()])
def test_numbers_are_eagers_to_the_bit(count: int, extra: Callable[[], nn.Module]) -> None:
    model, x = _mlp(extra()), torch.randn(6, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rewritten = Rewritten(model, x, count)
    torch.manual_seed(1)
    (out,) = rewritten()
    out.square().sum().backward()
    drawn = torch.rand(1)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(1)
    expected = model(x)
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(drawn, torch.rand(1))
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
    for name, value in model.named_buffers():
        assert torch.equal(buffers[name], value), name
    assert len(rewritten.segments) == count
    assert rewritten.asked == []


def test_segments_and_inputs_have_the_names_of_modules() -> None:
    rewritten = Rewritten(_mlp(), torch.randn(6, 4), 2)
    names = [name for name, _ in rewritten.module.named_children()]
    assert [name.split("_")[:2] for name in names] == [["segment", "0"], ["segment", "1"]]
    assert all("layers" in name for name in names)
    placeholders = [node.name for node in rewritten.module.graph.nodes if node.op == "placeholder"]
    assert placeholders[:3] == ["region_call", "_0_weight", "_0_bias"]
    assert placeholders[-1] == "input_0"
    rewritten.module.graph.lint()


def test_kept_values_are_not_recomputed_and_others_are() -> None:
    model, x = _mlp(), torch.randn(6, 4)
    lean = Rewritten(model, x).segments[0].backward_graph
    assert aten.gelu.default in _again(lean)
    gelu = next(node.name for node in Rewritten(model, x).joint.forward if node.target is aten.gelu.default)
    rich = Rewritten(model, x, kept=(gelu,))
    assert aten.gelu.default not in _again(rich.segments[0].backward_graph)
    assert gelu in [node.name for node in rich.segments[0].backward_graph.graph.nodes if node.op == "placeholder"]
    everything = tuple(node.name for node in rich.joint.forward)
    again = _again(Rewritten(model, x, kept=everything).segments[0].backward_graph)
    assert set(again) <= {aten.t.default}  # views of inputs cost nothing


def test_a_recomputed_batch_norm_reads_no_statistics() -> None:
    backward = Rewritten(_mlp(nn.BatchNorm1d(8)), torch.randn(6, 4)).segments[0].backward_graph
    norms = [node for node in backward.graph.nodes if node.meta.get("recomputed") and "batch_norm" in str(node.target)]
    assert len(norms) == 1
    assert norms[0].args[3:6] == (None, None, True)


def test_a_recomputed_mask_comes_from_the_saved_state() -> None:
    segment = Rewritten(_mlp(nn.Dropout(0.5)), torch.randn(6, 4)).segments[0]
    assert device_random_state in _targets(segment.forward_graph)
    assert replay_bernoulli in _targets(segment.backward_graph)


def test_operators_write_over_what_dies_but_never_over_arguments() -> None:
    for count in (1, 2):
        for segment in Rewritten(_mlp(nn.Tanh(), nn.ReLU()), torch.randn(6, 4), count).segments:
            for code in (segment.forward_graph, segment.backward_graph):
                given = {node for node in code.graph.nodes if node.op == "placeholder"}
                for node in code.graph.nodes:
                    if node.op == "call_function" and getattr(node.target, "_schema", None) is not None:
                        assert not (node.target._schema.is_mutable and node.args[0] in given), node


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).sin()
        return self.left(h), self.right(h)


def test_backward_is_made_anew_once_for_another_pattern_of_gradients() -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(6, 4)
    rewritten = Rewritten(model, x)
    for _ in range(2):
        model.zero_grad()
        left, _ = rewritten()
        left.sum().backward()
    ((segment, present),) = rewritten.asked
    assert (segment, sorted(present)) == (0, [False, True])
    assert model.right.weight.grad is None
    found = model.trunk.weight.grad
    model.zero_grad()
    model(x)[0].sum().backward()
    assert torch.equal(found, model.trunk.weight.grad)


def test_boxed_arguments_are_emptied() -> None:
    rewritten = Rewritten(_mlp(), torch.randn(6, 4))
    nodes = [rewritten.joint.nodes[value] for value in rewritten.program.segments[0].inputs]
    boxed = [torch.ones(node.meta["val"].shape) for node in nodes]
    outputs, saved, states = rewritten.segments[0].forward_graph(boxed)
    assert (boxed, len(outputs), states) == ([], 1, [])
    assert saved
