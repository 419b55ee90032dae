"""Wires the passes that touch torch graphs: capture and functionalize, score, and at the end rewrite."""

from __future__ import annotations

import dataclasses
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxckpt.clock import Clock
from fxckpt.decide import Decision, Options
from fxckpt.device import Device
from fxckpt.goal import Goal
from fxckpt.joint import JointGraph
from fxckpt.passes.capture import capture
from fxckpt.passes.cost import cost
from fxckpt.passes.functionalize import functionalize
from fxckpt.passes.retrace import retrace
from fxckpt.passes.rewrite import rewrite
from fxckpt.passes.schedule import schedule
from fxckpt.plan import Graph, Plan, SegmentProgram, Timeline
from fxckpt.resize import Blueprint, Resized, Unlike
from fxckpt.shapes import Seen
from fxckpt.workspace import measure_workspaces

__all__ = ["Captured", "build_graph", "capture_region", "choose", "emit", "resize_region"]

log = logging.getLogger(__name__)
_CAPTURING = threading.RLock()  # a trace replaces a few functions of torch for its time


@dataclass(slots=True)
class Captured:
    """A region's joint graph; all plans for one input signature share it.

    Attributes:
        options: candidate plans of the first plan.
        blueprint: what ties the graph to the tape, for having it at other sizes; None if that cannot be.
        resized: of a region that was captured at other sizes before, where graph and costs come from.
        first: the region at those sizes.
        seen: what operators made of their arguments while the module was followed at other sizes.
    """

    joint: JointGraph
    clock: Clock
    tangents: frozenset[int] = frozenset()
    workspaces: dict[str, int] = field(default_factory=dict)
    options: Options | None = None
    resized: Resized | None = None
    first: Captured | None = None
    seen: Seen = field(default_factory=Seen)
    blueprint: Blueprint | None = None


def capture_region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Capture ``module`` for these inputs.

    Raises:
        CaptureError: the module cannot be followed as a whole.
    """
    with _CAPTURING:
        return _capture(module, args, kwargs)


def _capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    clock = Clock()
    trace = clock.run("capture", capture, module, args, kwargs)
    joint = clock.run("functionalize", functionalize, trace)
    captured = Captured(joint, clock)
    captured.tangents = _likely_tangents(joint)
    captured.workspaces = clock.run("workspaces", measure_workspaces, joint.nodes)
    return captured


def _likely_tangents(joint: JointGraph) -> frozenset[int]:
    """Slots of the outputs that the loss will probably use.

    A model that returns its loss beside other things is trained by that loss: if exactly one differentiable output is
    a scalar, only that one gets a gradient. The first backward tells; another pattern is planned anew.
    """
    slots = [slot for slot, tangent in enumerate(joint.slot_tangents) if tangent is not None]
    scalars = [slot for slot in slots if joint.slot_tangents[slot].meta["val"].numel() == 1]  # type: ignore[union-attr]
    return frozenset(scalars if len(scalars) == 1 else slots)


def resize_region(
    first: Captured, device: Device, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured | None:
    """The region ``first`` for inputs of other sizes, in a fraction of the time of a capture.

    Returns:
        None if ``module`` does something else for these inputs than the same operators with other numbers.
    """
    clock = Clock()
    try:
        if first.blueprint is None:
            raise Unlike("nothing was planned at the first sizes, or not all of it is on the tape")
        with _CAPTURING:
            sizes = clock.run("retrace", retrace, first.joint.tape, first.seen, module, args, kwargs)
        if sizes is None:
            return None
        found = clock.run("resize", Resized, first.blueprint, sizes, device)
    except Unlike as error:
        log.debug("cannot be resized: %s", error)
        return None
    return Captured(found.joint, clock, first.tangents, resized=found, first=first)


def build_graph(
    captured: Captured, device: Device, *, fresh_gradients: bool, extra_fixed: tuple[tuple[str, int], ...] = (),
    seconds: dict[str, float] | None = None,
) -> Graph:  # fmt: skip
    """Score the captured graph; arguments as for the cost pass."""
    options: dict[str, Any] = {"fresh_gradients": fresh_gradients, "extra_fixed": extra_fixed}
    if captured.resized is not None:
        return captured.clock.run("cost", captured.resized.graph, **options)
    workspaces, joint = captured.workspaces, captured.joint
    graph = captured.clock.run("cost", cost, joint, device, workspaces=workspaces, seconds=seconds, **options)
    if captured.blueprint is None:
        try:
            captured.blueprint = captured.clock.run("blueprint", Blueprint, joint, graph)
        except Unlike as error:
            log.debug("cannot be resized: %s", error)
    return graph


def choose(captured: Captured, graph: Graph, goal: Goal) -> Decision:
    """Decide for ``graph``; a resized one takes over from the first sizes what serves.

    Raises:
        BudgetInfeasibleError: no plan fits.
    """
    if captured.first is None:
        options = Options(graph, goal, captured.tangents)
        captured.options = captured.options or options
        decision = options.decide()
        options.search.known.clear()  # timelines are large
        return decision
    resized, first = captured.resized, captured.first.options
    assert resized is not None

    def measured(timeline: Timeline, limit: int) -> Graph | None:
        return resized.measured(graph, timeline, limit)

    if first is not None and first.serve(goal, captured.tangents):
        options = Options(graph, goal, captured.tangents, first, measured)
        taken_over = options.take_over()
        if taken_over is not None:
            return taken_over
        graph = options.graph  # with the scratch memory measured so far
    return Options(graph, goal, captured.tangents, None, measured).decide()


def emit(captured: Captured, decision: Decision) -> fx.GraphModule:
    """Rewrite the captured graph as the decision says."""
    graph, plan, clock = decision.graph, decision.plan, captured.clock

    def reschedule(index: int, present: tuple[bool, ...]) -> SegmentProgram:
        return _for_pattern(decision, index, present)

    module = clock.run("rewrite", rewrite, captured.joint, graph, decision.program, reschedule)
    log.debug("%d segments for %s", len(plan.segments), plan.strategy)
    assert isinstance(module, torch.fx.GraphModule)
    return module


def _for_pattern(decision: Decision, index: int, present: tuple[bool, ...]) -> SegmentProgram:
    """The program of segment ``index`` when only some of its tangents arrive; it saves what it saved before."""
    graph, segment, program = decision.graph, decision.plan.segments[index], decision.program.segments[index]
    arriving = frozenset(slot for slot, there in zip(program.tangents, present, strict=True) if there)
    kept = tuple(graph.nodes[value].name for value in program.saved if graph.nodes[value].phase == "forward")
    alone = Plan(decision.plan.strategy, (dataclasses.replace(segment, kept=kept),))
    slots = tuple(
        dataclasses.replace(entry, tangent=0 if slot in arriving else -1) for slot, entry in enumerate(graph.slots)
    )
    return schedule(dataclasses.replace(graph, outputs=(), slots=slots), alone).segments[0]
