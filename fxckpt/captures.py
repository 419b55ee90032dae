"""What was captured of a model, by kind of call; other sizes of the same inputs are had from what is there."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from fxckpt.device import Device
from fxckpt.errors import CaptureError, PassError
from fxckpt.pipeline import Captured, capture_region, resize_region
from fxckpt.signature import Call, read_call
from fxckpt.state import ModuleState

__all__ = ["Captures"]

MAX_KINDS = 4  # how many traces of one form of call are tried at other sizes: a batch of one takes other operators


class Captures:
    """Cache of captures, least recently made out."""

    def __init__(self, device: Device, limit: int) -> None:
        """
        Args:
            device: rates for estimates of seconds.
            limit: for how many input signatures plans are kept.
        """
        self.device, self.limit = device, limit
        self.known: OrderedDict[Any, tuple[Captured, ModuleState]] = OrderedDict()
        self.forms: OrderedDict[Any, list[Captured]] = OrderedDict()

    def get(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> tuple[Captured, ModuleState]:
        """The capture of ``module`` for this kind of call.

        Raises:
            CaptureError: it cannot be captured as a whole.
        """
        if call.structure not in self.known:
            captured = self._resized(module, args, kwargs, call)
            if captured is None:
                captured = self._new(module, args, kwargs)
                call = read_call(module, args, kwargs)  # the capture may have settled some attribute
                self._add_form(call, captured)
            self.known[call.structure] = captured, ModuleState.collect(module)
            while len(self.known) > 4 * self.limit:
                self.known.popitem(last=False)
        return self.known[call.structure]

    def _resized(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Captured | None:
        for first in self.forms.get(call.form, ()):
            captured = resize_region(first, self.device, module, args, kwargs)
            if captured is not None:
                return captured
        return None

    def _new(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        try:
            return capture_region(module, args, kwargs)
        except PassError as error:
            raise CaptureError(str(error), reason=str(error)) from error

    def _add_form(self, call: Call, captured: Captured) -> None:
        kinds = self.forms.setdefault(call.form, [])
        kinds.insert(0, captured)
        del kinds[MAX_KINDS:]
        while len(self.forms) > self.limit:
            self.forms.popitem(last=False)
