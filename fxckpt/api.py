"""The public functions: one call before training, and what can be asked of its result."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from fxckpt.device import DEVICES, find_device
from fxckpt.errors import FxckptError, InvalidArgumentError
from fxckpt.model import PlannedModule, make_planned, plain_view, planner_of
from fxckpt.optimizer import optimizer_state_bytes
from fxckpt.plan import Plan
from fxckpt.planner import Outcome, Planner, Settings
from fxckpt.report import Report
from fxckpt.report_regions import RegionsReport
from fxckpt.state import storage_bytes
from fxckpt.units import gib_to_bytes

__all__ = ["STRATEGIES", "auto_checkpoint", "get_graph_module", "get_plan", "get_report", "make_plan"]

STRATEGIES = ("dp", "sqrtn", "none")
FREE_SHARE = 0.9


def auto_checkpoint(
    model: nn.Module,
    *example_args: Any,
    budget_gb: float | None = None,
    strategy: str = "dp",
    example_kwargs: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    reserve_gb: float = 0.0,
    on_infeasible: Literal["raise", "best"] = "raise",
    plan: Plan | None = None,
    verbose: int = 0,
    leave: Sequence[str] = (),
    regions: Sequence[str] = (),
    max_signatures: int = 16,
    verify: Literal["off", "first"] = "off",
    cost: str = "roofline",
) -> nn.Module:
    """Make ``model`` train within a memory budget, with the same numbers bit for bit.

    Args:
        model: any module with trainable parameters. It stays as it is and usable; the result shares its parameters,
            buffers and submodules.
        example_args: inputs as ``forward`` takes them. With them the plan is made now, without them at the first call
            in training mode with gradients enabled. Every new kind of input (shapes, dtypes, flags) is planned once.
        budget_gb: highest memory of the whole training step in GiB (2**30 bytes): parameters, gradients, buffers,
            inputs, optimizer state if ``optimizer`` is given, kept values and temporaries. None means 90 % of the
            device's free memory on an accelerator; on a CPU ``strategy="dp"`` needs a number.
        strategy: ``"dp"`` (least recomputation within the budget), ``"sqrtn"`` (about sqrt(n) segments, each
            recomputed; with a budget as many as it takes) or ``"none"`` (planned graph, nothing recomputed).
        example_kwargs: keyword inputs that go with ``example_args``.
        optimizer: its state counts towards the budget.
        reserve_gb: GiB of the budget to leave alone, for what lies outside the model (the loss, communication).
        on_infeasible: ``"raise"``, or ``"best"`` to take the plan with the smallest peak, with a warning.
        plan: a plan made by :func:`make_plan` for the same model and inputs; no other is sought.
        verbose: print the report of every plan if not 0.
        leave: paths of modules (``"encoder.attn"``, or patterns like ``"layers.*.router"``) that stay as they are; what
            is around them is planned in regions.
        regions: paths or patterns of the modules to plan; nothing else is. Empty means the whole model or, where that
            cannot be captured, its largest submodules that can.
        verify: ``"first"`` runs the first step both ways, before it is taken, and compares loss, outputs, gradients,
            buffers and random states bit for bit. The loss is the output's own or a sum of squares.
        cost: where the times come from that tell cheap recomputation from dear: ``"roofline"`` (rates of the model's
            device), the name of another device (``"a100"``, ``"h100"``, ``"h200"``, ``"cpu"``) whose rates to take, or
            ``"measure"``, which times each distinct operator on the model's device.
        max_signatures: how many kinds of input keep their plans; the least recently planned goes first.

    Returns:
        A model of the same class; ``state_dict`` keys, hooks and attributes are the same.

    Raises:
        BudgetInfeasibleError: no plan fits; carries the smallest budget that does.
        CaptureError: the model's Python code cannot be followed.
        InvalidArgumentError: an argument is out of range or does not fit ``forward``.
        PlanMismatchError: ``plan`` belongs to another model or other inputs.
        VerificationError: at the first call, if ``verify="first"`` finds a difference.
    """
    settings = _settings(model, budget_gb, strategy, optimizer, reserve_gb, on_infeasible, plan)
    if cost not in ("roofline", "measure", *DEVICES):
        known = ", ".join(map(repr, ("roofline", "measure", *DEVICES)))
        raise InvalidArgumentError(f"unknown cost {cost!r}; known are {known}")
    settings.measure = cost == "measure"
    if cost in DEVICES:
        settings.device = DEVICES[cost]
    if verify not in ("off", "first"):
        raise InvalidArgumentError(f"verify must be 'off' or 'first', not {verify!r}")
    settings.verbose, settings.max_signatures, settings.verify = verbose, max_signatures, verify == "first"
    settings.leave, settings.regions = _paths(model, leave), _paths(model, regions)
    if isinstance(model, PlannedModule):
        model = plain_view(model)
    planned = make_planned(model, Planner(settings))
    if example_args or example_kwargs:
        _plan_now(planned, example_args, example_kwargs or {})
    return planned


def make_plan(
    model: nn.Module,
    *example_args: Any,
    budget_gb: float | None = None,
    strategy: str = "dp",
    example_kwargs: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    reserve_gb: float = 0.0,
    on_infeasible: Literal["raise", "best"] = "raise",
    cost: str = "roofline",
) -> Plan:
    """Decide, change nothing. Arguments and errors are those of :func:`auto_checkpoint`.

    Returns:
        The plan, which ``auto_checkpoint(model, *inputs, plan=plan)`` carries out and ``plan.to_json()`` writes.
    """
    if not example_args and not example_kwargs:
        raise InvalidArgumentError("make_plan needs example inputs: make_plan(model, x, budget_gb=...)")
    planned = auto_checkpoint(
        model, *example_args, budget_gb=budget_gb, strategy=strategy, example_kwargs=example_kwargs,
        optimizer=optimizer, reserve_gb=reserve_gb, on_infeasible=on_infeasible, cost=cost,
    )  # fmt: skip
    return get_plan(planned)


def get_plan(model: nn.Module) -> Plan:
    """The plan that ``model`` made last.

    Args:
        model: a result of :func:`auto_checkpoint`.

    Raises:
        FxckptError: nothing has been planned yet, or the model is not such a result.
    """
    return _latest(model).plan


def get_report(model: nn.Module) -> Report | RegionsReport:
    """The report of the plan that ``model`` made last; ``print`` it. Arguments and errors as in :func:`get_plan`."""
    return _latest(model).report


def get_graph_module(model: nn.Module) -> fx.GraphModule:
    """The rewritten graph that ``model`` planned last; each segment is a submodule with its code as fx graphs.

    Arguments and errors as in :func:`get_plan`.
    """
    entry = _latest(model).entry
    if entry is None:
        raise FxckptError("the model was not captured whole; its regions are in get_report(model)")
    for segment in entry.graph_module.children():
        segment.show()  # type: ignore[operator]
    return entry.graph_module


def _latest(model: nn.Module) -> Outcome:
    try:
        planner = planner_of(model)
    except TypeError as error:
        raise InvalidArgumentError(str(error)) from error
    return planner.outcome()


def _settings(
    model: nn.Module, budget_gb: float | None, strategy: str, optimizer: torch.optim.Optimizer | None,
    reserve_gb: float, on_infeasible: str, plan: Plan | None,
) -> Settings:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise InvalidArgumentError(
            f"plan must be a fxckpt.Plan, not {type(plan).__name__}; read one with Plan.from_json"
        )
    if strategy not in STRATEGIES:
        raise InvalidArgumentError(f"unknown strategy {strategy!r}; known are {', '.join(map(repr, STRATEGIES))}")
    if on_infeasible not in ("raise", "best"):
        raise InvalidArgumentError(f"on_infeasible must be 'raise' or 'best', not {on_infeasible!r}")
    if budget_gb is not None and not (_is_number(budget_gb) and budget_gb > 0 and math.isfinite(budget_gb)):
        raise InvalidArgumentError(f"budget_gb must be a positive number of GiB, not {budget_gb!r}")
    if not (_is_number(reserve_gb) and reserve_gb >= 0 and math.isfinite(reserve_gb)):
        raise InvalidArgumentError(f"reserve_gb must be a number of GiB, 0 or more, not {reserve_gb!r}")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters) and not parameters:
        raise InvalidArgumentError(f"{type(model).__name__} has no parameters to train")
    device = parameters[0].device if parameters else torch.device("cpu")
    budget = None if budget_gb is None else gib_to_bytes(budget_gb)
    if budget is None and plan is not None and plan.budget_bytes:
        budget = plan.budget_bytes  # for other kinds of input than that of the plan
    if budget is None and strategy == "dp" and plan is None:
        budget = _default_budget(model, device)
    return Settings(
        strategy=strategy if plan is None else plan.strategy, budget_bytes=budget,
        reserve_bytes=gib_to_bytes(reserve_gb), best_effort=on_infeasible == "best", plan=plan,
        device=find_device(device), optimizer_bytes=optimizer_state_bytes(optimizer),
    )  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _paths(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise InvalidArgumentError(f"give module paths as a tuple: ({patterns!r},)")
    paths = [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise InvalidArgumentError(f"no module of {type(model).__name__} matches {pattern!r}")
    return tuple(patterns)


def _default_budget(model: nn.Module, device: torch.device) -> int:
    """90 % of the device's free memory on top of what the model already occupies there."""
    if device.type != "cuda":
        raise InvalidArgumentError(
            f"strategy='dp' needs budget_gb on {device.type}: the peak that the whole training step may reach, in GiB"
        )
    free, _ = torch.cuda.mem_get_info(device)
    return int(FREE_SHARE * free) + storage_bytes([*model.parameters(), *model.buffers()])


def _plan_now(planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan for the example inputs, in training mode and with gradients enabled whatever the present state."""
    view = plain_view(planned)
    _check_arguments(view, args, kwargs)
    flags = [(module, module.training) for module in view.modules()]
    if not view.training:
        view.train()
    try:
        with torch.enable_grad():
            planner_of(planned).plan(view, args, kwargs)
    except FxckptError:
        raise
    except Exception as error:
        name = type(view).__name__
        raise InvalidArgumentError(f"{name}.forward fails with the example inputs: {error}") from error
    finally:
        for module, flag in flags:
            module.training = flag


def _check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgumentError(
            f"the example inputs do not match {type(model).__name__}.forward: {error}"
        ) from error
