"""README.md and docs/ run: Python blocks, console blocks with their output, shell blocks as far as parsing goes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fxckpt.cli import _parser, main
from tests.conftest import Golden

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]
LIBRARIES = ("torchvision", "timm", "transformers")


def blocks(page: Path, language: str) -> Iterator[re.Match[str]]:
    return re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> Iterator[str]:
    for block in blocks(page, "sh"):
        yield from (line for line in block.group(1).splitlines() if line.startswith("fxckpt "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(page, "python"):
        line = block.string[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_console_blocks_print_what_they_say(page: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    for block in blocks(page, "console"):
        first, _, expected = block.group(1).partition("\n")
        words = shlex.split(first.removeprefix("$ fxckpt "))
        for library in LIBRARIES:
            if any(word.startswith(library) for word in words):
                pytest.importorskip(library)
        assert main(words) == 0
        # How long planning took is another number each time.
        found = re.sub(r"^ *- planned in .*\n( {4}.*\n)*", "", capsys.readouterr().out, flags=re.M)
        if golden.update:
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace(block.group(0), f"```console\n{first}\n{found}```"), encoding="utf-8")
        # The scratch memory of kernels differs between machines, and with it the plan. What is said about it does not.
        assert verdict(found) == verdict(expected) or golden.update


def verdict(report: str) -> list[str]:
    """The words of the report above its table, without the numbers and their units."""
    lines = re.sub(r"[\d.]+( [GMK]iB)?", "#", report).split("\n")
    return [" ".join(line.split()) for line in lines[: lines.index("=" * 100, 2)]]


@pytest.mark.parametrize("command", [command for page in PAGES for command in commands(page)])
def test_shell_blocks_parse(command: str) -> None:
    assert callable(_parser().parse_args(shlex.split(command)[1:]).run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:fxckpt|passes|tests|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
