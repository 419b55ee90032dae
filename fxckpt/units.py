"""Bytes and how to print them. GiB is 2**30 bytes, MiB is 2**20 bytes."""

from __future__ import annotations

__all__ = ["GIB", "MIB", "format_bytes", "gib_to_bytes"]

GIB = 2**30
MIB = 2**20


def gib_to_bytes(gib: float) -> int:
    """Whole bytes in ``gib`` GiB, rounded to the nearest byte so that ``n / GIB`` comes back as ``n``."""
    return round(gib * GIB)


def format_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that keeps at least one whole unit."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
