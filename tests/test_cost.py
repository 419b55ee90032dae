from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fxckpt.device import find_device
from fxckpt.passes.capture import capture
from fxckpt.passes.cost import cost
from fxckpt.passes.functionalize import functionalize
from fxckpt.plan import Graph, Node

ROOT = Path(__file__).parent.parent


def _graph(model: nn.Module, *args: Tensor, **options: object) -> Graph:
    return cost(functionalize(capture(model, args, {})), find_device("cpu"), **options)  # type: ignore[arg-type]


def _named(graph: Graph, op: str, phase: str = "forward") -> list[Node]:
    return [node for node in graph.nodes if op in node.op and node.phase == phase]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)).train()


def test_storages_are_counted_once_and_views_allocate_nothing() -> None:
    graph = _graph(_net(), torch.ones(3, 4))
    owners = [storage for node in graph.nodes for storage in node.allocates]
    assert len(owners) == len(set(owners))
    for node in graph.nodes:
        assert set(node.allocates) <= set(node.storages)
        if node.view:
            assert (node.allocates, node.seconds) == ((), 0.0)
    (first, second) = _named(graph, "addmm")
    assert [graph.storage_bytes[node.allocates[0]] for node in (first, second)] == [4 * 3 * 8, 4 * 3 * 2]
    parts = dict(graph.fixed)
    assert parts == {"parameters": 4 * (32 + 8 + 8 + 8 + 16 + 2), "buffers": 4 * 16 + 8, "inputs": 4 * 12}
    assert sum(parts.values()) == graph.fixed_bytes


def test_a_tied_weight_is_fixed_memory_once_and_extra_parts_are_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    graph = _graph(model, torch.ones(3, 4), extra_fixed=(("optimizer", 100),))
    assert dict(graph.fixed) == {"parameters": 64, "buffers": 0, "inputs": 48, "optimizer": 100}
    assert graph.fixed_bytes == 212


def test_what_may_be_recomputed_and_what_is_random() -> None:
    graph = _graph(_net(), torch.ones(3, 4))
    (norm,) = _named(graph, "batch_norm")
    assert norm.recomputable
    assert len(norm.state_inputs) == 2  # the running statistics
    assert not set(norm.state_inputs) & set(norm.inputs)
    assert graph.nodes.index(norm) in graph.required
    (mask,) = _named(graph, "bernoulli")
    assert (mask.random, mask.recomputable) == (True, True)
    assert not any(node.random for node in graph.nodes if node is not mask)
    assert not any(node.recomputable for node in _named(graph, "copy_"))


def test_values_of_a_buffer_that_forward_writes_are_not_recomputed() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("steps", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x * self.steps.cos())
            self.steps += 1
            return out.sin()

    graph = _graph(Counts(), torch.ones(3, 4))
    assert [node.recomputable for op in ("cos", "mul", "sin") for node in _named(graph, op)] == [False, True, True]


def test_given_seconds_and_scratch_take_the_place_of_estimates() -> None:
    graph = _graph(_net(), torch.ones(3, 4))
    name = _named(graph, "addmm")[0].name
    given = _graph(_net(), torch.ones(3, 4), seconds={name: 7.0}, workspaces={name: 99})
    (node,) = [node for node in given.nodes if node.name == name]
    assert (node.seconds, node.workspace_bytes) == (7.0, 99)
    assert (node.flops, node.moved_bytes) == (2 * 3 * 4 * 8, 4 * (8 + 12 + 32 + 24))


def test_names_are_the_same_in_every_process() -> None:
    code = (
        "import torch; from torch import nn; from fxckpt import make_plan\n"
        "print(make_plan(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.ones(2, 4), strategy='none').fingerprint)"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    graph = _graph(_net(), torch.ones(3, 4))
    assert not [node.op for node in graph.nodes if re.search(r"0x|<", node.op)]
