"""Wall-clock measurements: planning seconds, and host overhead of the planned step."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Workload, gpt2, resnet50
from fxckpt import auto_checkpoint, get_graph_module, get_report, make_plan
from fxckpt.model import plain_view, planner_of

__all__ = ["overhead_rows", "planning_rows"]

PLANNED: dict[str, Callable[[], Workload]] = {
    "resnet50": resnet50,
    "gpt2 12 layers": functools.partial(gpt2, 12),
    "gpt2 24 layers": functools.partial(gpt2, 24),
    "gpt2 48 layers": functools.partial(gpt2, 48),
    "gpt2 60 layers": functools.partial(gpt2, 60),
}


def _nodes(planned: nn.Module) -> int:
    """Operators of forward and backward, the recomputed ones twice."""
    graphs = [m.graph for m in get_graph_module(planned).modules() if isinstance(m, torch.fx.GraphModule)]
    return sum(node.op == "call_function" for graph in graphs for node in graph.nodes)


def planning_rows(repeat: int) -> list[dict[str, Any]]:
    """Plan each model ``repeat`` times at 60 % of its plain peak; the shortest time counts.

    The figures of memory are growth of the process's highest resident set, so the models go from small to large.
    """
    rows = []
    for name, build in PLANNED.items():
        torch.manual_seed(0)
        work = build()
        plain = make_plan(work.model, *work.args, example_kwargs=work.kwargs, strategy="none")
        budget_gb = 0.6 * plain.peak_bytes / 2**30
        seconds = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(repeat):
            start = time.perf_counter()
            planned = auto_checkpoint(
                work.model, *work.args, example_kwargs=work.kwargs, budget_gb=budget_gb, on_infeasible="best"
            )
            seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = get_report(planned)
        smaller, larger = _other_sizes(work, report.peak_bytes)
        row = {
            "model": name,
            "operations": sum(segment.ops for segment in report.rows),
            "nodes": _nodes(planned),
            "seconds": min(seconds),
            "first_seconds": seconds[0],
            "smaller_size_seconds": smaller,
            "larger_size_seconds": larger,
            "memory_bytes": (after - before) * 1024,
            "passes": dict(report.pass_seconds),
        }
        print(
            f"{name:16} {row['nodes']:6} nodes  {row['seconds']:6.2f} s  {row['memory_bytes'] / 2**20:6.0f} MiB  "
            f"smaller {smaller:.2f} s  larger {larger:.2f} s"
        )
        rows.append(row)
        del work, planned, report
    return rows


def _other_sizes(work: Workload, budget_bytes: int) -> tuple[float, float]:
    """Seconds of planning for other inputs than the first ones: smaller ones, then larger ones.

    The smaller ones are cut to half along their last dimension: length of texts, width of images. The budget is 5 %
    more than ``budget_bytes``, which is met: for the larger ones the plans of the smaller ones will not do.
    """
    gb = 1.05 * budget_bytes / 2**30
    made: dict[int, torch.Tensor] = {}

    def half(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        return made.setdefault(id(leaf), leaf[..., : leaf.shape[-1] // 2].contiguous())

    large, small = (work.args, work.kwargs), pytree.tree_map(half, (work.args, work.kwargs))
    seconds = []
    for first, other in ((large, small), (small, large)):
        planned = auto_checkpoint(work.model, *first[0], example_kwargs=first[1], budget_gb=gb)
        gc.collect()  # what the models before have left behind
        start = time.perf_counter()
        planner_of(planned).plan(plain_view(planned), *other)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class _Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Tiny(nn.Module):
    """Transformer of ``layers`` blocks, so small that only the host's time counts."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(_Attention(width, 4), _Feed(width)) for _ in range(layers))
        self.use_reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def _variants(x: torch.Tensor) -> dict[str, nn.Module]:
    def tiny(use_reentrant: bool | None = None) -> _Tiny:
        torch.manual_seed(0)
        model = _Tiny()
        model.use_reentrant = use_reentrant
        return model

    plan = make_plan(tiny(), x, strategy="none")
    nothing_kept = dataclasses.replace(
        plan, segments=tuple(dataclasses.replace(segment, kept=(), inner=()) for segment in plan.segments)
    )
    return {
        "eager": tiny(),
        "fxckpt, nothing recomputed": auto_checkpoint(tiny(), x, strategy="none"),
        "fxckpt, sqrtn": auto_checkpoint(tiny(), x, strategy="sqrtn"),
        "fxckpt, everything recomputed": auto_checkpoint(tiny(), x, plan=nothing_kept),
        "checkpoint non-reentrant": tiny(False),
        "checkpoint reentrant": tiny(True),
    }


def overhead_rows(repeat: int) -> list[dict[str, Any]]:
    """Steps of all variants in turn, in random order, in one process; medians of the ratios to eager's step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the host's time is asked for; kernels this small gain nothing from a second thread
    x = torch.randn(2, 16, 64, requires_grad=True)
    variants = _variants(x)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeat + 10):
        names = list(variants)
        random.shuffle(names)
        for name in names:
            variants[name].zero_grad()
            x.grad = None
            start = time.perf_counter()
            variants[name](x).sum().backward()
            if turn >= 10:
                times[name].append(time.perf_counter() - start)
    rows = []
    for name, seconds in times.items():
        ratios = [mine / plain for mine, plain in zip(seconds, times["eager"], strict=True)]
        row = {"variant": name, "seconds": statistics.median(seconds), "ratio": statistics.median(ratios)}
        print(f"{name:32} {1e3 * row['seconds']:7.2f} ms  {row['ratio']:5.2f} x eager")
        rows.append(row)
    return rows
