"""The data that goes between passes: frozen dataclasses of ints, floats, strings and tuples.

No torch here, so that solvers run, and are tested, without it. The word *value* means the index of
a node in :attr:`Graph.nodes`; a *slot* is the gradient of one differentiable value, and its running
total is the value ``len(graph.nodes) + slot``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from fxckpt.errors import PlanMismatchError
from fxckpt.moments import Growth

__all__ = [
    "Chain",
    "Frontier",
    "GradNode",
    "Graph",
    "MenuPoint",
    "Node",
    "Plan",
    "Program",
    "Segment",
    "SegmentProgram",
    "Slot",
    "Stage",
    "Step",
    "Timeline",
]

PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Node:
    """One operation (or input) of the joint graph with its costs.

    Attributes:
        name: unique name, stable between two captures of the same model and signature.
        op: operator, e.g. ``"aten.mm.default"``; ``"input"`` for inputs, ``"tangent"`` for the gradients
            that arrive from outside.
        phase: ``"input"``, ``"forward"`` or ``"backward"``.
        inputs: values read, slot totals among them (backward nodes only).
        state_inputs: inputs of the region that only the first execution touches: running statistics, which a
            recomputation leaves alone. They are not among ``inputs``.
        storages: storages that the value lives in (several for an operator with several results).
        allocates: the subset of ``storages`` that this node creates.
        seconds: estimated time of one execution.
        workspace_bytes: scratch memory the kernel holds while it runs, beyond its results.
        view: the value lies in storages of its inputs; running it costs nothing.
        container: the value is a tuple of tensors; only its ``getitem`` nodes can be kept or cross a cut.
        random: draws from a generator; recomputing it needs the generator's saved state.
        recomputable: False if its inputs may have changed by backward, or if it has side effects.
        keepable: False for values that must not outlive forward (e.g. model outputs that callers may overwrite).
        inplace: the kernel can write its result over the storage of its first input.
        dense: the value fills its storage without overlap, so that it may be added to in place.
        flops: floating point operations.
        moved_bytes: bytes read and written.
        module: path of the module that issued it.
        source: ``file:line`` of the user's code.
    """

    name: str
    op: str
    phase: str
    inputs: tuple[int, ...] = ()
    state_inputs: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    seconds: float = 0.0
    workspace_bytes: int = 0
    view: bool = False
    container: bool = False
    random: bool = False
    recomputable: bool = True
    keepable: bool = True
    inplace: bool = False
    dense: bool = True
    flops: int = 0
    moved_bytes: int = 0
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """Gradient of one differentiable value: the sum of contributions in the order in which they arrive.

    Attributes:
        value: the forward or input value it is the gradient of, or -1 if that value never appears in the graph.
        owner: index into :attr:`Graph.grad_nodes` of the autograd node that consumes the total, -1 for leaves,
            -2 if nothing consumes it.
        tangent: node index of the gradient that arrives from outside (the value is an output of the model), or -1.
        bytes: size of the gradient.
        seconds: estimated time of adding one contribution to the total.
    """

    value: int
    owner: int
    tangent: int = -1
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GradNode:
    """One autograd node: when the totals of ``reads`` are known, run ``nodes``, then contribute.

    Attributes:
        position: position in :attr:`Graph.forward` of the operation that created it. It belongs to the
            segment that holds this position.
        reads: slots whose totals it consumes.
        nodes: backward nodes to run, in order.
        contributes: pairs of slot and value, in order of arrival.
    """

    name: str
    position: int
    reads: tuple[int, ...]
    nodes: tuple[int, ...]
    contributes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The joint forward and backward graph of a region, with costs.

    Attributes:
        nodes: inputs first, then forward, then backward nodes.
        forward: values of the forward nodes in execution order; *positions* index this tuple.
        grad_nodes: autograd nodes in execution order of backward.
        slots: gradients.
        storage_bytes: size of each storage as the allocator counts it.
        outputs: values that leave the region (forward nodes or inputs).
        passing: values that the caller holds until forward is over and the loss is known, no longer.
        required: forward values that must be run in forward although no output needs them (mutations).
        forbidden: half-open ranges ``(low, high]`` of positions at which the forward must not be cut;
            a cut at ``i`` separates positions below ``i`` from ``i`` and above.
        fixed_bytes: memory of parameters, buffers, inputs, existing gradients and optimizer state.
        fixed: parts of ``fixed_bytes`` by name.
        fresh_gradients: parameter gradients returned by backward stay in memory until the step ends
            (``.grad`` was None); otherwise they are added to the existing ones and freed.
        state_bytes: size of a saved generator state.
    """

    nodes: tuple[Node, ...]
    forward: tuple[int, ...]
    grad_nodes: tuple[GradNode, ...]
    slots: tuple[Slot, ...]
    storage_bytes: tuple[int, ...]
    outputs: tuple[int, ...]
    passing: tuple[int, ...] = ()
    required: tuple[int, ...] = ()
    forbidden: tuple[tuple[int, int], ...] = ()
    fixed_bytes: int = 0
    fixed: tuple[tuple[str, int], ...] = ()
    fresh_gradients: bool = True
    state_bytes: int = 5056

    def total(self, slot: int) -> int:
        """Value of the running total of ``slot``."""
        return len(self.nodes) + slot

    def part_bytes(self) -> list[int]:
        """Sizes of all that takes memory: storages, totals of gradients, scratch memory; the last entry is zero."""
        totals, scratch = (slot.bytes for slot in self.slots), (node.workspace_bytes for node in self.nodes)
        return [*self.storage_bytes, *totals, *scratch, 0]

    def part_of_total(self, slot: int) -> int:
        """Entry of :meth:`part_bytes` for the running total of ``slot``."""
        return len(self.storage_bytes) + slot

    def part_of_scratch(self, value: int) -> int:
        """Entry of :meth:`part_bytes` for what the operator of ``value`` needs while it runs."""
        return len(self.storage_bytes) + len(self.slots) + value

    def executed(self) -> set[int]:
        """What forward has to run, and the inputs of that: all that outputs and mutations are computed from."""
        seen: set[int] = set()
        stack = [*self.outputs, *self.passing, *self.required]
        while stack:
            value = stack.pop()
            if value not in seen:
                seen.add(value)
                stack += self.nodes[value].inputs
        return seen


@dataclass(frozen=True, slots=True)
class Stage:
    """Forward positions ``start`` to ``stop`` (exclusive) between two neighbouring cut points.

    Attributes:
        boundary: storages that cross the cut at ``stop`` towards later forward nodes or outputs.
        key: equal for stages with the same structure, shapes and costs; their menus are shared.
    """

    start: int
    stop: int
    boundary: tuple[int, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """The forward cut into stages at clean cut points."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class MenuPoint:
    """One way of treating a stage, or a window of neighbouring stages: what it keeps for backward and what that costs.

    Attributes:
        kept: values to keep, results of the stage that cross its end among them if backward reads them.
        kept_bytes: their storages beyond the boundary, each counted once, and saved generator states.
        extra_seconds: time of what backward recomputes.
        forward_peak_bytes: highest memory in forward above what was live before the stage.
        backward_peak_bytes: highest memory in backward above what is kept for earlier stages and the gradients
            that are there when it starts.
        stages: number of stages of the window that starts with this stage.
        idle_seconds: time of the forward operations that make nothing of what is kept; a replay that ends with the
            window leaves them out.
        growth: what the numbers are at other sizes of the inputs; None if that is not known.
    """

    kept: tuple[int, ...]
    kept_bytes: int
    extra_seconds: float
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    stages: int = 1
    idle_seconds: float = 0.0
    growth: Growth | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive forward positions that run through one recompute function.

    Forward runs ``[start, stop)`` and saves ``kept``. Without ``inner``, backward recomputes what it reads and does
    not find among ``kept`` and the segment's inputs, each value right before its first use. With ``inner`` (which
    must partition ``[start, stop)``) backward first replays the forward of the inner segments in order, each keeping
    its own ``kept``, and then runs their backwards in reverse order; inner segments may nest further.

    Attributes:
        kept: names of the nodes whose values are kept.
    """

    start: int
    stop: int
    kept: tuple[str, ...] = ()
    inner: tuple[Segment, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the forward is cut and what is kept; all that ``rewrite`` needs besides the graph.

    Attributes:
        strategy: ``"dp"``, ``"sqrtn"`` or ``"none"``.
        segments: partition of all forward positions.
        fingerprint: of the captured graph; a plan is refused for another graph.
        budget_bytes: whole-step peak that was asked for, 0 without a budget.
        peak_bytes: predicted whole-step peak.
        extra_seconds: predicted time of recomputation.
        regions: for a model that is not captured whole, (module path, plan) of each region; ``segments`` is then empty.
    """

    strategy: str
    segments: tuple[Segment, ...]
    fingerprint: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    extra_seconds: float = 0.0
    regions: tuple[tuple[str, Plan], ...] = ()

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back."""
        return json.dumps({"format": PLAN_FORMAT, **dataclasses.asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by :meth:`to_json`.

        Raises:
            PlanMismatchError: the text is not a plan of this format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data.pop("format") != PLAN_FORMAT:
                raise PlanMismatchError(f"the plan has another format than {PLAN_FORMAT}; make it anew")
            return _plan(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanMismatchError(f"not a fxckpt plan: {error}") from error


def _plan(data: dict[str, Any]) -> Plan:
    segments = tuple(_segment(entry) for entry in data["segments"])
    regions = tuple((path, _plan(plan)) for path, plan in data.get("regions", ()))
    return Plan(**{**data, "segments": segments, "regions": regions})


def _segment(data: dict[str, Any]) -> Segment:
    inner = tuple(_segment(entry) for entry in data["inner"])
    return Segment(data["start"], data["stop"], tuple(data["kept"]), inner, data["name"])


@dataclass(frozen=True, slots=True)
class Frontier:
    """Candidate plans of one strategy, independent of the budget.

    The pipeline simulates each and takes the cheapest that fits. Because the candidates do not depend on the
    budget, a smaller budget never gets a faster plan, and the smallest simulated peak is a budget that succeeds.
    """

    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a program.

    Attributes:
        op: ``"run"`` executes node ``value``; ``"record"`` saves the generator state before random node ``value`` and
            ``"replay"`` runs that node from the saved state; ``"add"`` adds ``value`` to the total of ``slot`` (or
            starts it); ``"zero"`` starts the total of ``slot`` with zeros.
        inplace: the result is written over the storage of the first input (run) or of the old total (add).
        frees: values whose last use this is.
    """

    op: str
    value: int
    slot: int = -1
    inplace: bool = False
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Straight-line forward and backward of one segment.

    Attributes:
        inputs: values of earlier segments or of the region that forward or backward reads.
        outputs: values that later segments or the caller read.
        saved: values carried from forward to backward; random nodes in ``states`` carry their generator state.
        tangents: slots whose gradient may arrive from later segments or from outside.
        expected: for each of ``tangents`` whether ``backward`` is made for its arrival.
        gradients: for each of ``inputs`` the slot that backward returns for it, or -1.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: tuple[Step, ...]
    saved: tuple[int, ...]
    states: tuple[int, ...]
    tangents: tuple[int, ...]
    expected: tuple[bool, ...]
    backward: tuple[Step, ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All segments in forward order, and after which segment each value is freed."""

    segments: tuple[SegmentProgram, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes after every instruction of forward, then backward.

    Attributes:
        total_bytes: live bytes at the highest moment within each instruction.
        categories: names of the parts that make up the peak, in printing order.
        peak_parts: bytes of each category at the peak; they sum to ``peak_bytes``.
        peak_index: index of the peak in ``total_bytes``.
        peak_segment: segment that runs at the peak.
        labels: for each instruction ``(segment index, phase, node name)``.
        recompute_seconds: time of all nodes that backward runs again.
        plain_seconds: time of forward and backward without recomputation.
    """

    total_bytes: tuple[int, ...]
    peak_bytes: int
    peak_index: int
    peak_segment: int
    peak_phase: str
    categories: tuple[str, ...]
    peak_parts: tuple[int, ...]
    labels: tuple[tuple[int, str, str], ...] = ()
    recompute_seconds: float = 0.0
    plain_seconds: float = 0.0
    segment_peaks: tuple[int, ...] = field(default=())
