"""Budgets: what counts in them, what they cost, and that less memory is never faster.

That every model's measured peak is the predicted one, within its budget, is shown in test_equivalence.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fxckpt import auto_checkpoint, get_plan, make_plan
from fxckpt.measure import default_loss, measure_peak
from tests import harness, models
from tests.planning import STRATEGIES, smallest_peak

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 0.02


def _measured(case: models.ModelCase, model: nn.Module, args: Any, kwargs: Any, optimizer: Any = None) -> int:
    """Peak in bytes of a whole step from fresh gradients, after one step to warm up."""

    def step() -> None:
        # The output gets no name: it would hold the logits while backward runs.
        case.loss(model(*args, **kwargs)).backward()

    step()
    model.zero_grad()
    peak = measure_peak(step, held=(model, args, kwargs, optimizer)).total_bytes
    model.zero_grad()  # gradients that exist would count in the next plan
    return peak


def _built(name: str) -> tuple[models.ModelCase, nn.Module, tuple[Any, ...], dict[str, Any]]:
    harness.seed_all()
    case = models.get(name)
    return (case, *case.build())


@functools.cache
def _plain_peak(name: str) -> int:
    case, model, args, kwargs = _built(name)
    return _measured(case, model, args, kwargs)


def test_sqrtn_lowers_the_activation_peak_of_a_chain_fourfold() -> None:
    name = "chain64_gelu"
    case, model, args, kwargs = _built(name)
    planned = STRATEGIES["sqrtn"](model, args, kwargs)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    fixed = 2 * parameter_bytes + args[0].nbytes  # with their gradients
    assert _plain_peak(name) - fixed >= 4 * (_measured(case, planned, args, kwargs) - fixed)


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_smaller_budgets_never_peak_higher_nor_work_less(name: str) -> None:
    case, model, args, kwargs = _built(name)
    smallest, plain = smallest_peak(model, args, kwargs), _plain_peak(name)
    peaks, seconds = [], []
    for step in range(8):
        budget_bytes = smallest + (plain - smallest) * step // 7
        planned = auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=budget_bytes / 2**30)
        peaks.append(_measured(case, planned, args, kwargs))
        seconds.append(get_plan(planned).extra_seconds)
        assert peaks[-1] <= budget_bytes
    assert seconds == sorted(seconds, reverse=True)
    # Plans of equal cost may differ by a temporary.
    assert all(low <= high * 1.01 for low, high in itertools.pairwise(peaks))


def test_budget_of_the_plain_peak_recomputes_nothing() -> None:
    case, model, args, kwargs = _built("unet")
    # The prediction has the output alive through backward, which the measured step gives up.
    plan = make_plan(model, *args, budget_gb=(1 + TOLERANCE) * _plain_peak("unet") / 2**30)
    assert plan.extra_seconds == 0


def test_optimizer_state_counts() -> None:
    case, model, args, kwargs = _built("gpt2")
    optimizer = torch.optim.Adam(model.parameters())
    without = smallest_peak(model, args, kwargs)
    before = smallest_peak(model, args, kwargs, optimizer=optimizer)
    case.loss(model(*args, **kwargs)).backward()
    optimizer.step()
    model.zero_grad()
    after = smallest_peak(model, args, kwargs, optimizer=optimizer)
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    assert after - without == pytest.approx(state_bytes, rel=0.01)
    assert before in (without, pytest.approx(after, rel=0.01))
    planned = auto_checkpoint(model, *args, example_kwargs=kwargs, budget_gb=after / 2**30, optimizer=optimizer)
    assert _measured(case, planned, args, kwargs, optimizer) <= after


def test_reserve_is_left_free() -> None:
    case, model, args, kwargs = _built("unet")
    assert smallest_peak(model, args, kwargs, reserve_gb=2**20 / 2**30) == smallest_peak(model, args, kwargs) + 2**20


def test_existing_gradients_count_when_accumulating() -> None:
    case, model, args, kwargs = _built("chain64_gelu")
    case.loss(model(*args)).backward()
    smallest = smallest_peak(model, args, kwargs)
    planned = auto_checkpoint(model, *args, budget_gb=smallest / 2**30)

    def step() -> None:
        case.loss(planned(*args)).backward()

    step()
    measured = measure_peak(step, held=(planned, args)).total_bytes
    assert measured <= smallest
    assert measured == pytest.approx(smallest, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["unet", "gpt2", "chain64_gelu", "convnext"])
def test_dp_at_its_smallest_is_below_sqrtn(name: str) -> None:
    case, model, args, kwargs = _built(name)
    sqrtn = make_plan(model, *args, example_kwargs=kwargs, strategy="sqrtn")
    assert smallest_peak(model, args, kwargs) <= sqrtn.peak_bytes


def test_copies_of_buffers_that_forward_reads_and_writes_count() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("queue", torch.ones(1024, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) @ self.queue.clone().T
            with torch.no_grad():
                self.queue.mul_(0.5)
            return y.sum()

    def step() -> None:
        planned(x).backward()

    model, x = Queue(), torch.ones(8, 64)
    planned = auto_checkpoint(model, x, strategy="none")
    step()
    model.zero_grad()
    measured = measure_peak(step, held=(model, x)).total_bytes
    assert abs(get_plan(planned).peak_bytes - measured) < 100


def test_what_an_lstm_hands_to_its_backward_counts() -> None:
    def step() -> None:
        output = planned(x, state)[0]
        default_loss(output).backward()

    model, x = nn.LSTM(16, 32, bidirectional=True, batch_first=True), torch.randn(8, 20, 16)
    state = torch.zeros(2, 8, 32), torch.zeros(2, 8, 32)
    planned = auto_checkpoint(model, x, state, strategy="none")
    step()
    model.zero_grad()
    measured = measure_peak(step, held=(model, x, state)).total_bytes
    assert abs(get_plan(planned).peak_bytes - measured) < 100
