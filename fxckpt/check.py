"""The verdict of ``fxckpt check``: is the planned step the plain one, and does it peak where the plan said?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxckpt.measure import StepComparison
from fxckpt.report import Report
from fxckpt.report_regions import RegionsReport
from fxckpt.tables import unit_for

__all__ = ["CheckResult"]

TOLERANCE = 0.02
"""Largest difference between predicted and measured peak, as a fraction of the predicted one."""

SHOWN = 10


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One plain and one planned step side by side. Bytes are peaks of the whole step; budget 0 means none.

    Attributes:
        title: model and inputs in words.
        differences: names of everything that differs bit for bit.
        compared: how many tensors and states were compared.
        plain_loss: loss of the plain step.
        planned_loss: loss of the planned step.
        plain_measured: peak of the plain step.
        plain_predicted: what was predicted for it.
        measured: peak of the planned step.
        predicted: what the plan predicts.
        budget: what was asked for.
        overhead: predicted recomputation as a fraction of the plain step's time.
    """

    title: str
    differences: tuple[str, ...]
    compared: int
    plain_loss: float
    planned_loss: float
    plain_measured: int
    plain_predicted: int
    measured: int
    predicted: int
    budget: int
    overhead: float

    @classmethod
    def of(cls, found: StepComparison, report: Report | RegionsReport) -> CheckResult:
        """Result of a measured comparison with the report of the plan."""
        assert found.plain_peak is not None
        assert found.planned_peak is not None
        return cls(
            title=f"{report.title}, strategy={report.strategy}",
            differences=found.differences,
            compared=found.compared,
            plain_loss=found.plain_loss,
            planned_loss=found.planned_loss,
            plain_measured=found.plain_peak.total_bytes,
            plain_predicted=report.plain_peak_bytes,
            measured=found.planned_peak.total_bytes,
            predicted=report.peak_bytes,
            budget=report.budget_bytes,
            overhead=report.overhead,
        )

    @property
    def equal(self) -> bool:
        """Whether loss, outputs, gradients, buffers and random states are the same bit for bit."""
        return not self.differences

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget; True without one."""
        return not self.budget or self.measured <= self.budget

    @property
    def as_predicted(self) -> bool:
        """Whether measured and predicted peak are within 2 % of each other."""
        return abs(self.measured - self.predicted) <= TOLERANCE * self.predicted

    @property
    def passed(self) -> bool:
        """Whether all three hold."""
        return self.equal and self.within_budget and self.as_predicted

    def to_dict(self) -> dict[str, Any]:
        """All numbers and the verdicts as plain data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        verdicts = {name: getattr(self, name) for name in ("equal", "within_budget", "as_predicted", "passed")}
        return {**data, "differences": list(self.differences), **verdicts}

    def render(self, how: str = "text") -> str:
        """The result as ``"text"``, ``"json"`` or ``"markdown"``."""
        if how == "json":
            return json.dumps(self.to_dict(), indent=2)
        table = tabulate(
            self._rows(),
            headers=("", "plain", "planned"),
            tablefmt="pipe" if how == "markdown" else "simple",
            colalign=("left", "right", "right"),
            disable_numparse=True,
        )
        mark = "- " if how == "markdown" else ""
        return "\n".join([self.title, "", table, "", *(mark + line for line in self._verdicts())])

    def _rows(self) -> list[tuple[str, str, str]]:
        unit, size = unit_for([self.plain_measured, self.measured])

        def shown(count: int) -> str:
            return f"{count / size:.3f} {unit}"

        return [
            ("loss", f"{self.plain_loss:.6f}", f"{self.planned_loss:.6f}"),
            ("peak, measured", shown(self.plain_measured), shown(self.measured)),
            ("peak, predicted", shown(self.plain_predicted), shown(self.predicted)),
            ("budget", "", shown(self.budget) if self.budget else "none"),
            ("recomputation, predicted", "", f"+{100 * self.overhead:.1f}%"),
        ]

    def _verdicts(self) -> list[str]:
        off = 100 * (self.measured - self.predicted) / self.predicted if self.predicted else 0.0
        hint = "" if self.as_predicted or off < 0 else "; a loss outside the model counts in what is measured"
        lines = [
            f"equal         {_yes(self.equal)}  {self.compared} tensors and random states compared bit for bit",
            f"within budget {_yes(self.within_budget)}",
            f"as predicted  {_yes(self.as_predicted)}  {off:+.2f}% off, {100 * TOLERANCE:.0f}% allowed{hint}",
        ]
        if self.differences:
            more = len(self.differences) - SHOWN
            lines.append(f"differs: {', '.join(self.differences[:SHOWN])}{f' and {more} more' if more > 0 else ''}")
        return lines


def _yes(value: bool) -> str:
    return "yes" if value else "NO "
