"""Plans as segments: what a user's plan must be like, the plan that keeps everything, cuts at outputs, names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fxckpt.errors import PlanMismatchError
from fxckpt.plan import Chain, Graph, Plan, Segment

__all__ = ["check", "keep_everything", "named", "output_ends", "split"]

MAX_SPLITS = 8  # a model with more differentiable outputs (a cache for each layer) is not cut at each of them


def check(graph: Graph, segments: tuple[Segment, ...], start: int, stop: int) -> None:
    """Refuse segments that do not cover ``start`` to ``stop``, cut where one must not, or keep what is not there."""
    names = {graph.nodes[value].name for value in graph.forward}
    at = start
    for segment in segments:
        unknown = [name for name in segment.kept if name not in names]
        if unknown:
            raise PlanMismatchError(f"the plan keeps {unknown[0]!r}, which the captured graph does not have")
        if segment.start != at or segment.stop <= at:
            raise PlanMismatchError(f"the plan's segments do not follow one another at position {segment.start}")
        at = segment.stop
        if at < stop and any(low < at <= high for low, high in graph.forbidden):
            raise PlanMismatchError(f"the plan cuts the graph at position {at}, inside one operation's results")
        if segment.inner:
            check(graph, segment.inner, segment.start, segment.stop)
    if at != stop:
        raise PlanMismatchError(f"the plan covers {at} of {stop} positions of the captured graph")


def keep_everything(graph: Graph, chain: Chain) -> Plan:
    """Stage by stage, nothing is recomputed."""
    segments = []
    for stage in chain.stages:
        values = [graph.nodes[value] for value in graph.forward[stage.start : stage.stop]]
        segments.append(Segment(stage.start, stage.stop, tuple(node.name for node in values if not node.container)))
    return Plan("none", tuple(segments))


def output_ends(graph: Graph) -> tuple[int, ...]:
    """Where every plan is cut: right behind each differentiable output.

    Then an output that later layers read (the logits before the loss) is the very tensor that they read, so that
    gradients with respect to it can be asked for; and a head whose output gets no gradient is a segment that backward
    never enters, as in eager.
    """
    position = {value: index for index, value in enumerate(graph.forward)}
    ends = {position[slot.value] + 1 for slot in graph.slots if slot.tangent >= 0 and slot.value in position}
    ends -= {index for low, high in graph.forbidden for index in range(low + 1, high + 1)}
    return tuple(sorted(ends)) if len(ends) <= MAX_SPLITS else ()


def split(graph: Graph, plan: Plan, ends: Sequence[int]) -> Plan:
    """``plan`` cut at ``ends``."""
    segments: list[Segment] = []
    for segment in plan.segments:
        cuts_inside = [end for end in ends if segment.start < end < segment.stop and not segment.inner]
        for start, stop in zip([segment.start, *cuts_inside], [*cuts_inside, segment.stop], strict=True):
            names = {graph.nodes[value].name for value in graph.forward[start:stop]}
            kept = tuple(name for name in segment.kept if name in names)
            segments.append(dataclasses.replace(segment, start=start, stop=stop, kept=kept))
    return dataclasses.replace(plan, segments=tuple(segments))


def named(graph: Graph, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """``segments``, each with a name that tells where in the model it lies."""
    return tuple(
        dataclasses.replace(s, name=s.name or _segment_name(graph, s), inner=named(graph, s.inner)) for s in segments
    )


def _segment_name(graph: Graph, segment: Segment) -> str:
    """Module paths of the first and the last operation, shortened to their common part if there is one."""
    modules = [graph.nodes[value].module for value in graph.forward[segment.start : segment.stop]]
    modules = [module for module in modules if module]
    if not modules:
        return ""
    first, last = modules[0], modules[-1]
    return first if first == last else f"{first} .. {last}"
