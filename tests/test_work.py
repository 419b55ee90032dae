"""No price where nothing is recomputed: a plan that keeps everything does the work that eager does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import auto_checkpoint, get_graph_module
from fxckpt.device import op_work
from tests import harness, models
from tests.planning import STRATEGIES


class _Work(TorchDispatchMode):
    """Adds up floating point operations and bytes moved by all ATen operators executed."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops, moved = op_work(func, args, kwargs or {}, out)
        self.flops += flops
        self.moved += moved
        return out


def _work(case: models.ModelCase, model: nn.Module, args: Any, kwargs: Any) -> _Work:
    """Of a step from no gradients, after one step to warm up."""
    for _ in range(2):
        model.zero_grad()
        with _Work() as work:
            with case.context() if case.context else contextlib.nullcontext():
                output = model(*args, **kwargs)
            case.loss(output).backward()
    return work


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_keeping_everything_costs_nothing(name: str) -> None:
    case = models.get(name)
    harness.seed_all()
    model, args, kwargs = case.build()
    plain = _work(case, model, args, kwargs)
    with case.context() if case.context else contextlib.nullcontext():
        planned = auto_checkpoint(model, *args, example_kwargs=kwargs, strategy="none")
    work = _work(case, planned, args, kwargs)
    assert work.flops == plain.flops
    assert work.moved <= 1.01 * plain.moved


class _Updating(nn.Module):
    """State of the kinds that forward updates in place: a counter, an average, and one that forward reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.calls.add_(1)
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        y = torch.tanh(y * self.scale.clone())
        with torch.no_grad():
            self.scale.mul_(1.5)
        return y * self.scale.clone()


@pytest.mark.parametrize("way", ["none", "recompute"])
def test_state_that_is_only_updated_is_updated_in_place(way: str) -> None:
    harness.seed_all()
    model, x = _Updating(), torch.randn(3, 4)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    planned = STRATEGIES[way](model, (x,), {})
    found = []
    for each in (model, planned):
        model.load_state_dict(before, strict=False)
        loss = each(x).square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    modules = [m for m in get_graph_module(planned).modules() if isinstance(m, torch.fx.GraphModule)]
    copies = [n for m in modules for n in m.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert len(copies) == 1  # of the buffer that forward reads before and after
