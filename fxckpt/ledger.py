"""What the Python between planned regions holds, seen while a model runs forward once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt import _torch

__all__ = ["Ledger", "Stretch"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Python code that runs before a region, or after the last one.

    Attributes:
        held_bytes: what this and all Python code before it still holds at its end, for backward or for later.
        peak_bytes: the most that it held together with the code before it.
        largest_bytes: its largest tensor.
        freed_bytes: outputs of the region before it that were let go by the end of forward.
    """

    held_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0
    freed_bytes: int = 0


class Ledger(TorchDispatchMode):
    """Counts storages from the operator that makes them until they go; regions run within :meth:`region`.

    Storages that are there before, and those that regions make, count nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = 0
        self.known: set[int] = set()
        self.paused = False
        self.marks: list[tuple[int, int, int]] = []
        self.freed: list[int] = []
        self.watches: list[weakref.finalize[..., Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and enter what it reads and makes."""
        if self.paused:
            return func(*args, **(kwargs or {}))
        self._meet((args, kwargs), counted=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, counted=True)
        return result

    def _meet(self, value: Any, *, counted: bool) -> None:
        for key, size, storage in self._new(value):
            self.known.add(key)
            self.live += size * counted
            self.largest = max(self.largest, size * counted)
            self.watches.append(weakref.finalize(storage, self._gone, key, size * counted))
        self.peak = max(self.peak, self.live)

    def _new(self, value: Any) -> Iterator[tuple[int, int, Any]]:
        for tensor in pytree.tree_leaves(value):
            real = isinstance(tensor, Tensor) and not isinstance(tensor, _torch.FakeTensor)
            if real and tensor.layout is torch.strided and _torch.storage_key(tensor) not in self.known:
                storage = tensor.untyped_storage()
                yield _torch.storage_key(tensor), storage.nbytes(), storage

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Within it nothing is entered: a module is captured or runs as planned."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def mark(self) -> None:
        """The stretch of Python up to here is over."""
        self.marks.append((self.live, self.peak, self.largest))
        self.peak, self.largest = self.live, 0

    def made(self, output: Any) -> None:
        """``output`` is what the region has just returned."""
        place = len(self.freed)
        self.freed.append(0)
        for key, size, storage in self._new(output):
            self.known.add(key)
            self.watches.append(weakref.finalize(storage, self._let_go, place, key, size))

    def _let_go(self, place: int, key: int, size: int) -> None:
        self.known.discard(key)
        self.freed[place] += size

    def close(self) -> list[Stretch]:
        """One stretch for each mark; what is still there is watched no longer."""
        for watch in self.watches:
            watch.detach()
        return [Stretch(*mark, freed) for mark, freed in zip(self.marks, [0, *self.freed], strict=False)]
