"""Print which cases are right under which strategy: ``python -m tests.cases [case ...]``."""

from __future__ import annotations

import sys
import warnings

from tabulate import tabulate

from tests import cases
from tests.harness import compare
from tests.planning import STRATEGIES


def main(argv: list[str]) -> int:
    """Run the cases named in ``argv`` (all by default); the exit status is 1 if any is wrong."""
    warnings.simplefilter("ignore")
    rows, notes = [], []
    for name in argv or cases.names():
        case = cases.load(name)
        verdicts = []
        for strategy, make_planned in STRATEGIES.items():
            try:
                found = compare(case.build, case.loss, make_planned=make_planned, **case.options())
            except Exception as error:  # refusing to plan is a verdict too
                found = [f"{type(error).__name__}: {error}"]
            verdicts.append("WRONG" if found else "right")
            notes.extend(f"{name}, {strategy}: {line}" for line in found[:3])
        rows.append([name, *verdicts])
    lines = [tabulate(rows, headers=["case", *STRATEGIES]), ""]
    right = sum(verdict == "right" for row in rows for verdict in row[1:])
    lines.append(f"{right} of {len(rows) * len(STRATEGIES)} right")
    sys.stdout.write("\n".join([*lines, *notes]) + "\n")
    return int(bool(notes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
