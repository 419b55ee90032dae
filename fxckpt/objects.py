"""Objects that forward shares with the world around it: what a trace does to them is noticed and undone."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fxckpt.state import SIMPLE

__all__ = ["Watch"]

MAX_OBJECTS = 5_000  # a trainer that hangs on a module may lead to whole data sets
_CODE = (types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


class Watch:
    """Everything mutable that some objects lead to, with its contents at this moment; modules are not entered."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        """
        Args:
            roots: what to call an object in a message, and the object.
        """
        self.seen: list[tuple[str, Any, Any]] = []
        known: set[int] = set()
        waiting = deque(roots)
        while waiting and len(self.seen) < MAX_OBJECTS:
            name, value = waiting.popleft()
            if id(value) in known or isinstance(value, (*SIMPLE, *_CODE, Tensor, nn.Module)):
                continue
            known.add(id(value))
            if isinstance(value, (dict, list, tuple, set)) and len(value) > MAX_OBJECTS:
                continue
            for part in (value, getattr(value, "__dict__", None)):
                for kind in (dict, list, set):
                    if isinstance(part, kind):
                        self.seen.append((name, part, kind(part)))
            waiting.extend((name, item) for item in _contents(value))

    def changed(self) -> str:
        """Name of the first root of which something has changed, empty if nothing has."""
        return next((name for name, part, before in self.seen if not _same(part, before)), "")

    def restore(self) -> None:
        """Put the contents back."""
        for _, part, before in self.seen:
            if not _same(part, before):
                part.clear()
                part.extend(before) if isinstance(part, list) else part.update(before)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    yield from (getattr(value, "__dict__", None) or {}).values()
    for slot in getattr(type(value), "__slots__", ()):
        yield getattr(value, slot, None)


def _same(part: Any, before: Any) -> bool:
    """Whether a container holds the very same objects."""
    if isinstance(part, set):
        return bool(part == before)
    if len(part) != len(before):
        return False
    if isinstance(part, dict):
        return all(key in part and part[key] is item for key, item in before.items())
    return all(one is other for one, other in zip(part, before, strict=True))
