"""The model that ``auto_checkpoint`` returns: an instance of the same class whose forward runs planned graphs."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt import _torch
from fxckpt.device import Device
from fxckpt.double import DoubleReplay
from fxckpt.errors import FxckptError
from fxckpt.joint import JointGraph
from fxckpt.pipeline import Captured, Decision, Goal, build_graph, capture_region, decide, emit
from fxckpt.plan import Plan
from fxckpt.report import Report, build_report
from fxckpt.runtime import RegionCall
from fxckpt.signature import Call, read_call
from fxckpt.state import ModuleState
from fxckpt.template import Template

__all__ = ["Planner", "Settings", "make_planned", "planner_of", "plain_view"]

log = logging.getLogger(__name__)
SLOT = "_fxckpt_planner"


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
    known: dict[str, Plan] = field(default_factory=dict)


class Entry:
    """A planned graph for one kind of call, with what is needed to run it."""

    def __init__(self, captured: Captured, decision: Decision, graph_module: fx.GraphModule, state: ModuleState) -> None:
        self.decision, self.graph_module = decision, graph_module
        self.report: Report | None = None
        self.replay = DoubleReplay(captured.joint, decision.graph, decision.program)
        joint = captured.joint
        self.state_places = [held.places[0] for held in state.tensors]
        count = len(self.state_places)
        self.argument_indices = [int(i.name) for i in joint.inputs[count:] if i.kind == "argument"]
        self.constants = list(joint.constants.values())
        places = {id(fake): index for index, fake in enumerate(joint.fakes)}
        self.output = Template(joint.output, places)
        modules = dict(state.modules)
        self.assigned = [(modules[path], name, Template(value, places)) for path, name, value in joint.assigned]

    def run(self, leaves: list[Any]) -> Any:
        """One forward."""
        tensors = [entries[key] for entries, key in self.state_places]
        tensors += [leaves[index] for index in self.argument_indices]
        tensors += self.constants
        results: list[Tensor] = self.graph_module(RegionCall(self.replay, tensors), *tensors)
        for module, name, template in self.assigned:
            setattr(module, name, template.fill(results))
        return self.output.fill(results)


class Planner:
    """Plans a model per input signature and runs the planned graphs. One per returned model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.captures: OrderedDict[Any, tuple[Captured, ModuleState]] = OrderedDict()
        self.lock = threading.RLock()
        self.latest: Entry | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of ``model`` (the plain view)."""
        if not torch.is_grad_enabled() or not model.training or _torch.functorch_active():
            return model.forward(*args, **kwargs)
        call = read_call(model, args, kwargs)
        entry = self.entries.get(call.key)
        if entry is None:
            entry = self.plan(model, args, kwargs, call)
        return entry.run(call.leaves)

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None) -> Entry:
        """Plan for these inputs, or return what was planned before."""
        call = call or read_call(model, args, kwargs)
        with self.lock:
            entry = self.entries.get(call.key)
            if entry is None:
                entry = self._plan(model, args, kwargs, call)
                self.entries[call.key] = entry
                while len(self.entries) > self.settings.max_signatures:
                    self.entries.popitem(last=False)
            self.latest = entry
            return entry

    def report(self) -> Report:
        """Report of the latest plan.

        Raises:
            FxckptError: nothing has been planned yet.
        """
        if self.latest is None or self.latest.report is None:
            raise FxckptError("nothing is planned yet: pass example inputs or run one training step first")
        return self.latest.report

    def _plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Entry:
        settings = self.settings
        known = self.captures.get(call.structure)
        if known is None:
            known = capture_region(model, args, kwargs), ModuleState.collect(model)
            self.captures[call.structure] = known
            while len(self.captures) > settings.max_signatures:
                self.captures.popitem(last=False)
        captured, state = known
        graph = build_graph(
            captured, settings.device, fresh_gradients=not call.has_gradients,
            extra_fixed=_extra_fixed(model, settings),
        )  # fmt: skip
        decision = decide(graph, self._goal(model, captured.joint), captured.tangents)
        settings.known[decision.plan.fingerprint] = decision.plan
        entry = Entry(captured, decision, emit(captured, decision), state)
        entry.report = self._report(model, captured, decision)
        log.info("planned %s: %d segments", type(model).__name__, len(decision.plan.segments))
        if settings.verbose:
            print(entry.report)
        return entry

    def _goal(self, model: nn.Module, joint: JointGraph) -> Goal:
        settings = self.settings
        budget = None if settings.budget_bytes is None else settings.budget_bytes - settings.reserve_bytes
        plan, settings.plan = settings.plan, None  # a given plan is for the first signature
        return Goal(settings.strategy, budget, settings.best_effort, plan, type(model).__name__, _inputs_text(joint))

    def _report(self, model: nn.Module, captured: Captured, decision: Decision) -> Report:
        title = ", ".join(part for part in (type(model).__name__, _inputs_text(captured.joint), "train") if part)
        return build_report(
            decision.graph, decision.plan, decision.program, decision.timeline, decision.plain, title=title,
            min_peak_bytes=decision.min_peak_bytes, pass_seconds=tuple(captured.clock.seconds + decision.seconds),
        )  # fmt: skip


def _extra_fixed(model: nn.Module, settings: Settings) -> tuple[tuple[str, int], ...]:
    grads = {id(p.grad): p.grad for p in model.parameters() if p.grad is not None}
    size = sum(grad.untyped_storage().nbytes() for grad in grads.values() if grad.layout is torch.strided)
    return ("gradients", size), ("optimizer", settings.optimizer_bytes)


def _inputs_text(joint: JointGraph) -> str:
    texts = []
    for entry, node in zip(joint.inputs, joint.nodes, strict=False):
        if entry.kind == "argument":
            value = node.meta["val"]
            texts.append("x".join(map(str, value.shape)) + " " + str(value.dtype).removeprefix("torch."))
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


class PlannedModule(nn.Module):
    """Mixin of the returned model's class.

    The returned model and the user's model are two objects with one ``__dict__``: parameters, buffers, submodules, hooks
    and every attribute are the same for both at all times. What belongs to fxckpt sits in a slot beside the dictionary.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (plain_view(self), _portable(planner_of(self).settings))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = _rebuild(copy.deepcopy(plain_view(self), memo), _portable(planner_of(self).settings))
        memo[id(self)] = result
        return result


def plain_view(model: nn.Module) -> nn.Module:
    """The user's model behind a planned ``model``: an instance of its class with the same ``__dict__``."""
    view: nn.Module = object.__new__(type(model).__mro__[2])
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def _portable(settings: Settings) -> Settings:
    return replace(settings, plan=None, known=dict(settings.known))


def _rebuild(model: nn.Module, settings: Settings) -> nn.Module:
    return make_planned(model, Planner(settings))


def planner_of(model: nn.Module) -> Planner:
    """The planner of a model that ``auto_checkpoint`` returned.

    Raises:
        TypeError: ``model`` is not such a model.
    """
    planner = getattr(model, SLOT, None)
    if not isinstance(planner, Planner):
        raise TypeError(f"{type(model).__name__} was not returned by auto_checkpoint")
    return planner


@functools.lru_cache(maxsize=None)
def _planned_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return planner_of(self).run(plain_view(self), args, kwargs)

    body: dict[str, Any] = {
        "forward": forward, "__slots__": (SLOT,), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }  # fmt: skip
    if not hasattr(cls, "report"):
        body["report"] = property(lambda self: planner_of(self).report())
    return type(cls.__name__, (PlannedModule, cls), body)


def make_planned(model: nn.Module, planner: Planner) -> nn.Module:
    """A second object of the same class over the same ``__dict__`` as ``model``, with ``planner`` in charge of forward."""
    planned: nn.Module = object.__new__(_planned_class(type(model)))
    object.__setattr__(planned, "__dict__", model.__dict__)
    object.__setattr__(planned, SLOT, planner)
    return planned
