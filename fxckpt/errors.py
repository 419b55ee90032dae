"""Exceptions: every error a user can meet derives from :class:`FxckptError`."""

from __future__ import annotations

__all__ = [
    "BudgetInfeasibleError",
    "CaptureError",
    "FxckptError",
    "InvalidArgumentError",
    "PassError",
    "PlanMismatchError",
    "VerificationError",
]


class FxckptError(Exception):
    """Base class of all errors raised by fxckpt."""


class InvalidArgumentError(FxckptError, ValueError):
    """An argument is out of range, unknown, or does not match the model's ``forward``."""


class CaptureError(FxckptError):
    """A module could not be captured as one graph.

    Attributes:
        module: path of the module in the model, ``""`` for the model itself.
        reason: the construct that stands in the way.
        source: ``file:line`` in the user's code, or ``""`` when unknown.
    """

    def __init__(self, message: str, *, module: str = "", reason: str = "", source: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.reason = reason or message
        self.source = source


class BudgetInfeasibleError(FxckptError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: peak of the whole step that was asked for.
        min_peak_bytes: smallest whole-step peak that a plan of this strategy reaches;
            planning again with ``budget_gb=min_peak_bytes / 2**30`` succeeds.
        fixed_bytes: bytes that no plan can avoid (parameters, buffers, inputs, gradients, optimizer).
    """

    def __init__(self, message: str, *, budget_bytes: int, min_peak_bytes: int, fixed_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.min_peak_bytes = min_peak_bytes
        self.fixed_bytes = fixed_bytes


class PlanMismatchError(FxckptError):
    """A saved plan belongs to another model, input signature or version of the plan format."""


class PassError(FxckptError):
    """A pass of the pipeline failed; the message names it and the passes that ran before it."""


class VerificationError(FxckptError):
    """The planned step differs from the plain step."""
