"""Objects that forward shares with the world around it: what a trace does to them is noticed and undone."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fxckpt.state import INTERNAL, SIMPLE

__all__ = ["Setting", "Watch", "is_setting", "restored"]

Setting = tuple[dict[Any, Any], Any, Any]
"""A dictionary, a key, and the value that forward sets there once and for all."""

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

    def settings(self) -> list[Setting]:
        """All that has changed, if it is only entries that were None or missing and are plain values now."""
        found: list[Setting] = []
        for _, part, before in self.seen:
            if not _same(part, before):
                changes = _settings(part, before) if isinstance(part, dict) else None
                if changes is None:
                    return []
                found += changes
        return found

    def restore(self) -> None:
        """Put the contents back."""
        for _, part, before in self.seen:
            if not _same(part, before):
                part.clear()
                part.extend(before) if isinstance(part, list) else part.update(before)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Run something with ``model`` and put back what it does to the objects that its modules' attributes lead to."""
    modules = model.named_modules()
    watch = Watch(
        (path, value) for path, module in modules for key, value in vars(module).items() if key not in INTERNAL
    )
    try:
        yield
    finally:
        watch.restore()


def is_setting(old: Any, new: Any) -> bool:
    """Whether an attribute without a value got a plain one."""
    return old is None and new is not None and isinstance(new, SIMPLE)


def _settings(part: dict[Any, Any], before: dict[Any, Any]) -> list[Setting] | None:
    if before.keys() - part.keys():
        return None
    changed = [key for key, value in part.items() if key not in before or before[key] is not value]
    if not all(is_setting(before.get(key), part[key]) for key in changed):
        return None
    return [(part, key, part[key]) for key in changed]


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
