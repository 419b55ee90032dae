"""Explains a plan: a row for each segment, and why the largest kept values are kept. Works without torch."""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt import tables
from fxckpt.plan import Graph, Node, Plan, Program, Timeline

__all__ = ["KeptValue", "SegmentRow", "largest_kept", "segment_rows"]


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One top-level segment.

    Attributes:
        number: position among the segments.
        first: module path of its first operation.
        last: module path of its last operation.
        ops: operations that compute something (views are free).
        plain_bytes: what the plain step keeps of its results for backward.
        kept_bytes: what the planned step keeps of its results and generator states.
        live_bytes: highest live memory of the whole step while its backward runs.
        recomputed: operators that its backward runs again, by name, with repetitions.
        extra_seconds: predicted time of these.
    """

    number: int
    first: str
    last: str
    ops: int
    plain_bytes: int
    kept_bytes: int
    live_bytes: int
    recomputed: tuple[str, ...]
    extra_seconds: float


@dataclass(frozen=True, slots=True)
class KeptValue:
    """One value that is kept from forward to backward, and why."""

    name: str
    bytes: int
    module: str
    source: str
    reason: str


def segment_rows(graph: Graph, plan: Plan, program: Program, timeline: Timeline) -> tuple[SegmentRow, ...]:
    """Rows of the segments of ``plan`` in order; arguments as of :func:`fxckpt.report.build_report`."""
    read = {value for node in graph.nodes if node.phase == "backward" for value in node.inputs}
    plain = _storages(graph, read)
    saved = _storages(graph, {value for part in program.segments for value in part.saved})
    rows = []
    for number, (segment, part) in enumerate(zip(plan.segments, program.segments, strict=True)):
        nodes = [graph.nodes[value] for value in graph.forward[segment.start : segment.stop]]
        made = {storage for node in nodes for storage in node.allocates}
        again = [graph.nodes[step.value] for step in part.backward if step.op in ("run", "replay")]
        again = [node for node in again if node.phase == "forward" and not node.view]
        paths = [node.module for node in nodes if node.module] or ["model"]
        rows.append(
            SegmentRow(
                number=number,
                first=paths[0],
                last=paths[-1],
                ops=sum(not node.view for node in nodes),
                plain_bytes=sum(graph.storage_bytes[storage] for storage in made & plain),
                kept_bytes=sum(graph.storage_bytes[storage] for storage in made & saved)
                + len(part.states) * graph.state_bytes,
                live_bytes=timeline.segment_peaks[number] if timeline.segment_peaks else 0,
                recomputed=tuple(tables.short_op(node.op) for node in again),
                extra_seconds=sum(node.seconds for node in again),
            )
        )
    return tuple(rows)


def _storages(graph: Graph, values: set[int]) -> set[int]:
    nodes = (graph.nodes[value] for value in values if value < len(graph.nodes))
    return {storage for node in nodes for storage in node.storages}


def largest_kept(graph: Graph, program: Program, count: int) -> tuple[KeptValue, ...]:
    """The ``count`` largest values kept for backward, one for each storage, with the reason."""
    positions = {value: position for position, value in enumerate(graph.forward)}
    crossing = {value for part in program.segments for value in part.inputs}
    outputs = set(graph.outputs)
    found: dict[int, KeptValue] = {}
    for part in program.segments:
        for value in part.saved:
            node = graph.nodes[value]
            fresh = [storage for storage in node.storages if storage not in found]
            if value in positions and fresh:
                size = sum(graph.storage_bytes[storage] for storage in fresh)
                reason = _reason(node, value in crossing, value in outputs)
                kept = KeptValue(node.name, size, node.module, tables.short_source(node.source), reason)
                found.update(dict.fromkeys(fresh, kept))
    largest = sorted(set(found.values()), key=lambda kept: (-kept.bytes, kept.name))
    return tuple(largest[:count])


def _reason(node: Node, crosses: bool, leaves: bool) -> str:
    if not node.recomputable:
        return "what it was computed from may have changed by backward"
    if leaves:
        return "it is an output of the model"
    if crosses:
        return "later segments start from it"
    if node.random:
        return "random, and cheaper to keep than to draw again"
    return "backward reads it, and it is dearer to recompute than others of its size"
