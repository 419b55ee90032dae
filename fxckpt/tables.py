"""Pieces of printed reports: rounding that adds up, one unit per column, names and charts that fit."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from fxckpt.units import GIB, MIB

__all__ = ["chart", "counted", "rounded", "shades", "short_op", "short_source", "span_name", "unit_for", "wrapped"]

# Names that PyTorch users know, for operators that carry the name of an implementation.
_ALIASES = {
    "convolution": "conv",
    "addmm": "linear",
    "batch_norm": "bn",
    "max_pool2d_with_indices": "max_pool",
    "constant_pad_nd": "pad",
    "bernoulli": "dropout",
}
_NOISE = ("native_", "cudnn_", "miopen_", "scaled_dot_product_", "efficient_", "flash_")


def unit_for(counts: Iterable[int]) -> tuple[str, int]:
    """Name and size of the largest unit of which the highest count has at least one."""
    highest = max((abs(count) for count in counts), default=0)
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if highest >= size:
            return unit, size
    return "B", 1


def rounded(values: Sequence[float], unit: float = 1, decimals: int = 3) -> tuple[list[str], str]:
    """``values`` and their sum, in ``unit``, rounded so that the printed values add up to the printed sum.

    Each value is rounded down and those with the largest remainders are raised by one last digit until the sum is
    right, so that none is off by more than one digit.
    """
    scale = 10**decimals
    exact = [value / unit * scale for value in values]
    ticks = [int(value // 1) for value in exact]
    total = round(sum(exact))
    by_remainder = sorted(range(len(exact)), key=lambda index: (ticks[index] - exact[index], index))
    for index in by_remainder[: total - sum(ticks)]:
        ticks[index] += 1
    return [f"{tick / scale:.{decimals}f}" for tick in ticks], f"{total / scale:.{decimals}f}"


def short_op(op: str) -> str:
    """``"aten.native_batch_norm.default"`` as ``"bn"``."""
    name = op.split(".")[1] if op.startswith("aten.") else op.split(".")[-2 if "." in op else 0]
    name = name.strip("_")
    for noise in _NOISE:
        name = name.removeprefix(noise)
    for family in ("batch_norm", "attention"):
        if family in name:
            name = family
    return _ALIASES.get(name, name)


def short_source(source: str) -> str:
    """``file:line`` from the working directory or the folder of installed packages on."""
    for folder in ("/site-packages/", "/dist-packages/"):
        source = source.replace("\\", "/").rpartition(folder)[2]
    return source.removeprefix(os.getcwd().replace("\\", "/") + "/")


def counted(names: Iterable[str], width: int) -> str:
    """``names`` as ``"relu x9, conv x3"``, most frequent first, in at most ``width`` columns."""
    counts = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    items = [name if count == 1 else f"{name} x{count}" for name, count in counts]
    if not items:
        return "-"
    for shown in range(len(items), 0, -1):
        rest = sum(count for _, count in counts[shown:])
        text = ", ".join([*items[:shown], *([f"+{rest}"] if rest else [])])
        if len(text) <= width:
            return text
    return f"{sum(count for _, count in counts)} ops"


def span_name(first: str, last: str, width: int) -> str:
    """``"layer1.0.conv1 .. layer1.2.relu"``, as ``"layer1.0 .. 2"`` or ``"layer1"`` if ``width`` demands."""
    full = first if first == last else f"{first} .. {last}"
    if len(full) <= width:
        return full
    head, tail = first.split("."), last.split(".")
    common = 0
    while common < min(len(head), len(tail)) and head[common] == tail[common]:
        common += 1
    stem = ".".join(head[:common])
    ends = [".".join(part[common : common + 1]) for part in (head, tail)]
    spans = [f"{stem}.{ends[0]} .. {ends[1]}" if stem else f"{ends[0]} .. {ends[1]}"] if all(ends) else []
    for text in [*spans, stem or full]:
        if len(text) <= width:
            return text
    text = stem or full
    return f"..{text[len(text) - width + 2 :]}"


def wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns; ``first`` begins the first line and ``rest`` (or blanks) the others."""
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [first]


def shades(ascii: bool) -> tuple[str, str]:
    """Characters of a chart for changing and for fixed memory."""
    return ("#", ":") if ascii else ("\u2588", "\u2591")


def chart(totals: Sequence[int], fixed: int, split: int, *, width: int, height: int = 8, ascii: bool = False) -> str:
    """Bytes over the instructions of a step as columns of blocks.

    Args:
        totals: live bytes at each instruction.
        fixed: bytes that are always there, drawn lighter.
        split: number of forward instructions.
        width: columns of the whole chart.
        height: rows of the plot.
        ascii: draw with ``#`` and ``:``.
    """
    if not totals:
        return ""
    full, light = shades(ascii)
    unit, size = unit_for([max(totals)])
    labels = [f"{max(totals) * row / height / size:.2f} {unit}" for row in range(height, 0, -1)]
    margin = max(map(len, labels)) + 3
    columns = width - margin
    # Each column shows the highest moment of its share of the instructions, so that no peak is lost.
    starts = [index * len(totals) // columns for index in range(columns + 1)]
    heights = [max(totals[low : max(high, low + 1)]) for low, high in itertools.pairwise(starts)]
    lines = []
    for row, label in zip(range(height, 0, -1), labels, strict=True):
        level = max(totals) * (2 * row - 1) / (2 * height)
        cells = ["" if value < level else light if level <= fixed else full for value in heights]
        lines.append(f"{label:>{margin - 3}} | " + "".join(cell or " " for cell in cells).rstrip())
    forward = split * columns // len(totals)
    lines.append(f"{'':{margin - 3}} +-{'-' * forward}+{'-' * (columns - forward - 1)}")
    lines.append(f"{'':{margin}}{'forward'[:forward]:<{forward}}{'| backward'[: columns - forward]}")
    return "\n".join(lines)
