"""Dated records of measurements: what was run, on what, with which versions, and the rows it gave."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "latest", "save", "today"]

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "torchvision", "timm", "transformers", "networkx", "numpy")


def today() -> str:
    """The date that a record made now carries."""
    return datetime.date.today().isoformat()


def save(kind: str, rows: list[dict[str, Any]], *, command: str = "", **config: Any) -> Path:
    """Write a record of ``kind`` and return its path; a second one of the same day replaces the first."""
    from fxckpt._version import __version__

    record = {
        "kind": kind,
        "date": today(),
        "command": command or " ".join(["python -m benchmarks.run", *sys.argv[1:]]),
        "config": config,
        "versions": {"fxckpt": __version__, "python": platform.python_version(), **_versions()},
        "hardware": _hardware(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{record['date']}-{kind}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def latest(kind: str) -> dict[str, Any] | None:
    """The newest record of exactly ``kind``, None if there is none."""
    paths = sorted(RESULTS.glob(f"????-??-??-{kind}.json"))
    if not paths:
        return None
    record: dict[str, Any] = json.loads(paths[-1].read_text(encoding="utf-8"))
    return record


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    facts: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "processor": _processor()}
    facts["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
