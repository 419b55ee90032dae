"""The model that ``auto_checkpoint`` returns: an object of the same class whose forward runs planned graphs."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxckpt.planner import Planner, Settings

__all__ = ["PlannedModule", "make_planned", "plain_view", "planner_of"]

SLOT = "_fxckpt_planner"


class PlannedModule(nn.Module):
    """Mixin of the returned model's class.

    The returned model and the user's model are two objects with one ``__dict__``: parameters, buffers, submodules,
    hooks and every attribute are the same for both at all times. What belongs to fxckpt sits in a slot beside the
    dictionary.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (plain_view(self), _portable(planner_of(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = _rebuild(copy.deepcopy(plain_view(self), memo), _portable(planner_of(self)))
        memo[id(self)] = result
        return result


def plain_view(model: nn.Module) -> nn.Module:
    """The user's model behind a planned ``model``: an instance of its class with the same ``__dict__``."""
    order = type(model).__mro__  # another wrapper (FSDP) may have put its own class in front
    view: nn.Module = object.__new__(order[order.index(PlannedModule) + 1])
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def _portable(planner: Planner) -> Settings:
    """Settings for a copy of the model, which takes over the latest plan."""
    latest = planner.latest
    plan = planner.settings.plan if latest is None or latest.plan.regions else latest.plan
    return replace(planner.settings, plan=plan, best_effort=planner.settings.best_effort or plan is not None)


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


@functools.cache
def _planned_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        planner, model = planner_of(self), plain_view(self)
        if planner.settings.verify and torch.is_grad_enabled() and model.training:
            planner.verify(model, self, args, kwargs)
        return planner.run(model, args, kwargs)

    body: dict[str, Any] = {
        "forward": forward, "__slots__": (SLOT,), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }  # fmt: skip
    if not hasattr(cls, "report"):
        body["report"] = property(lambda self: planner_of(self).outcome().report)
    return type(cls.__name__, (PlannedModule, cls), body)


def make_planned(model: nn.Module, planner: Planner) -> nn.Module:
    """A second object of the class of ``model`` over the same ``__dict__``, with ``planner`` in charge of forward."""
    planned: nn.Module = object.__new__(_planned_class(type(model)))  # type: ignore[arg-type]  # Module types __hash__ oddly
    object.__setattr__(planned, "__dict__", model.__dict__)
    object.__setattr__(planned, SLOT, planner)
    return planned
