from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt.measure import compare_steps, default_loss, held_bytes, measure_peak, named_tensors, same_bits

MIB = 2**20


def mib(count: float) -> Tensor:
    return torch.empty(int(count * MIB), dtype=torch.uint8)


def test_peak_of_a_hand_made_step_is_exact() -> None:
    def step() -> None:
        a = mib(1)
        b = mib(2)  # 3 live
        del a
        c = mib(0.5)  # 2.5 live
        del b
        d = mib(3)  # 3.5 live, the peak
        del c, d

    assert measure_peak(step).peak_bytes == 3.5 * MIB


def test_memory_from_before_the_step_counts_to_its_end() -> None:
    for _ in range(2):  # the profiler knows blocks of an earlier profile; that must make no difference
        kept = []
        measure_peak(lambda kept=kept: kept.append(mib(4)))

        def step(kept: list[Tensor] = kept) -> None:
            kept.clear()
            mib(3)

        found = measure_peak(step, held=kept)
        assert (found.peak_bytes, found.held_bytes, found.total_bytes) == (3 * MIB, 4 * MIB, 7 * MIB)


def test_peak_of_a_linear_step_is_the_sum_one_writes_down() -> None:
    layer = nn.Linear(512, 512, bias=False)  # weight 1 MiB
    x = torch.randn(512, 512)  # 1 MiB

    def step() -> None:
        y = layer(x)  # 1
        y.backward(torch.ones_like(y))  # 2 with the tangent, 3 with the gradient of the weight

    found = measure_peak(step, held=(layer, x))
    assert found.peak_bytes == 3 * MIB
    assert found.held_bytes == 2 * MIB
    layer.zero_grad(set_to_none=False)
    assert measure_peak(lambda: None, held=layer).held_bytes == 2 * MIB  # the gradient is held now


def test_backward_on_other_threads_is_seen() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(8, 64)

    def step() -> None:
        layers(x).sum().backward()

    first = measure_peak(step, held=layers)
    for parameter in layers.parameters():
        parameter.grad = None
    assert measure_peak(step, held=layers) == first


def test_held_bytes_count_each_storage_once() -> None:
    x = mib(2)
    layer = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    assert held_bytes([x, x[:5], {"again": x}]) == 2 * MIB
    assert held_bytes((layer, layer.weight)) == MIB
    layer(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    assert held_bytes((layer, optimizer)) == 4 * MIB + 4  # weight, gradient, two moments, the step counter


def test_unknown_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        measure_peak(lambda: None, device="meta")


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def test_default_loss_takes_the_models_own() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = x.sum()
    for output, expected in [
        (Output(x, loss), 3),
        ({"loss": loss, "logits": x}, 3),
        (Output(x), 5),
        ((x, [x, x.detach()]), 10),
        (torch.complex(x, x), 10),
    ]:
        assert default_loss(output).item() == expected
    with pytest.raises(ValueError, match="differentiable"):
        default_loss(x.detach())


def test_default_loss_has_the_gradient_of_a_sum_of_squares_and_no_other_memory() -> None:
    for dtype in (torch.float64, torch.complex128):
        x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        default_loss(x).backward()
        assert torch.equal(x.grad, 2 * x.detach())
    x = torch.randn(512, 512, requires_grad=True)
    assert measure_peak(lambda: default_loss(x).backward(), held=x).peak_bytes <= MIB + 16


def test_names_of_nested_tensors() -> None:
    x = torch.zeros(1)
    found = dict(named_tensors(({"a": x}, Output(x), [x])))
    assert list(found) == ["output[0]['a']", "output[1].logits", "output[2][0]"]


def test_same_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([0.0, 1.0]))
    assert same_bits(None, None)
    assert not same_bits(None, nan)
    assert not same_bits(nan, nan.double())
    assert not same_bits(torch.zeros(2), torch.zeros(1))
    sparse = torch.eye(2).to_sparse()
    assert same_bits(sparse, sparse.clone())
    assert not same_bits(sparse, torch.eye(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(self.norm(self.first(x)), 0.5)


def test_a_model_equals_its_copy_and_nothing_is_left_behind() -> None:
    model = Net()
    x = torch.randn(8, 4, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    model.first.weight.grad = torch.ones(4, 4)
    rng = torch.get_rng_state()
    found = compare_steps(model, copy.deepcopy(model), (x,), measure=True)
    assert found.equal
    assert found.differences == ()
    assert found.compared > 10
    assert found.plain_loss == found.planned_loss
    assert found.plain_peak is not None
    assert found.plain_peak == found.planned_peak
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.first.weight.grad, torch.ones(4, 4))
    assert model.norm.weight.grad is None
    assert model.calls == 0
    assert x.grad is None
    assert torch.equal(rng, torch.get_rng_state())


def test_shared_parameters_start_from_the_same_state() -> None:
    model = Net()
    assert compare_steps(model, model, (torch.randn(8, 4),), seed=None).equal


class Wrong(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "buffer":
            self.norm(x)
        if self.how == "gradient":
            return super().forward(x) + 0 * self.unused(x)
        if self.how == "python":
            random.random()
        out = super().forward(x)
        if self.how == "random":
            torch.rand(1)
        if self.how == "input":
            x.data.add_(1)
        return out


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("buffer", "buffer norm.running_mean"),
        ("gradient", "gradient of unused.weight"),
        ("random", "random state of cpu after the step"),
        ("python", "random state of python after the step"),
        ("input", "input[0][0] after the step"),
    ],
)
def test_each_kind_of_difference_is_named(how: str, named: str) -> None:
    model, other = Net(), Wrong(how)
    other.load_state_dict(model.state_dict())
    found = compare_steps(model, other, (torch.randn(8, 4),))
    assert not found.equal
    assert named in found.differences


def test_autocast_context_surrounds_the_forward() -> None:
    seen = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = Spy(4, 4)
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    assert compare_steps(model, model, (torch.randn(2, 4),), context=context).equal
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.gpu
def test_cuda_peak_counts_blocks_of_the_allocator() -> None:
    def step() -> None:
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")

    held = torch.empty(1, device="cuda")
    found = measure_peak(step, held=held)
    assert (found.peak_bytes, found.held_bytes) == (2 * MIB, 512)


def test_tensors_in_objects_of_the_output_are_compared() -> None:
    class Cache:
        def __init__(self, value: Tensor) -> None:
            self.layers = [{"keys": value}]

    class Model(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(2, 2), factor

        def forward(self, x: Tensor) -> Any:
            return {"y": self.linear(x), "cache": Cache(x * self.factor)}

    plain, other = Model(1.0), Model(2.0)
    other.linear = plain.linear
    assert compare_steps(plain, other, (torch.ones(1, 2),)).differences == ("output['cache'].layers[0]['keys']",)
