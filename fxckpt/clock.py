"""Runs passes one by one: logs and times them, and names the one that fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fxckpt.errors import FxckptError, PassError

__all__ = ["Clock", "without_collection"]

log = logging.getLogger(__name__)
T = TypeVar("T")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection within: graphs are many small objects that live, and looking through them takes a fifth of
    the time of planning.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Clock:
    """Record of the passes that ran.

    Attributes:
        seconds: name and time of each pass, in order.
    """

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    def run(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)``, timed.

        Raises:
            PassError: the function failed with anything but one of fxckpt's own errors.
        """
        start = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        except FxckptError:
            raise
        except Exception as error:
            done = ", ".join(step for step, _ in self.seconds) or "none"
            what = f"{type(error).__name__}: {error}"
            raise PassError(f"pass {name!r} failed (passes before it: {done}): {what}") from error
        self.seconds.append((name, time.perf_counter() - start))
        log.debug("%s: %.3f s", *self.seconds[-1])
        return result
