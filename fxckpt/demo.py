"""``fxckpt demo``: ResNet-50 on CIFAR-10-shaped images at half of its activation memory, beside the plain run."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fxckpt.api import auto_checkpoint, get_report
from fxckpt.errors import InvalidArgumentError
from fxckpt.measure import measure_peak
from fxckpt.report import Report
from fxckpt.tables import unit_for
from fxckpt.units import GIB

__all__ = ["DemoResult", "run_demo"]

CLASSES = 10
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs side by side.

    Attributes:
        report: report of the plan.
        plain_losses: loss of each plain step.
        planned_losses: loss of each planned step.
        plain_peak_bytes: measured whole-step peak of the plain run.
        planned_peak_bytes: measured whole-step peak of the planned run.
        plain_seconds: median time of a plain step.
        planned_seconds: median time of a planned step.
        weights_equal: whether all parameters and buffers are the same bit for bit after the last step.
        data: what was trained on.
    """

    report: Report
    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]
    plain_peak_bytes: int
    planned_peak_bytes: int
    plain_seconds: float
    planned_seconds: float
    weights_equal: bool
    data: str

    @property
    def passed(self) -> bool:
        """Same losses and weights, and the measured peak within the budget."""
        same = self.plain_losses == self.planned_losses and self.weights_equal
        return same and self.planned_peak_bytes <= self.report.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return json.loads(json.dumps({**data, "report": self.report.to_dict(), "passed": self.passed}))  # type: ignore[no-any-return]

    def render(self, how: str = "text") -> str:
        """The report, the measured peaks and the losses as ``"text"``, ``"json"`` or ``"markdown"``."""
        if how == "json":
            return json.dumps(self.to_dict(), indent=2)
        markdown = how == "markdown"
        style: dict[str, Any] = {"tablefmt": "pipe" if markdown else "simple", "disable_numparse": True}
        unit, size = unit_for([self.plain_peak_bytes, self.planned_peak_bytes])
        fixed = self.report.fixed_bytes
        predicted = (self.report.plain_peak_bytes, self.report.peak_bytes)
        measured = (self.plain_peak_bytes, self.planned_peak_bytes)
        rows = [
            ("peak of the step, predicted", *(f"{count / size:.3f} {unit}" for count in predicted)),
            ("peak of the step, measured", *(f"{count / size:.3f} {unit}" for count in measured)),
            ("  above what is always there", *(f"{(count - fixed) / size:.3f} {unit}" for count in measured)),
            ("time of a step", f"{self.plain_seconds:.2f} s", f"{self.planned_seconds:.2f} s"),
        ]
        peaks = tabulate(rows, headers=("", "plain", "fxckpt"), colalign=("left", "right", "right"), **style)
        losses = tabulate(
            [
                (str(step), f"{plain:.6f}", f"{planned:.6f}", "yes" if plain == planned else "NO")
                for step, (plain, planned) in enumerate(zip(self.plain_losses, self.planned_losses, strict=True), 1)
            ],
            headers=("step", "loss, plain", "loss, fxckpt", "equal"),
            colalign=("right", "right", "right", "left"),
            **style,
        )
        verdict = "bit for bit the same" if self.weights_equal else "DIFFERENT"
        last = f"Weights and BatchNorm statistics after {len(self.plain_losses)} steps on {self.data}: {verdict}."
        head = self.report.to_markdown() if markdown else str(self.report)
        return "\n\n".join([head, peaks, losses, last])


def run_demo(
    *,
    data: Path | None = None,
    steps: int = 3,
    batch: int = 256,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
) -> DemoResult:
    """Train ResNet-50 with a 10-class head plainly and planned, from the same start on the same batches.

    The budget is what is always there (parameters, optimizer state, the batch) and half of what the plain step has
    above it.

    Args:
        data: folder of CIFAR-10 (with ``cifar-10-batches-py`` in it); None trains on synthetic images.
        steps: training steps of each run.
        batch: images in a batch.
        device: where to train.
        progress: is told what is going on.

    Raises:
        InvalidArgumentError: torchvision is missing, the data is not there, or a number is out of range.
    """
    if steps < 2 or batch < 2:
        raise InvalidArgumentError("the demo needs at least two steps, and two images in a batch for BatchNorm")
    batches, source = _batches(data, steps, batch, device)
    progress(f"data: {source}")
    torch.manual_seed(0)
    model = _resnet50().to(device).train()
    twin = copy.deepcopy(model)
    images = batches[0][0]
    optimizer, twin_optimizer = _optimizer(model), _optimizer(twin)
    plain_report = _report(auto_checkpoint(twin, images, strategy="none", optimizer=twin_optimizer))
    half = (plain_report.plain_peak_bytes + plain_report.fixed_bytes) / 2
    progress(f"planning for {half / GIB:.3f} GiB instead of {plain_report.plain_peak_bytes / GIB:.3f} GiB")
    planned = auto_checkpoint(twin, images, budget_gb=half / GIB, optimizer=twin_optimizer)
    outcomes = []
    for name, net, opt in (("plain", model, optimizer), ("fxckpt", planned, twin_optimizer)):
        torch.manual_seed(1)
        outcomes.append(_train(net, opt, batches, lambda text, name=name: progress(f"{name}: {text}")))  # type: ignore[misc]
    (plain, plain_peak, plain_time), (ours, our_peak, our_time) = outcomes
    state = planned.state_dict()
    equal = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return DemoResult(_report(planned), plain, ours, plain_peak, our_peak, plain_time, our_time, equal, source)


def _report(planned: nn.Module) -> Report:
    report = get_report(planned)
    assert isinstance(report, Report), "ResNet-50 is captured whole"
    return report


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], progress: Callable[[str], None]
) -> tuple[tuple[float, ...], int, float]:
    """Losses, measured whole-step peak of the last step, and median seconds of a step."""
    losses, seconds, peak = [], [], 0
    for number, (images, labels) in enumerate(batches, 1):
        optimizer.zero_grad(set_to_none=True)

        def step(images: Tensor = images, labels: Tensor = labels) -> None:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            losses.append(loss.item())

        start = time.perf_counter()
        if number == len(batches):
            peak = measure_peak(step, held=(model, optimizer, images)).total_bytes
        else:
            step()
            seconds.append(time.perf_counter() - start)
        optimizer.step()
        progress(f"step {number} of {len(batches)}, loss {losses[-1]:.4f}")
    return tuple(losses), peak, sorted(seconds)[len(seconds) // 2] if seconds else 0.0


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _resnet50() -> nn.Module:
    model: nn.Module = _torchvision().models.resnet50(num_classes=CLASSES)
    return model


def _torchvision() -> Any:
    try:
        import torchvision
    except ImportError as error:
        raise InvalidArgumentError("the demo needs torchvision: pip install 'fxckpt[models]'") from error
    return torchvision


def _batches(data: Path | None, steps: int, batch: int, device: str) -> tuple[list[Batch], str]:
    torch.manual_seed(0)
    if data is None:
        shape = (batch, 3, 32, 32)
        made = [(torch.randn(shape, device=device), _labels(batch, device)) for _ in range(steps)]
        return made, f"synthetic images ({batch}x3x32x32)"
    return list(_cifar10(data, steps, batch, device)), f"CIFAR-10 from {data}"


def _labels(batch: int, device: str) -> Tensor:
    return torch.randint(0, CLASSES, (batch,), device=device)


def _cifar10(data: Path, steps: int, batch: int, device: str) -> Iterator[Batch]:
    datasets = _torchvision().datasets
    try:
        images = datasets.CIFAR10(str(data), train=True, download=False)
    except RuntimeError as error:
        raise InvalidArgumentError(f"no CIFAR-10 in {data}: it must hold the folder 'cifar-10-batches-py'") from error
    pixels = torch.from_numpy(images.data).permute(0, 3, 1, 2)
    labels = torch.tensor(images.targets)
    for step in range(steps):
        chosen = torch.arange(step * batch, (step + 1) * batch) % len(labels)
        yield (pixels[chosen].float() / 127.5 - 1).to(device), labels[chosen].to(device)
