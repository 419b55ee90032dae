"""The report of a model that is planned in regions."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxckpt._version import __version__
from fxckpt.errors import CaptureError
from fxckpt.plan import Plan
from fxckpt.regions import LeftOut, RegionUse
from fxckpt.tables import wrapped
from fxckpt.units import MIB, format_bytes

__all__ = ["RegionsReport"]

WIDTH = 100


@dataclass(frozen=True, slots=True)
class RegionsReport:
    """What became of each part of the model.

    Attributes:
        title: model and strategy.
        plan: the plans of all regions; ``plan.peak_bytes`` is the predicted whole-step peak. What the Python
            between the regions holds was seen in forward and is estimated for backward.
        rows: per region: path, segments, kept bytes, seconds of recomputation, share of the region's step.
        left: what stays Python, and why; the whole model comes first.
        plain_peak_bytes: predicted whole-step peak without recomputation.
        plain_seconds: predicted time of forward and backward of the regions without recomputation.
    """

    title: str
    plan: Plan
    rows: tuple[tuple[str, int, int, float, float], ...]
    left: tuple[LeftOut, ...]
    plain_peak_bytes: int = 0
    plain_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        title: str,
        plan: Plan,
        uses: Sequence[RegionUse],
        error: CaptureError,
        left: dict[str, LeftOut],
        plain_peak_bytes: int = 0,
    ) -> RegionsReport:
        """Gather the report from the regions and from the error that stopped the capture of the whole model."""
        rows, plain_seconds = [], 0.0
        for use in uses:
            decision = use.decision
            assert decision is not None
            timeline = decision.timeline
            first = next((i for i, label in enumerate(timeline.labels) if label[1] == "backward"), 0)
            kept = timeline.total_bytes[first] - decision.graph.fixed_bytes if timeline.labels else 0
            plain_seconds += timeline.plain_seconds
            share = timeline.recompute_seconds / timeline.plain_seconds if timeline.plain_seconds else 0.0
            rows.append((use.path, len(decision.plan.segments), kept, timeline.recompute_seconds, share))
        whole = LeftOut(error.module, error.reason, error.source)
        others = tuple(item for item in left.values() if item.module != error.module)
        return cls(title, plan, tuple(rows), (whole, *others), plain_peak_bytes, plain_seconds)

    @property
    def strategy(self) -> str:
        """Of the plans."""
        return self.plan.strategy

    @property
    def budget_bytes(self) -> int:
        """Whole-step peak that was asked for, 0 without a budget."""
        return self.plan.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted whole-step peak."""
        return self.plan.peak_bytes

    @property
    def overhead(self) -> float:
        """Recomputation as a fraction of the time of the regions without it."""
        return self.plan.extra_seconds / self.plain_seconds if self.plain_seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"fxckpt {__version__} | {self.title} | strategy={self.plan.strategy}",
            "=" * WIDTH,
            self._peak_line(),
            "",
            self._table("simple"),
            "",
            "Left in Python",
        ]
        for text in self._left_lines():
            lines += wrapped(text, WIDTH, "  - ", "    ")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """The report as Markdown: peak, table of regions, what stays Python."""
        left = "\n".join(["Left in Python:", "", *(f"- {text}" for text in self._left_lines())])
        head = f"**{self.title}**, strategy `{self.plan.strategy}`"
        return "\n\n".join([head, self._peak_line(), self._table("pipe"), left])

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def _peak_line(self) -> str:
        budget = f", budget {format_bytes(self.plan.budget_bytes)}" if self.plan.budget_bytes else ""
        return f"Predicted peak  {format_bytes(self.plan.peak_bytes)}{budget}"

    def _table(self, style: str) -> str:
        return tabulate(
            [
                (path, segments, f"{kept / MIB:.3f}", f"{100 * share:.2f}")
                for path, segments, kept, _, share in self.rows
            ],
            headers=("Region", "Segments", "Kept MiB", "Extra %"),
            colalign=("left", "right", "right", "right"),
            tablefmt=style,
            disable_numparse=True,
        )

    def _left_lines(self) -> list[str]:
        return [
            f"{item.module or 'the model itself'}{f', {item.source}' if item.source else ''}: {item.reason}"
            for item in self.left
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "title": self.title,
            "strategy": self.plan.strategy,
            "budget_bytes": self.plan.budget_bytes,
            "predicted_peak_bytes": self.plan.peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "regions": [
                {"path": path, "segments": segments, "kept_bytes": kept, "extra_seconds": seconds, "extra_share": share}
                for path, segments, kept, seconds, share in self.rows
            ],
            "left": [{"module": i.module, "reason": i.reason, "source": i.source} for i in self.left],
        }

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
