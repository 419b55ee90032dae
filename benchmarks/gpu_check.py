"""Equality, memory and time on a CUDA device, in under five minutes: ``python -m benchmarks.gpu_check``.

For ResNet-50 and GPT-2 (bf16 autocast): one step plain twice, to see whether eager equals itself under deterministic
kernels; then planned at several budgets against plain, ``max_memory_allocated`` against the prediction, and the time of
a step against eager and ``torch.utils.checkpoint`` around each block. ``--tiny`` runs small models, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models import Workload, gpt2, resnet50
from benchmarks.peers import Peer, peers
from fxckpt import auto_checkpoint, get_report, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.measure import compare_steps, held_bytes, measure_peak

__all__ = ["main"]

MIB = 2**20
FRACTIONS = (0.9, 0.7, 0.5)


def _on(device: torch.device, build: Callable[[], Workload], batch: int, autocast: bool) -> Workload:
    torch.manual_seed(0)
    work = build()
    work.model.to(device)

    def grown(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        repeats = (batch,) + (1,) * (value.ndim - 1)
        return value[:1].repeat(repeats).to(device)

    work.args = tuple(grown(value) for value in work.args)
    work.kwargs = {key: grown(value) for key, value in work.kwargs.items()}
    if autocast:
        work.context = lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return work


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Workload, model: nn.Module, device: torch.device, repeat: int) -> float:
    """Median time of a step, gradients None at its start."""
    times = []
    for _ in range(repeat + 2):
        work.model.zero_grad()
        _synchronize(device)
        start = time.perf_counter()
        work.step(model)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _peak(work: Workload, model: nn.Module, device: torch.device) -> int:
    work.model.zero_grad()
    work.step(model)
    work.model.zero_grad()
    held = (work.model, work.args, work.kwargs)
    return measure_peak(lambda: work.step(model), device=device, held=held).total_bytes


def _budgets(work: Workload, held: int, plain: int) -> list[int]:
    try:
        with work.context():
            make_plan(work.model, *work.args, example_kwargs=work.kwargs, budget_gb=1e-9)
    except BudgetInfeasibleError as error:
        wanted = [held + int(fraction * (plain - held)) for fraction in FRACTIONS]
        return [budget for budget in wanted if budget > error.min_peak_bytes] + [error.min_peak_bytes]
    raise AssertionError("a budget of a byte was met")


def check(name: str, build: Callable[[], Workload], device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Rows of one model: plain, planned at each budget, checkpoint around each block."""
    work = build()
    work.model.zero_grad()
    held = held_bytes((work.model, work.args, work.kwargs), device)
    plain_peak = _peak(work, work.model, device)
    plain_seconds = _seconds(work, work.model, device, repeat)
    again = _differences(work, work.model)
    rows = [_row(name, "plain", plain_peak, plain_seconds, 1.0, again)]
    work.model.zero_grad()
    for budget_bytes in _budgets(work, held, plain_peak):
        work.model.zero_grad()
        start = time.perf_counter()
        with work.context():
            planned = auto_checkpoint(
                work.model, *work.args, example_kwargs=work.kwargs, budget_gb=budget_bytes / 2**30
            )
        plan_seconds = time.perf_counter() - start
        report = get_report(planned)
        differences = _differences(work, planned)
        peak = _peak(work, planned, device)
        seconds = _seconds(work, planned, device, repeat)
        row = _row(name, "fxckpt", peak, seconds, seconds / plain_seconds, differences)
        row.update(budget_bytes=budget_bytes, predicted_bytes=report.peak_bytes, plan_seconds=plan_seconds)
        row.update(predicted_overhead=report.overhead)
        rows.append(row)
        _show(row)
    for peer in peers(compile_budgets=()):
        rows.append(_peer_row(name, build(), peer, device, repeat, plain_seconds))
    return rows


def _peer_row(
    name: str, work: Workload, peer: Peer, device: torch.device, repeat: int, plain_seconds: float
) -> dict[str, Any]:
    try:
        model = peer.apply(work)
        peak, seconds = _peak(work, model, device), _seconds(work, model, device, repeat)
    except Exception as error:  # a peer that fails is a result
        return {"model": name, "method": peer.name, "error": f"{type(error).__name__}: {error}"[:200]}
    row = _row(name, peer.name, peak, seconds, seconds / plain_seconds, ())
    _show(row)
    return row


def _differences(work: Workload, model: nn.Module) -> tuple[str, ...]:
    work.model.zero_grad()
    found = compare_steps(work.model, model, work.args, work.kwargs, work.loss, context=work.context)
    work.model.zero_grad()
    return found.differences


def _row(name: str, method: str, peak: int, seconds: float, ratio: float, differences: Any) -> dict[str, Any]:
    row = {"model": name, "method": method, "peak_bytes": peak, "seconds": seconds, "ratio": ratio}
    row["differences"] = list(differences)
    if method == "plain":
        _show(row)
    return row


def _show(row: dict[str, Any]) -> None:
    line = f"{row['model']:10} {row['method']:22} peak {row['peak_bytes'] / MIB:9.1f} MiB"
    if "budget_bytes" in row:
        off = row["peak_bytes"] / row["predicted_bytes"] - 1
        line += f" (budget {row['budget_bytes'] / MIB:9.1f}, {off:+.2%} of predicted)"
        line += f" planned in {row['plan_seconds']:.1f} s, predicted {row['predicted_overhead']:+.1%},"
    line += f" {1e3 * row['seconds']:8.2f} ms = {row['ratio']:.3f} x"
    print(line, f"DIFFERS: {row['differences'][:3]}" if row["differences"] else "equal", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the checks and keep a record; the exit status is 1 if a number differs or a budget is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU too")
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("no CUDA device; --tiny runs on a CPU")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    tiny = options.tiny
    builds: dict[str, Callable[[], Workload]] = {
        "resnet50": functools.partial(_on, device, resnet50, 1 if tiny else 64, False),
        "gpt2": functools.partial(_on, device, functools.partial(gpt2, 2 if tiny else 12, 64 if tiny else 512),
                                  1 if tiny else 16, True),
    }  # fmt: skip
    rows = []
    for name, build in builds.items():
        with contextlib.suppress(ModuleNotFoundError):
            rows += check(name, build, device, options.repeat)
    if not tiny:
        from benchmarks import records

        print("record:", records.save("gpu", rows, device=str(device)))
    planned = [row for row in rows if row["method"] == "fxckpt"]
    wrong = [row for row in planned if row["differences"] or row["peak_bytes"] > row["budget_bytes"]]
    print(f"{len(planned)} plans, {len(wrong)} wrong")
    return int(bool(wrong) or not planned)


if __name__ == "__main__":
    sys.exit(main())
