"""Plans a model for each kind of call and runs the planned graphs."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxckpt import _torch
from fxckpt.captures import Captures
from fxckpt.clock import without_collection
from fxckpt.decide import Decision, Options, fingerprint
from fxckpt.device import Device
from fxckpt.double import DoubleReplay
from fxckpt.errors import CaptureError, FxckptError, VerificationError
from fxckpt.goal import Goal
from fxckpt.guard import Guard
from fxckpt.joint import JointGraph
from fxckpt.measure import compare_steps
from fxckpt.objects import restored
from fxckpt.pipeline import Captured, build_graph, choose, emit
from fxckpt.plan import Plan
from fxckpt.regions import Regions, RegionUse, combined_plan, thin
from fxckpt.report import Report, build_report
from fxckpt.report_regions import RegionsReport
from fxckpt.runtime import RegionCall
from fxckpt.signature import Call, read_call
from fxckpt.state import PURE_HOOKS, ModuleState, has_hooks, silent_hooks, storage_bytes, unchanged
from fxckpt.template import Template
from fxckpt.workspace import measure_seconds

__all__ = ["Planner", "Settings"]

log = logging.getLogger(__name__)
MAX_PATTERNS = 8  # how often a model may be planned anew because its loss uses other outputs than thought


@dataclass(slots=True)
class Settings:
    """Options of ``auto_checkpoint`` as they are needed at planning time."""

    strategy: str
    budget_bytes: int | None
    reserve_bytes: int
    best_effort: bool
    plan: Plan | None
    device: Device
    optimizer_bytes: int = 0
    max_signatures: int = 16
    verbose: int = 0
    verify: bool = False
    measure: bool = False
    leave: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()


class Entry:
    """A planned graph for one kind of call, with what is needed to run it."""

    def __init__(
        self, captured: Captured, decision: Decision, graph_module: fx.GraphModule, state: ModuleState
    ) -> None:
        self.decision, self.graph_module = decision, graph_module
        self.replay = DoubleReplay(captured.joint, decision.graph, decision.program)
        joint = captured.joint
        self.state_places = [held.places[0] for held in state.tensors]
        count = len(self.state_places)
        self.argument_indices = [int(i.name) for i in joint.inputs[count:] if i.kind == "argument"]
        self.constants = list(joint.constants.values())
        places = {id(fake): index for index, fake in enumerate(joint.fakes)}
        self.output = Template(joint.output, places)
        modules = dict(state.modules)
        self.seen: set[int] = set()
        self.watched: set[int] = set()
        self._watch()
        self.assigned = [(modules[path], name, Template(value, places)) for path, name, value in joint.assigned]

    def _watch(self) -> None:
        """Let segments tell which outputs the loss uses, as far as their gradients come from nowhere else."""
        decision = self.decision
        segments = list(self.graph_module.children())
        for segment, program in zip(segments, decision.program.segments, strict=True):
            own = [
                (place, slot)
                for place, (slot, expected) in enumerate(zip(program.tangents, program.expected, strict=True))
                if decision.graph.slots[slot].tangent >= 0 and (slot in decision.tangents or not expected)
            ]
            if own:
                self.watched.update(slot for _, slot in own)
                segment.observer = functools.partial(self._observe, own)  # type: ignore[assignment]

    def _observe(self, own: list[tuple[int, int]], present: tuple[bool, ...]) -> None:
        self.seen.update(slot for place, slot in own if present[place])

    def arrived(self) -> frozenset[int]:
        """Slots of the outputs that got a gradient so far; those that were planned for if there was no backward yet."""
        planned = self.decision.tangents
        return (planned - self.watched) | self.seen if self.seen else planned

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward."""
        return self.run(self.tensors(pytree.tree_leaves((args, kwargs))))

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        """All that the graph reads: the model's tensors as they are now, then those among the flat inputs."""
        tensors = [entries[key] for entries, key in self.state_places]
        tensors += [leaves[index] for index in self.argument_indices]
        tensors += self.constants
        return tensors

    def run(self, tensors: list[Tensor]) -> Any:
        """One forward from all that the graph reads."""
        results: list[Tensor] = self.graph_module(RegionCall(self.replay, tensors), *tensors)
        for module, name, template in self.assigned:
            setattr(module, name, template.fill(results))
        return self.output.fill(results)


@dataclass(slots=True)
class Outcome:
    """What planning a call led to: a plan, its report, and for a model captured whole the entry that runs it."""

    make_report: Callable[[], Report | RegionsReport]
    entry: Entry | None = None
    guard: Guard | None = None
    _report: Report | RegionsReport | None = None

    @property
    def plan(self) -> Plan:
        """The plan; of one for other sizes the peak is found out now."""
        if self.entry is None:
            return self.report.plan  # type: ignore[union-attr]
        self.entry.decision.refine()
        return self.entry.decision.plan

    @property
    def report(self) -> Report | RegionsReport:
        """Made when it is first asked for: it tells more than planning needs to know."""
        if self._report is None:
            self._report = self.make_report()
        return self._report


class Planner:
    """Plans a model per input signature and runs the planned graphs. One per returned model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outcomes: OrderedDict[Any, Outcome] = OrderedDict()
        self.captures = Captures(settings.device, settings.max_signatures)
        self.regions: Regions | None = None
        self.lock = threading.RLock()
        self.latest: Outcome | None = None
        self.tried: set[frozenset[int]] = set()
        self.planned = False
        self.told: set[str] = set()

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of ``model`` (the plain view)."""
        if not torch.is_grad_enabled() or not model.training:
            return model.forward(*args, **kwargs)
        if _torch.transform_active():
            self._step_aside("a function transform or forward-mode differentiation is running")
            return model.forward(*args, **kwargs)
        # A capture puts fake tensors into the model for its time, which no other thread may meet.
        with self.lock:
            if _torch.watched_globally():
                self._step_aside("hooks on all modules are registered")
                return model.forward(*args, **kwargs)
            entry, leaves = self._find(model, args, kwargs)
            if entry is None:
                assert self.regions is not None
                return self.regions.run(model, args, kwargs)
            tensors = entry.tensors(leaves)
        return entry.run(tensors)

    def _step_aside(self, why: str) -> None:
        if why not in self.told:
            self.told.add(why)
            warnings.warn(f"fxckpt: {why}, so the model runs as it is, without saving memory", stacklevel=4)

    def _find(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry | None, list[Any]]:
        """What runs this call, planned now if need be, with the flat inputs; no entry if the model runs in regions."""
        if self.regions is not None and self.regions.settled:
            return None, []
        latest = self.latest
        if latest is not None and latest.entry is not None and latest.guard is not None:
            leaves = latest.guard.leaves(args, kwargs)
            if leaves is not None and not self._surprised(latest):
                return latest.entry, leaves
        call = read_call(model, args, kwargs)
        known = self.outcomes.get(call.key)
        if known is not None and self._surprised(known):
            self._learn(call, known)
            known = None
        if known is not None:
            self.outcomes.move_to_end(call.key)
        outcome = known or self.plan(model, args, kwargs, call)
        return outcome.entry, call.leaves

    def verify(self, model: nn.Module, planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once, before the first step: run it plain and planned and compare.

        Raises:
            VerificationError: they differ; names what does.
        """
        self.settings.verify = False
        result = compare_steps(model, planned, args, kwargs, seed=None)
        if not result.equal:
            names = ", ".join(result.differences[:8]) + (", ..." if len(result.differences) > 8 else "")
            raise VerificationError(f"the planned step of {type(model).__name__} differs from the plain one in {names}")

    def _surprised(self, outcome: Outcome) -> bool:
        """Whether backward got gradients for other outputs than planned, in a way not yet tried."""
        if outcome.entry is None or len(self.tried) > MAX_PATTERNS:
            return False
        arrived = outcome.entry.arrived()
        return arrived != outcome.entry.decision.tangents and arrived not in self.tried

    def _learn(self, call: Call, outcome: Outcome) -> None:
        """Forget the plan of this call and expect the gradients that really arrived."""
        entry = outcome.entry
        assert entry is not None
        with self.lock:
            self.tried |= {entry.arrived(), entry.decision.tangents}
            self.captures.known[call.structure][0].tangents = entry.arrived()
            self.outcomes.pop(call.key, None)
            if self.latest is outcome:
                self.latest = None

    def plan(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
    ) -> Outcome:
        """Plan for these inputs, or return what was planned before."""
        call = call or read_call(model, args, kwargs)
        with self.lock:
            outcome = self.outcomes.get(call.key)
            if outcome is None:
                with without_collection():
                    outcome = self._plan(model, args, kwargs, call)
                self.outcomes[read_call(model, args, kwargs).key] = outcome  # a capture may settle some attribute
                while len(self.outcomes) > self.settings.max_signatures:
                    self.outcomes.popitem(last=False)
            outcome.guard = Guard(model, args, kwargs)
            self.latest = outcome
            return outcome

    def outcome(self) -> Outcome:
        """The latest plan with its report.

        Raises:
            FxckptError: nothing has been planned yet.
        """
        if self.latest is None:
            raise FxckptError("nothing is planned yet: pass example inputs or run one training step first")
        return self.latest

    def _plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Outcome:
        settings = self.settings
        if settings.leave or settings.regions:
            asked = CaptureError("asked to leave modules out", reason="as asked")
            return self._plan_regions(model, args, kwargs, asked)
        try:
            captured, state = self.captures.get(model, args, kwargs, call)
        except CaptureError as error:
            return self._plan_regions(model, args, kwargs, error)
        graph = build_graph(
            captured, settings.device, fresh_gradients=not call.has_gradients,
            extra_fixed=_extra_fixed(model, settings), seconds=self._seconds(captured),
        )  # fmt: skip
        goal = self._goal(model, _inputs_text(captured.joint))
        if goal.plan is not None and self.planned and goal.plan.fingerprint != fingerprint(graph):
            goal = replace(goal, plan=None)  # a given plan is for the first kind of input, with or without gradients
        decision = choose(captured, graph, goal)
        self.planned = True
        entry = Entry(captured, decision, emit(captured, decision), state)
        make_report = functools.partial(_report, type(model).__name__, captured, decision)
        return self._done(model, Outcome(make_report, entry))

    def _seconds(self, captured: Captured) -> dict[str, float]:
        return measure_seconds(captured.joint) if self.settings.measure and captured.first is None else {}

    def _done(self, model: nn.Module, outcome: Outcome) -> Outcome:
        if log.isEnabledFor(logging.INFO):
            log.info("planned %s: peak %d bytes", type(model).__name__, outcome.plan.peak_bytes)
        if self.settings.verbose:
            print(outcome.report)
        return outcome

    def _goal(self, model: nn.Module, inputs: str) -> Goal:
        settings = self.settings
        best = settings.best_effort or bool(self.tried)  # in the middle of training a warning must do
        return Goal(
            settings.strategy, settings.budget_bytes, best, settings.plan, type(model).__name__, inputs,
            settings.reserve_bytes,
        )  # fmt: skip

    # -- models that are not captured whole ------------------------------------------------------------------------

    def _plan_regions(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: CaptureError
    ) -> Outcome:
        goal = self._goal(model, "")
        given = dict(goal.plan.regions) if goal.plan is not None else {}

        def make(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> RegionUse:
            return self._region(path, module, args, kwargs, call, given)

        regions = Regions(make, read_call, goal, self.settings.leave, self.settings.regions)
        with unchanged(model), restored(model):
            _try_out(regions, model, args, kwargs, error)
        if not regions.uses:
            raise error
        held = ModuleState.collect(model)
        base = storage_bytes([*(item.tensor for item in held.tensors), *pytree.tree_leaves((args, kwargs))])
        extra = sum(size for _, size in _extra_fixed(model, self.settings))
        missing = sum(storage_bytes([p]) for p in model.parameters() if p.requires_grad and p.grad is None)
        peak = regions.allocate(base + extra, missing)
        self.regions = regions
        title = f"{type(model).__name__}, in regions, train"
        report = RegionsReport.of(
            title, combined_plan(regions, peak), list(regions.uses.values()), error, regions.left,
            regions.plain_peak(base + extra, missing),
        )  # fmt: skip
        return self._done(model, Outcome(lambda: report))

    def _region(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call,
        given: dict[str, Plan],
    ) -> RegionUse:  # fmt: skip
        if any(has_hooks(child, PURE_HOOKS[:1]) for child in module.modules() if child is not module):
            # A hook of a library may be idle now and active in a later call, for reasons that lie outside the region.
            raise CaptureError(f"a module in {path!r} carries hooks", module=path, reason="hooks on a submodule")
        captured, state = self.captures.get(module, args, kwargs, call)
        graph = build_graph(
            captured, self.settings.device, fresh_gradients=not call.has_gradients, seconds=self._seconds(captured)
        )
        if all(graph.nodes[value].view for value in graph.forward):
            raise CaptureError("nothing to plan", reason="too small")
        goal = Goal(self.settings.strategy, None, plan=given.get(path), name=path)
        try:
            options = Options(graph, goal, captured.tangents)
        except FxckptError:  # the given plan is for another kind of call of this module
            options = Options(graph, Goal(self.settings.strategy, None, name=path), captured.tangents)

        def build(decision: Decision) -> Entry:
            return Entry(captured, decision, emit(captured, decision), state)

        return RegionUse(path, options, thin(len(options.search.plans)), 0, build)


def _try_out(
    regions: Regions, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], why: CaptureError
) -> None:
    """Run forward once to meet its regions, without user hooks: they fire when the model is really called."""
    try:
        with silent_hooks(model):
            regions.try_out(model, args, kwargs)
    except FxckptError:
        raise
    except Exception as error:
        if any(has_hooks(module) for module in model.modules()):
            regions.try_out(model, args, kwargs)  # forward cannot do without what a hook does
            return
        model.forward(*args, **kwargs)  # if that fails too, it is not for the regions
        raise CaptureError(
            f"{why}; nor does it run in regions: {type(error).__name__}: {error}",
            module=why.module, reason=why.reason, source=why.source,
        ) from error  # fmt: skip


def _report(name: str, captured: Captured, decision: Decision) -> Report:
    decision.refine()
    title = ", ".join(part for part in (name, _inputs_text(captured.joint), "train") if part)
    return build_report(
        decision.graph, decision.plan, decision.program, decision.timeline, decision.plain, title=title,
        min_peak_bytes=decision.min_peak_bytes(), bound_seconds=decision.bound_seconds(),
        pass_seconds=tuple(captured.clock.seconds + decision.seconds()),
    )  # fmt: skip


def _extra_fixed(model: nn.Module, settings: Settings) -> tuple[tuple[str, int], ...]:
    gradients = storage_bytes(parameter.grad for parameter in model.parameters())
    return ("gradients", gradients), ("optimizer", settings.optimizer_bytes)


def _inputs_text(joint: JointGraph) -> str:
    texts = []
    for entry, node in zip(joint.inputs, joint.nodes, strict=False):
        if entry.kind == "argument":
            kind = str(node.meta["val"].dtype).removeprefix("torch.")
            texts.append("x".join(map(str, joint.shape(node))) + " " + kind)
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")
