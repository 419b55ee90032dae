"""The comparison with eager finds nothing between two plain runs and everything that is planted."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests import cases, harness


class Small(nn.Module):
    """A linear layer, a buffer, an unused parameter, a passthrough and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.spare = nn.Parameter(torch.ones(2))
        self.aux: Any = None
        self.fault = ""

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``[tensor, x]``, wrong in the way that ``fault`` names."""
        self.steps += 2 if self.fault == "buffer" else 1
        y = self.fc(x)
        if self.fault in FAULTS:
            y = FAULTS[self.fault](self, y)
        self.aux = y.detach() if self.fault == "attribute" else y.sum()
        if self.fault == "error":
            raise ValueError("planted")
        outputs = [y, x.clone() if self.fault == "alias" else x]
        return tuple(outputs) if self.fault == "type" else outputs


def _draw(draw: Any) -> Any:
    def fault(model: Small, y: torch.Tensor) -> torch.Tensor:
        draw()
        return y

    return fault


def _scaled_gradient(model: Small, y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda gradient: gradient * (1 + 1e-7))
    return y


FAULTS: dict[str, Any] = {
    "last bit": lambda model, y: torch.nextafter(y, y + 1),
    "stride": lambda model, y: y.t().contiguous().t(),
    "zeros for None": lambda model, y: y + 0 * model.spare.sum(),
    "detached": lambda model, y: y.detach(),
    "gradient": _scaled_gradient,
    "torch random": _draw(lambda: torch.rand(1)),
    "python random": _draw(random.random),
    "numpy random": _draw(numpy.random.rand),
}


def _build() -> Any:
    return Small(), (torch.randn(4, 4, requires_grad=True),), {}


def _loss(output: Any) -> torch.Tensor:
    return output[0].square().sum()


@pytest.mark.parametrize("fault", [*FAULTS, "buffer", "attribute", "error", "alias", "type"])
def test_planted_difference_is_found(fault: str) -> None:
    def make_planned(model: Any, args: Any, kwargs: Any) -> Any:
        model.fault = fault
        return model

    found = harness.compare(_build, _loss, make_planned=make_planned)
    found = [line for line in found if ".fault" not in line]
    assert found


@pytest.mark.parametrize("name", cases.names())
def test_eager_equals_eager(name: str) -> None:
    case = cases.load(name)
    options = {key: value for key, value in case.options().items() if key != "rounding"}
    plain = harness.record(case.build, case.loss, **options)
    again = harness.record(case.build, case.loss, **options)
    assert not list(harness.differences(plain, again))
    assert not [key for key in plain if key.endswith("error")]


def test_nan_equals_itself_and_zero_is_not_minus_zero() -> None:
    nan = harness.freeze([torch.tensor([float("nan"), 0.0]), float("nan")])
    assert not list(harness.differences(nan, harness.freeze([torch.tensor([float("nan"), 0.0]), float("nan")])))
    assert list(harness.differences(nan, harness.freeze([torch.tensor([float("nan"), -0.0]), float("nan")])))
