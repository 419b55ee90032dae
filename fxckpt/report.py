"""The report: what a plan does to one training step, as data and as printed text. Works without torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from fxckpt import tables
from fxckpt._version import __version__
from fxckpt.explain import KeptValue, SegmentRow, largest_kept, segment_rows
from fxckpt.plan import Graph, Plan, Program, Timeline
from fxckpt.units import format_bytes

__all__ = ["KeptValue", "Report", "SegmentRow", "build_report"]

WIDTH = 100
LARGEST_KEPT = 8


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan does to one training step; ``str()`` prints it, ``to_dict()`` gives all of it as data.

    Bytes are of the whole step on the model's device, seconds are predicted. ``budget_bytes`` and
    ``min_peak_bytes`` are 0 when unknown, ``bound_seconds`` is None.

    Attributes:
        title: model and inputs in words.
        strategy: of the plan.
        budget_bytes: peak that was asked for.
        peak_bytes: predicted peak.
        peak_segment: number of the segment that runs at the peak.
        peak_phase: ``"forward"`` or ``"backward"``.
        peak_parts: what makes up the peak; the bytes sum to ``peak_bytes``.
        plain_peak_bytes: predicted peak without fxckpt.
        fixed_bytes: parameters, buffers, inputs, gradients and optimizer state that exist before the step.
        min_peak_bytes: smallest peak that this strategy reaches.
        recompute_seconds: time of all that backward runs again.
        plain_seconds: time of forward and backward without it.
        bound_seconds: recomputation that no schedule within the budget can avoid.
        rows: the segments.
        kept: the largest kept values.
        timeline: live bytes at each instruction, forward then backward.
        forward_steps: how many of them belong to forward.
        pass_seconds: time that each pass of the planning took.
        remarks: what else the user should know.
        regions: names of the parts that were captured, if not the whole model.
        version: of fxckpt.
    """

    title: str
    strategy: str
    budget_bytes: int
    peak_bytes: int
    peak_segment: int
    peak_phase: str
    peak_parts: tuple[tuple[str, int], ...]
    plain_peak_bytes: int
    fixed_bytes: int
    min_peak_bytes: int
    recompute_seconds: float
    plain_seconds: float
    bound_seconds: float | None
    rows: tuple[SegmentRow, ...]
    kept: tuple[KeptValue, ...]
    timeline: tuple[int, ...]
    forward_steps: int
    pass_seconds: tuple[tuple[str, float], ...] = ()
    remarks: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    version: str = __version__

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget; True without a budget."""
        return not self.budget_bytes or self.peak_bytes <= self.budget_bytes

    @property
    def overhead(self) -> float:
        """Recomputation as a fraction of the plain step's time."""
        return self.recompute_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def gap(self) -> float | None:
        """How far ``overhead`` is above the least that any schedule can pay, None if the least is unknown."""
        if self.bound_seconds is None or not self.plain_seconds:
            return None
        return max(0.0, self.recompute_seconds - self.bound_seconds) / self.plain_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and strings."""
        derived = {"fits": self.fits, "overhead": self.overhead, "gap": self.gap}
        data: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(self), **derived}))
        return data

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
        return self.render(ascii=encoding != "utf8")

    def render(self, *, ascii: bool = False) -> str:
        """The printed report, at most 100 columns wide; with ``ascii`` in plain ASCII."""
        head = f"fxckpt {self.version} | {self.title} | strategy={self.strategy}"
        rule, thin = "=" * WIDTH, "-" * WIDTH
        parts = [
            *tables.wrapped(head, WIDTH, rest="    "),
            rule,
            *self._verdict_lines(),
            rule,
            *self._segment_lines(thin),
            "",
            *self._peak_lines(),
            "",
            "Live bytes over the step" + (f" ({tables.shades(ascii)[1]} fixed)" if self.fixed_bytes else ""),
            tables.chart(self.timeline, self.fixed_bytes, self.forward_steps, width=WIDTH, ascii=ascii),
            *self._remark_lines(),
        ]
        text = "\n".join(line.rstrip() for part in parts for line in part.split("\n"))
        return text.encode("ascii", "replace").decode() if ascii else text

    def to_markdown(self) -> str:
        """The report as Markdown: verdict, table of segments, peak, remarks."""
        verdict = tabulate(self._verdict(), headers=("", "", ""), tablefmt="pipe", disable_numparse=True)
        table = tabulate(
            self._cells(40, 60), headers=self._headers(one_line=True), tablefmt="pipe", disable_numparse=True
        )
        notes = [" ".join(self._peak_lines()), *(f"- {remark}" for remark in self._remarks())]
        return "\n\n".join([f"**{self.title}**, strategy `{self.strategy}`", verdict, table, "\n".join(notes)])

    def _repr_html_(self) -> str:
        verdict = tabulate(self._verdict(), tablefmt="html", disable_numparse=True)
        table = tabulate(
            self._cells(40, 60), headers=self._headers(one_line=True), tablefmt="html", disable_numparse=True
        )
        peak = tabulate([[line.strip()] for line in self._peak_lines()], tablefmt="html")
        return f"<div>{verdict}{table}{peak}</div>"

    def _verdict(self) -> list[tuple[str, str, str]]:
        unit = tables.unit_for([self.peak_bytes, self.plain_peak_bytes, self.budget_bytes])
        if self.peak_bytes < unit[1] / 10:  # a budget that is far from being needed
            unit = tables.unit_for([self.peak_bytes, self.plain_peak_bytes])

        def size(count: int) -> str:
            return f"{count / unit[1]:.2f} {unit[0]}" if count < 10_000 * unit[1] else format_bytes(count)

        spare = self.budget_bytes - self.peak_bytes
        if not self.budget_bytes:
            budget = "no budget was given"
        elif self.fits:
            budget = f"fits the budget of {size(self.budget_bytes)}, {format_bytes(spare)} to spare"
        else:
            budget = f"DOES NOT FIT the budget of {size(self.budget_bytes)}, {format_bytes(-spare)} too much"
        saved = 1 - self.peak_bytes / self.plain_peak_bytes if self.plain_peak_bytes else 0.0
        price = "of the step"
        if self.gap is not None:
            price += f", at most {100 * self.gap:.1f}% above the least that any schedule can pay"
        lines = [
            ("Predicted peak", size(self.peak_bytes), budget),
            ("Without fxckpt", size(self.plain_peak_bytes), f"{100 * saved:.1f}% less memory"),
            ("Recomputation", f"+{100 * self.overhead:.1f}%", price),
        ]
        if self.min_peak_bytes:
            lines.append(("Smallest peak", size(self.min_peak_bytes), "reachable with this strategy"))
        return lines

    def _verdict_lines(self) -> list[str]:
        widest = max(len(size) for _, size, _ in self._verdict())
        return [f"{name:<16}{size:>{widest}}   {text}" for name, size, text in self._verdict()]

    def _headers(self, *, one_line: bool) -> list[str]:
        columns = [[getattr(row, name) for row in self.rows] for name in ("plain_bytes", "kept_bytes", "live_bytes")]
        units = [tables.unit_for([sum(columns[0])])[0], tables.unit_for([sum(columns[1])])[0]]
        units.append(tables.unit_for(columns[2])[0])
        words = ("Plain\nkeeps", "\nKept", "Live in\nbwd")
        sizes = [f"{word}\n{unit}" for word, unit in zip(words, units, strict=True)]
        headers = ["\n\n#", "\n\nSegment", "\n\nOps", *sizes, "\n\nRecomputed", "\nExtra\n%", "\n\n"]
        return [" ".join(header.split()) for header in headers] if one_line else headers

    def _cells(self, name_width: int, recomputed_width: int) -> list[list[str]]:
        """Printed cells: a line for each group of identical neighbours, then the total."""
        groups = list(_groups(self.rows))
        plain = [sum(row.plain_bytes for row in group) for group in groups]
        kept = [sum(row.kept_bytes for row in group) for group in groups]
        live = [max(row.live_bytes for row in group) for group in groups]
        seconds = [sum(row.extra_seconds for row in group) for group in groups]
        plain_texts, plain_total = tables.rounded(plain, tables.unit_for([sum(plain)])[1])
        kept_texts, kept_total = tables.rounded(kept, tables.unit_for([sum(kept)])[1])
        extra_texts, extra_total = tables.rounded([100 * s for s in seconds], self.plain_seconds or 1.0, 2)
        live_unit = tables.unit_for(live)[1]
        cells = []
        for index, group in enumerate(groups):
            first, last = group[0], group[-1]
            number = str(first.number) if len(group) == 1 else f"{first.number}-{last.number}"
            times = "" if len(group) == 1 else f" x{len(group)}"
            names = tables.span_name(first.first, last.last, name_width - len(times)) + times
            again = tables.counted([op for row in group for op in row.recomputed], recomputed_width)
            mark = "< peak" if first.number <= self.peak_segment <= last.number else ""
            sizes = [plain_texts[index], kept_texts[index], f"{live[index] / live_unit:.3f}"]
            ops = str(sum(row.ops for row in group))
            cells.append([number, names, ops, *sizes, again, extra_texts[index], mark])
        ops = str(sum(row.ops for row in self.rows))
        highest = f"{max(live, default=0) / live_unit:.3f}"
        cells.append(["", "total", ops, plain_total, kept_total, highest, "", extra_total, ""])
        return cells

    def _segment_lines(self, rule: str) -> list[str]:
        headers = self._headers(one_line=False)
        narrow = self._cells(1, 1)
        columns = range(len(headers))
        widths = [max(len(part) for row in [*narrow, headers] for part in row[c].split("\n")) for c in columns]
        free = WIDTH - 2 * (len(headers) - 1) - sum(w for c, w in enumerate(widths) if c not in (1, 6))
        wanted, again = (max(len(row[c]) for row in self._cells(WIDTH, WIDTH)) for c in (1, 6))
        names = min(wanted, max(free - max(again, len("Recomputed")), free * 3 // 5))
        *cells, total = self._cells(names, free - names)
        # As rows, since tabulate pads what it is given as headers by two columns each.
        heads = [list(line) for line in zip(*(header.split("\n") for header in headers), strict=True)]
        align = ("right", "left", "right", "right", "right", "right", "left", "right", "left")
        rows = [*heads, SEPARATING_LINE, *cells, SEPARATING_LINE, total]
        lines = tabulate(rows, tablefmt="simple", colalign=align, disable_numparse=True).split("\n")[1:-1]
        # tabulate breaks its rules at the columns; whole lines read calmer.
        return [rule if not line.strip(" -") else line for line in lines]

    def _peak_lines(self) -> list[str]:
        unit, size = tables.unit_for([self.peak_bytes])
        texts, total = tables.rounded([count for _, count in self.peak_parts], size)
        parts = zip(self.peak_parts, texts, strict=True)
        shown = [f"{name} {text}" for (name, _), text in parts if float(text)]  # "0.000" says nothing
        where = ""
        if 0 <= self.peak_segment < len(self.rows):
            row = self.rows[self.peak_segment]
            where = f", in the {self.peak_phase} of segment {row.number} ({tables.span_name(row.first, row.last, 56)})"
        return [f"Peak {total} {unit}{where}:", *tables.wrapped(" | ".join(shown), WIDTH, "    ")]

    def _remarks(self) -> Iterator[str]:
        alike: dict[tuple[int, str, str], list[str]] = {}
        for value in self.kept:
            name = f"{value.name} ({value.module})" if value.module else value.name
            alike.setdefault((value.bytes, value.source, value.reason), []).append(name)
        for (count, source, reason), names in alike.items():
            size = format_bytes(count) + (" each" if len(names) > 1 else "")
            yield f"kept {size}: {', '.join(names)}{f', {source}' if source else ''}: {reason}"
        yield from self.remarks
        if self.regions:
            yield f"captured: {', '.join(self.regions)}"
        if self.pass_seconds:
            total = sum(seconds for _, seconds in self.pass_seconds)
            passes = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.pass_seconds)
            yield f"planned in {total:.2f} s: {passes}"

    def _remark_lines(self) -> list[str]:
        lines = [line for remark in self._remarks() for line in tables.wrapped(remark, WIDTH, "  - ", "    ")]
        return ["", "Remarks", *lines] if lines else []


def _groups(rows: Sequence[SegmentRow]) -> Iterator[list[SegmentRow]]:
    """Runs of neighbours that differ only in number, modules and the memory that is live meanwhile."""
    group: list[SegmentRow] = []
    for row in rows:
        if group and _likeness(group[0]) != _likeness(row):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _likeness(row: SegmentRow) -> tuple[object, ...]:
    return row.ops, row.plain_bytes, row.kept_bytes, row.recomputed, f"{row.extra_seconds:.6g}"


def build_report(
    graph: Graph,
    plan: Plan,
    program: Program,
    timeline: Timeline,
    plain: Timeline,
    *,
    title: str,
    min_peak_bytes: int | None = None,
    bound_seconds: float | None = None,
    pass_seconds: Sequence[tuple[str, float]] = (),
    remarks: Sequence[str] = (),
    regions: Sequence[str] = (),
) -> Report:
    """Gather the report of ``plan``.

    Args:
        graph: joint graph that the plan cuts.
        plan: its segments are those of ``program``, in order.
        program: what runs.
        timeline: simulation of ``program``.
        plain: simulation of the step without fxckpt.
        title: model and inputs in words, e.g. ``"ResNet, 128x3x224x224 float32, train"``.
        min_peak_bytes: smallest whole-step peak that the strategy reaches, if known.
        bound_seconds: least recomputation that any schedule within the budget must pay, if known.
        pass_seconds: name and seconds of each planning pass.
        remarks: sentences for the end of the report, e.g. what was not captured and why.
        regions: names of captured regions, when the model was not captured whole.
    """
    return Report(
        title=title,
        strategy=plan.strategy,
        budget_bytes=plan.budget_bytes,
        peak_bytes=timeline.peak_bytes,
        peak_segment=timeline.peak_segment,
        peak_phase=timeline.peak_phase,
        peak_parts=tuple(zip(timeline.categories, timeline.peak_parts, strict=True)),
        plain_peak_bytes=plain.peak_bytes,
        fixed_bytes=graph.fixed_bytes,
        min_peak_bytes=min_peak_bytes or 0,
        recompute_seconds=timeline.recompute_seconds,
        plain_seconds=timeline.plain_seconds,
        bound_seconds=bound_seconds,
        rows=segment_rows(graph, plan, program, timeline),
        kept=largest_kept(graph, program, LARGEST_KEPT),
        timeline=timeline.total_bytes,
        forward_steps=sum(phase == "forward" for _, phase, _ in timeline.labels),
        pass_seconds=tuple(pass_seconds),
        remarks=tuple(remarks),
        regions=tuple(regions),
    )
