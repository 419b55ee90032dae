from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt.optimizer import optimizer_state_bytes

SCALAR = 4  # bytes of a step counter, which the prediction leaves out


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5), 3),
    ],
)
def test_state_is_known_before_the_first_step(make: Callable[[Any], torch.optim.Optimizer], copies: int) -> None:
    model = _model()
    optimizer = make(model.parameters())
    parameters = sum(4 * p.numel() for p in model.parameters())
    before = optimizer_state_bytes(optimizer)
    assert before == copies * parameters
    assert not optimizer.state
    _step(model, optimizer)
    assert before <= optimizer_state_bytes(optimizer) <= before + SCALAR * len(list(model.parameters()))


def test_parameters_with_and_without_state_are_told_apart() -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert optimizer_state_bytes(optimizer) == 4 * (32 + 2)
    _step(model, optimizer)
    model[0].requires_grad_(True)
    assert optimizer_state_bytes(optimizer) == 4 * (32 + 2 + 128 + 16)


def test_groups_have_their_own_options() -> None:
    model = _model()
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1].parameters()}]
    assert optimizer_state_bytes(torch.optim.SGD(groups, lr=0.1)) == 4 * (128 + 16)


def test_no_optimizer_and_one_that_cannot_be_tried() -> None:
    assert optimizer_state_bytes(None) == 0
    assert optimizer_state_bytes(torch.optim.LBFGS(_model().parameters())) == 0
