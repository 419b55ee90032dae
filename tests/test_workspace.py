from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt import workspace
from fxckpt.joint import JointGraph
from fxckpt.measure import measure_peak
from fxckpt.passes.capture import capture
from fxckpt.passes.functionalize import functionalize


def _joint(model: nn.Module, *args: Tensor) -> JointGraph:
    return functionalize(capture(model, args, {}))


def _by_op(joint: JointGraph, found: dict[str, int]) -> dict[str, int]:
    return {str(node.target): found.get(node.name, 0) for node in joint.nodes if node.op == "call_function"}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is known yet; the list gets the number of operators of each measurement."""
    runs: list[int] = []
    measure = workspace._measure

    def counted(nodes: list[Any]) -> list[int]:
        runs.append(len(nodes))
        return measure(nodes)

    monkeypatch.setattr(workspace, "_known", {})
    monkeypatch.setattr(workspace, "_measure", counted)
    return runs


class Softmax(nn.Module):
    """bf16 in, fp32 out: the kernel casts a copy first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum((x * self.weight).sort(dim=1)[0], 1)


def test_scratch_is_what_the_allocator_sees_beyond_the_result(fresh: list[int]) -> None:
    joint = _joint(Softmax(), torch.randn(64, 256))
    found = _by_op(joint, workspace.measure_workspaces(joint.nodes))
    x = torch.zeros(64, 256)
    kept: list[object] = []
    peak = measure_peak(lambda: kept.append(torch.sort(x, dim=1))).peak_bytes
    assert found["aten.sort.default"] == peak - x.nbytes - 8 * x.numel() > 0
    assert found["aten.mul.Tensor"] == 0


def test_the_same_operator_runs_once_and_is_remembered(fresh: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.LayerNorm(16))
    joint = _joint(model, torch.randn(4, 16))
    first = workspace.measure_workspaces(joint.nodes)
    counts = len([node for node in joint.nodes if workspace._may_need_scratch(node)])
    assert len(fresh) == 1
    assert 0 < fresh[0] < counts
    assert workspace.measure_workspaces(_joint(model, torch.randn(4, 16)).nodes) == first
    assert len(fresh) == 1


def test_large_operators_are_not_tried(fresh: list[int]) -> None:
    joint = _joint(Softmax(), torch.randn(64, 256))
    assert workspace.measure_workspaces(joint.nodes, limit_bytes=1) == {}
    assert fresh == []


def test_measuring_leaves_the_generator_alone(fresh: list[int]) -> None:
    joint = _joint(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(2, 4))
    state = torch.get_rng_state()
    workspace.measure_workspaces(joint.nodes)
    assert torch.equal(torch.get_rng_state(), state)
