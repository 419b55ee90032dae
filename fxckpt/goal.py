"""What the user asked for, and the answer if it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.errors import BudgetInfeasibleError
from fxckpt.plan import Graph, Plan, Timeline
from fxckpt.units import GIB, format_bytes

__all__ = ["Goal", "infeasible"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Strategy, budget and what to do where no plan fits.

    Attributes:
        strategy: ``"dp"``, ``"sqrtn"`` or ``"none"``.
        budget_bytes: whole-step peak, None for no limit.
        best_effort: take the plan with the smallest peak if none fits.
        plan: a plan to use instead of solving.
        name: of the model, for messages.
        inputs: of the model, for messages.
        reserve_bytes: part of the budget that no plan may use.
    """

    strategy: str
    budget_bytes: int | None
    best_effort: bool = False
    plan: Plan | None = None
    name: str = "the model"
    inputs: str = ""
    reserve_bytes: int = 0

    @property
    def limit(self) -> int | None:
        """Largest peak of a plan in bytes, None for no limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.reserve_bytes


def infeasible(goal: Goal, graph: Graph, timeline: Timeline) -> BudgetInfeasibleError:
    """The error that says what would fit; ``timeline`` has the smallest peak."""
    smallest = timeline.peak_bytes + goal.reserve_bytes
    label = timeline.labels[timeline.peak_index]
    node = next((node for node in graph.nodes if node.name == label[2]), None)
    fixed = graph.fixed_bytes + sum(slot.bytes for slot in graph.slots if slot.owner == -1 and graph.fresh_gradients)
    name = f"{goal.name} on {goal.inputs}" if goal.inputs else goal.name
    lines = [
        f"no plan fits {format_bytes(goal.budget_bytes or 0)} for {name}.",
        f"  smallest reachable peak  {format_bytes(smallest)}",
        f"  fixed                    {format_bytes(fixed)}  parameters, gradients, buffers, inputs, optimizer",
        f"  largest segment          {format_bytes(max(timeline.segment_peaks) - graph.fixed_bytes)}  "
        f"{node.module + ', ' + node.source if node is not None and node.source else label[2]}",
        f"  Try: budget_gb={-(-smallest * 1000 // GIB) / 1000:g}, or a smaller batch.",
    ]
    if goal.reserve_bytes:
        lines.insert(2, f"  of that, reserved        {format_bytes(goal.reserve_bytes)}")
    return BudgetInfeasibleError(
        "\n".join(lines), budget_bytes=goal.budget_bytes or 0, min_peak_bytes=smallest, fixed_bytes=fixed
    )
