"""Small models, each with one kind of trouble that people met with activation checkpointing.

A case file has ``build() -> (model, args, kwargs)`` and ``loss(output) -> scalar``; the optional names are the
fields of :class:`Case`. ``python -m tests.cases`` prints which cases are right under which strategy.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Case", "load", "names"]


@dataclass(frozen=True)
class Case:
    """What the harness needs to run one case; see :func:`tests.harness.compare` for the meaning of each."""

    name: str
    build: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Any]
    context: Callable[[], Any] | None = None
    extra_batches: Callable[[], list[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None
    mutate: Callable[[Any, int], None] | None = None
    between: Callable[[Any], None] | None = None
    probe: Callable[[Any], Any] | None = None
    grad_api: str = "backward"
    rounding: float = 0.0

    def options(self) -> dict[str, Any]:
        """The optional parts as keyword arguments of :func:`tests.harness.compare`."""
        keys = ("context", "extra_batches", "mutate", "between", "probe", "grad_api", "rounding")
        return {key: getattr(self, key) for key in keys}


def names() -> list[str]:
    """Names of all cases, sorted."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def load(name: str) -> Case:
    """The case ``name``."""
    module = importlib.import_module(f"{__name__}.{name}")
    fields = {"context", "extra_batches", "mutate", "between", "probe", "GRAD_API", "ROUNDING"}
    optional = {key.lower(): getattr(module, key) for key in fields if hasattr(module, key)}
    return Case(name, module.build, module.loss, **optional)
