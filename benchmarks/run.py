"""Measure fxckpt: ``python -m benchmarks.run {planning,peak,overhead,pareto,tables}``.

Every subcommand prints what it measures, keeps a dated record under ``benchmarks/results/``; ``tables`` writes the
tables of ``benchmarks/README.md`` from the newest records.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

# glibc gives large blocks back to the system at once and faults them in again at the next step, which costs more
# than the kernels that are compared here.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "8589934592"}


def planning(options: argparse.Namespace) -> None:
    """Seconds to plan ResNet-50 and GPT-2 of 12, 24 and 48 layers, and the memory it takes."""
    from benchmarks import records
    from benchmarks.timing import planning_rows

    records.save("planning", planning_rows(options.repeat))


def overhead(options: argparse.Namespace) -> None:
    """Host overhead of a tiny transformer, everything recomputed, against torch.utils.checkpoint and eager."""
    from benchmarks import records
    from benchmarks.timing import overhead_rows

    records.save("overhead", overhead_rows(options.repeat))


def peak(options: argparse.Namespace) -> None:
    """Measured against predicted peak over ten budgets."""
    _curves("peak", options, with_peers=False)


def pareto(options: argparse.Namespace) -> None:
    """Peak, counted overhead and bound over ten budgets, the peers beside it."""
    _curves("pareto", options, with_peers=True)


def _curves(kind: str, options: argparse.Namespace, with_peers: bool) -> None:
    from benchmarks import records
    from benchmarks.models import MODELS
    from benchmarks.pareto import pareto as measure

    for name in options.models or MODELS:
        rows = measure(name, existing=options.existing, with_peers=with_peers)
        suffix = "-existing" if options.existing else ""
        records.save(f"{kind}-{name}{suffix}", rows, device="a100", existing_gradients=options.existing)


def tables(options: argparse.Namespace) -> None:
    """Write the tables of benchmarks/README.md from the newest records."""
    from benchmarks.tables import write

    write()


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    commands = parser.add_subparsers(required=True)
    subcommands: tuple[Callable[[Any], None], ...] = (planning, overhead, peak, pareto, tables)
    for command in subcommands:
        sub = commands.add_parser(command.__name__, help=command.__doc__)
        sub.set_defaults(run=command)
        if command in (peak, pareto):
            sub.add_argument("models", nargs="*", help="names of models, all nine by default")
            sub.add_argument("--existing", action="store_true", help="gradients exist when the step begins")
        elif command in (planning, overhead):
            sub.add_argument("--repeat", type=int, default=3 if command is planning else 100)
    options = parser.parse_args(argv)
    options.run(options)
    return 0


if __name__ == "__main__":
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]], {**os.environ, **MALLOC})
    sys.exit(main())
