"""Where the operators of a trace come from: the module and the line of user code that is running."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

from fxckpt.errors import CaptureError
from fxckpt.refuse import Refused

__all__ = ["Places"]


class Places:
    """Which module and which line of user code is running."""

    def __init__(self, root: nn.Module) -> None:
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.stack: list[str] = [""]
        self.by_name: dict[str, tuple[str, str]] = {}
        self.handles: list[Any] = []
        self.thread = threading.get_ident()

    def __enter__(self) -> Places:
        hooks = torch.nn.modules.module
        self.handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        if threading.get_ident() == self.thread:
            self.stack.append(self.paths.get(id(module), self.stack[-1]))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self.thread and len(self.stack) > 1:
            self.stack.pop()

    def note(self, name: str) -> None:
        """Remember where the node ``name`` comes from."""
        frame = sys._getframe(1)
        line = ""
        while frame is not None:
            if not _is_internal(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        self.by_name[name] = (self.stack[-1], line)

    def explain(self, error: Exception) -> CaptureError:
        """The error a user sees: module, source line, construct."""
        source, trace = "", error.__traceback__
        while trace is not None:
            if not _is_internal(trace.tb_frame.f_code.co_filename):
                source = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__}: {reason}" if not isinstance(error, Refused) else reason
        path = self.stack[-1]
        where = f"module {path!r}" if path else "the model"
        return CaptureError(f"cannot capture {where}, {source}: {reason}", module=path, reason=reason, source=source)


_TORCH_ROOT = torch.__path__[0] + "/"
_HERE = __file__.rpartition("/")[0]
_OWN_ROOTS = (_HERE + "/", _HERE.rpartition("/")[0] + "/passes/")  # the passes lie beside the package in a checkout


def _is_internal(filename: str) -> bool:
    return filename.startswith((_TORCH_ROOT, "<", *_OWN_ROOTS))
