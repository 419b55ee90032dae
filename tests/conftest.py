from __future__ import annotations

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class Golden:
    """Compares text with a file under tests/golden, or renews the file under ``--update-golden``."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def check(self, name: str, text: str) -> None:
        path = GOLDEN / name
        if self.update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; run pytest --update-golden and read what it wrote"
        assert text + "\n" == path.read_text(encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    torch.manual_seed(0)
