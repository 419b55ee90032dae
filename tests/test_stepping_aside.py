"""Where a planned graph cannot do what eager does, the model runs as it is and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.planning import STRATEGIES


def _planned() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(5, 4)
    return model, STRATEGIES["sqrtn"](model, (x,), {}), x


def _per_sample(model: nn.Module, x: Tensor) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (row[None],))
        return output.square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    return list(gradients.values())


def _forward_mode(model: nn.Module, x: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))))


def _global_hook(model: nn.Module, x: Tensor) -> list[Tensor]:
    calls: list[str] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(type(module).__name__)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        output = model(x)
    finally:
        handle.remove()
    return [output.detach(), *(torch.tensor(list(name.encode())) for name in calls)]


@pytest.mark.parametrize("use", [_per_sample, _forward_mode, _global_hook])
def test_the_model_runs_as_it_is_and_says_so_once(use: Any) -> None:
    model, planned, x = _planned()
    expected = use(model, x)
    with pytest.warns(UserWarning, match="runs as it is"):
        found = use(planned, x)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(planned, x)
        planned(x).sum().backward()
