"""One planned training step of many models: ``python -m benchmarks.zoo [PATTERN ...]``.

Each model runs in a process of its own: at half of its activation memory, at the smallest feasible budget, and with
everything recomputed between about sqrt(n) cuts. The table says what was captured (whole, regions, refused), whether
all numbers equal eager's bit for bit, and how far the predicted peak is from the measured one. Rows of today's record
stay unless their model is run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import records
from benchmarks.zoo_models import SOURCES, Example, load_libraries, names
from fxckpt import auto_checkpoint, get_report
from fxckpt.errors import FxckptError
from fxckpt.measure import compare_steps, default_loss, held_bytes, measure_peak
from fxckpt.report_regions import RegionsReport

__all__ = ["main"]

NEAR = 0.02  # a prediction off by more is listed
LABELS = ("half", "smallest", "sqrtn")


def examine(name: str) -> dict[str, Any]:
    """Plan and run model ``name`` at two budgets; the row of the table."""
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
    half = plain - max(0, plain - held - parameters) // 2
    try:
        start = time.perf_counter()
        planned = auto_checkpoint(
            example.model, *example.args, example_kwargs=example.kwargs, budget_gb=1e-9, on_infeasible="best"
        )
        row["plan_seconds"] = round(time.perf_counter() - start, 2)
        report = get_report(planned)
        in_regions = isinstance(report, RegionsReport)
        row["regions"] = [line[0] for line in report.rows] if in_regions else []
        row["left"] = [f"{item.module}: {item.reason}"[:200] for item in report.left] if in_regions else []
        row["smallest"] = row["half"] = _run(example, planned, report.peak_bytes)
        if half > report.peak_bytes:
            planned = auto_checkpoint(
                example.model, *example.args, example_kwargs=example.kwargs, budget_gb=half / 2**30
            )
            row["half"] = _run(example, planned, half)
        planned = auto_checkpoint(example.model, *example.args, example_kwargs=example.kwargs, strategy="sqrtn")
        row["sqrtn"] = _run(example, planned)
    except FxckptError as error:
        return {**row, "verdict": "refused", "note": _line(error)}
    differences = [line for label in LABELS for line in row[label]["differences"]]
    if differences:
        return {**row, "verdict": "DIFFERS", "note": "; ".join(differences[:3])}
    if row["regions"]:
        row["verdict"] = "equal, in regions"
    row["note"] = ", ".join(_faults(label, row[label]) for label in LABELS if _faults(label, row[label]))
    return row


def _faults(label: str, step: dict[str, Any]) -> str:
    if step["budget_bytes"] is not None and step["measured_bytes"] > step["budget_bytes"]:
        return f"{label}: {step['measured_bytes'] / step['budget_bytes'] - 1:.2%} over the budget"
    return f"{label}: {step['off']:+.1%} off the prediction" if abs(step["off"]) > NEAR else ""


def _step(example: Example) -> Any:
    def step() -> None:
        default_loss(example.model(*example.args, **example.kwargs)).backward()  # type: ignore[no-untyped-call]

    return step


def _run(example: Example, planned: Any, budget_bytes: int | None = None) -> dict[str, Any]:
    result = compare_steps(example.model, planned, example.args, example.kwargs, measure=True)
    assert result.planned_peak is not None
    measured, predicted = result.planned_peak.total_bytes, get_report(planned).peak_bytes
    return {
        "budget_bytes": budget_bytes,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "off": measured / predicted - 1,
        "differences": list(result.differences),
    }


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def _apart(name: str, timeout: float) -> dict[str, Any]:
    """Examine ``name`` in a process of its own, forked so that the libraries are loaded but once."""
    row = {"model": name, "family": name.partition("/")[0], "date": records.today()}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, theirs))
    start = time.perf_counter()
    process.start()
    theirs.close()
    try:
        if ours.poll(timeout):
            row.update(ours.recv())
        else:
            row.update(verdict="timeout", note=f"more than {timeout:g} s")
    except EOFError:
        process.join()
        row.update(verdict="crashed", note=f"exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _child(name: str, results: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        results.send(examine(name))
    except Exception as error:
        traceback.print_exc()
        results.send({"verdict": "crashed", "note": _line(error)})


def _show(row: dict[str, Any]) -> None:
    parts = [f"{row['model']:44} {row['verdict']:18}"]
    for label in LABELS:
        if label in row:
            share = row[label]["measured_bytes"] / row["plain_bytes"]
            parts.append(f"{label} {share:5.1%} of plain ({row[label]['off']:+.2%} of predicted)")
    if row.get("note"):
        parts.append(row["note"])
    print("  ".join(parts), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Examine the models whose names match; the exit status is 1 if any differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="like 'timm/*' or 'hf/gpt*'; all by default")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--resume", action="store_true", help="only models without a row in the newest record")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # threads do not survive a fork
    load_libraries()
    rows: list[dict[str, Any]] = []
    earlier = _earlier(options.resume)
    done = {row["model"] for row in earlier} if options.resume else set()
    for name in names():
        if name not in done and any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns):
            rows.append(_apart(name, options.timeout))
            _show(rows[-1])
            earlier = _save(rows[-1], earlier)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in {row["verdict"] for row in rows}}
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int("DIFFERS" in counts)


def _save(row: dict[str, Any], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write today's record: ``earlier`` rows and ``row``, in the order of the models."""
    by_name = {other["model"]: other for other in [*earlier, row]}
    rows = [by_name[name] for name in names() if name in by_name]
    records.save("zoo", rows, command="python -m benchmarks.zoo")
    return rows


def _earlier(resume: bool) -> list[dict[str, Any]]:
    """Rows of the newest record; without ``resume`` only if it is of today."""
    record = records.latest("zoo")
    return record["rows"] if record is not None and (resume or record["date"] == records.today()) else []


if __name__ == "__main__":
    sys.exit(main())
