"""Activation checkpointing that you give a model and a memory budget: the training step fits, bit for bit the same."""

from fxckpt._version import __version__
from fxckpt.api import STRATEGIES, auto_checkpoint, get_graph_module, get_plan, get_report, make_plan
from fxckpt.errors import (
    BudgetInfeasibleError,
    CaptureError,
    FxckptError,
    InvalidArgumentError,
    PlanMismatchError,
    VerificationError,
)
from fxckpt.plan import Plan
from fxckpt.report import Report

__all__ = [
    "STRATEGIES",
    "BudgetInfeasibleError",
    "CaptureError",
    "FxckptError",
    "InvalidArgumentError",
    "Plan",
    "PlanMismatchError",
    "Report",
    "VerificationError",
    "__version__",
    "auto_checkpoint",
    "get_graph_module",
    "get_plan",
    "get_report",
    "make_plan",
]
