"""One planned training step of many models: ``python -m benchmarks.zoo [PATTERN ...]``.

Each model runs in a process of its own: at half of its activation memory, then at the smallest feasible budget. The
table says what was captured (whole, regions, refused), whether all numbers equal eager's bit for bit, and how far the
predicted peak is from the measured one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any

import torch

from benchmarks.zoo_models import SOURCES, Example, names

__all__ = ["main"]

MARK = "zoo result: "


def examine(name: str) -> dict[str, Any]:
    """Plan and run model ``name`` at two budgets; the row of the table."""
    from fxckpt import auto_checkpoint, get_report, make_plan
    from fxckpt.errors import BudgetInfeasibleError, FxckptError
    from fxckpt.measure import held_bytes, measure_peak

    torch.manual_seed(0)
    family, build = SOURCES[name.partition("/")[0]], name.partition("/")[2]
    example: Example = family(build)
    row: dict[str, Any] = {"model": name, "family": name.partition("/")[0], "verdict": "equal", "note": ""}
    try:
        step = _step(example)
        step()
        example.model.zero_grad()
        held = held_bytes((example.model, example.args, example.kwargs))
        plain = measure_peak(step).peak_bytes + held
        example.model.zero_grad()
    except Exception as error:  # a model that does not train in eager says nothing about fxckpt
        return {**row, "verdict": "not trainable", "note": _line(error)}
    parameters = sum(p.nbytes for p in example.model.parameters() if p.requires_grad)
    row["plain_bytes"] = plain
    budgets = {"half": plain - max(0, plain - held - parameters) // 2}
    try:
        start = time.perf_counter()
        try:
            make_plan(example.model, *example.args, example_kwargs=example.kwargs, budget_gb=1e-9)
        except BudgetInfeasibleError as error:
            budgets["smallest"] = error.min_peak_bytes
        row["plan_seconds"] = time.perf_counter() - start
        budgets["half"] = max(budgets["half"], budgets.get("smallest", 0))
        for label, budget_bytes in budgets.items():
            planned = auto_checkpoint(
                example.model, *example.args, example_kwargs=example.kwargs, budget_gb=budget_bytes / 2**30
            )
            report = get_report(planned)
            row[label] = _run(example, planned, budget_bytes, report.peak_bytes)
            row["regions"] = list(report.regions)
            row["remarks"] = list(report.remarks)
    except FxckptError as error:
        return {**row, "verdict": "refused", "note": _line(error)}
    differences = [line for label in budgets for line in row[label]["differences"]]
    if differences:
        return {**row, "verdict": "DIFFERS", "note": "; ".join(differences[:3])}
    if row["regions"]:
        row["verdict"] = "equal, in regions"
    over = [label for label in budgets if row[label]["measured_bytes"] > row[label]["budget_bytes"]]
    row["note"] = f"over budget at {', '.join(over)}" if over else ""
    return row


def _step(example: Example) -> Any:
    from fxckpt.measure import default_loss

    def step() -> None:
        default_loss(example.model(*example.args, **example.kwargs)).backward()  # type: ignore[no-untyped-call]

    return step


def _run(example: Example, planned: Any, budget_bytes: int, predicted_bytes: int) -> dict[str, Any]:
    from fxckpt.measure import compare_steps

    result = compare_steps(example.model, planned, example.args, example.kwargs, measure=True)
    assert result.planned_peak is not None
    measured = result.planned_peak.total_bytes
    return {
        "budget_bytes": budget_bytes,
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured,
        "off": measured / predicted_bytes - 1,
        "differences": list(result.differences),
    }


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def _in_process(name: str, timeout: float) -> dict[str, Any]:
    row = {"model": name, "family": name.partition("/")[0]}
    command = [sys.executable, "-m", "benchmarks.zoo", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "verdict": "timeout", "note": f"more than {timeout:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    tail = [line for line in done.stderr.splitlines() if line.strip()]
    return {**row, "verdict": "crashed", "note": tail[-1][:300] if tail else f"exit status {done.returncode}"}


def _show(row: dict[str, Any]) -> None:
    parts = [f"{row['model']:44} {row['verdict']:18}"]
    for label in ("half", "smallest"):
        if label in row:
            share = row[label]["measured_bytes"] / row["plain_bytes"]
            parts.append(f"{label} {share:5.1%} of plain ({row[label]['off']:+.2%} of predicted)")
    if row.get("note"):
        parts.append(row["note"])
    print("  ".join(parts), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Examine the models whose names match; the exit status is 1 if any differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="like 'timm/*' or 'hf/gpt*'; all by default")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        warnings.simplefilter("ignore")
        try:
            row = examine(options.one)
        except Exception as error:
            traceback.print_exc()
            row = {"model": options.one, "family": options.one.partition("/")[0]}
            row.update(verdict="crashed", note=_line(error))
        print(MARK + json.dumps(row))
        return 0
    patterns = options.patterns or ["*"]
    rows = []
    for name in names():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            rows.append(_in_process(name, options.timeout))
            _show(rows[-1])
            if not options.patterns:
                _save(rows)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in {row["verdict"] for row in rows}}
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int("DIFFERS" in counts)


def _save(rows: list[dict[str, Any]]) -> None:
    from benchmarks import records

    records.save("zoo", rows, module="benchmarks.zoo")


if __name__ == "__main__":
    sys.exit(main())
