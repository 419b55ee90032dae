from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
from torch import nn

from fxckpt import demo
from fxckpt.cli import main
from fxckpt.errors import InvalidArgumentError

pytest.importorskip("torchvision")


def small_net() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels in (3, *[8] * 11):
        blocks += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, demo.CLASSES))


@pytest.fixture(scope="module")
def result() -> demo.DemoResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_resnet50", small_net)
        return demo.run_demo(steps=3, batch=16)


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the form of CIFAR-10, 10 images each; torchvision compares checksums with the real ones."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    (folder / "cifar-10-batches-py").mkdir()
    generator = numpy.random.default_rng(0)
    for number in range(1, 6):
        images = {"data": generator.integers(0, 256, (10, 3072), dtype="uint8"), "labels": list(range(10))}
        (folder / f"cifar-10-batches-py/data_batch_{number}").write_bytes(pickle.dumps(images))
    names = {"label_names": [str(label) for label in range(10)]}
    (folder / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps(names))


def test_both_runs_agree_within_the_budget(result: demo.DemoResult) -> None:
    assert result.passed
    assert len(set(result.plain_losses)) == 3
    assert result.plain_losses == result.planned_losses
    fixed = result.report.fixed_bytes
    assert result.planned_peak_bytes - fixed <= (result.report.plain_peak_bytes - fixed) / 2
    assert result.planned_peak_bytes == pytest.approx(result.report.peak_bytes, rel=0.02)
    assert result.plain_peak_bytes == pytest.approx(result.report.plain_peak_bytes, rel=0.02)


@pytest.mark.parametrize("how", ["text", "markdown", "json"])
def test_command_line(
    how: str, result: demo.DemoResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**options: Any) -> demo.DemoResult:
        options["progress"](f"{options['steps']} steps of {options['batch']}")
        return result

    monkeypatch.setattr(demo, "run_demo", run)
    assert main(["demo", "--steps", "5", "--batch", "7", "--output-format", how]) == 0
    out, err = capsys.readouterr()
    assert err == "5 steps of 7\n"
    if how == "json":
        assert json.loads(out)["passed"]
    else:
        assert "Predicted peak" in out
        assert "bit for bit the same" in out


def test_a_difference_is_not_hidden(result: demo.DemoResult) -> None:
    weights = dataclasses.replace(result, weights_equal=False)
    assert not weights.passed
    assert "DIFFERENT" in weights.render()
    losses = dataclasses.replace(result, planned_losses=(0.0, *result.planned_losses[1:]))
    assert not losses.passed
    assert "NO" in losses.render()
    assert not dataclasses.replace(result, planned_peak_bytes=result.report.budget_bytes + 1).passed


def test_real_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch)
    batches, source = demo._batches(tmp_path, 4, 16, "cpu")
    assert len(batches) == 4
    assert source == f"CIFAR-10 from {tmp_path}"
    images, labels = batches[0]
    assert images.shape == (16, 3, 32, 32)
    assert -1 <= images.min() < images.max() <= 1
    assert labels[:10].tolist() == list(range(10))


def test_bad_use(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no CIFAR-10"):
        demo.run_demo(data=tmp_path)
    with pytest.raises(InvalidArgumentError, match="at least two steps"):
        demo.run_demo(steps=1)
