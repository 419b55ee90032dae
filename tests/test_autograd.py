"""Every way of asking for gradients gives those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests import harness
from tests.planning import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SECOND_ORDER = 2e-6  # see harness.differences

WAYS = ["dp", "sqrtn", "recompute", "recompute whole", "lazy"]


class TwoHeads(nn.Module):
    """Dropout, BatchNorm and three outputs, one of which has a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.mid = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.first, self.second = nn.Linear(16, 3), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.body(x)
        h = h + self.mid(h)
        return self.first(h), self.second(h).tanh(), h


def _build() -> Any:
    return TwoHeads().train(), (torch.randn(6, 8, requires_grad=True),), {}


def _check(
    steps: Callable[[nn.Module, torch.Tensor], Any], way: str, build: Any = _build, rounding: float = 0.0
) -> None:
    """Run ``steps(model, input)`` on both sides and compare what it returns, gradients and buffers."""

    def run(make_planned: harness.MakePlanned | None) -> Any:
        harness.seed_all()
        model, args, kwargs = build()
        if make_planned:
            model = make_planned(model, args, kwargs)
        harness.seed_all()
        result = steps(model, args[0])
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return harness.freeze([result, gradients, args[0].grad, dict(model.named_buffers())]), harness._random_state()

    plain, planned = run(None), run(STRATEGIES[way])
    found = [line for a, b in zip(plain, planned, strict=True) for line in harness.differences(a, b, rounding=rounding)]
    assert found == []


@pytest.mark.parametrize("way", WAYS)
def test_retain_graph_and_many_backwards(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        first, second, _ = model(x)
        first.sum().backward(retain_graph=True)
        middle = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        second.square().sum().backward(retain_graph=True)
        (first.mean() + second.mean()).backward()
        return middle

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_second_backward_without_retain_graph_raises(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        loss = model(x)[0].sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_autograd_grad_of_any_inputs(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        first, second, _ = model(x)
        loss = first.sum() + second.square().mean()
        parameters = list(model.parameters())
        some = torch.autograd.grad(loss, [x, parameters[0]], retain_graph=True)
        unused = torch.autograd.grad(first.sum(), parameters, retain_graph=True, allow_unused=True)
        vector = torch.autograd.grad([first, second], parameters, [torch.ones_like(first), second.detach()])
        assert all(p.grad is None for p in parameters)
        return some, unused, vector

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_an_output_that_another_output_comes_from(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        first, _, h = model(x)
        return torch.autograd.grad(first.square().sum(), [h, x])

    _check(steps, way)


class _WithLoss(nn.Module):
    """Returns its loss and the logits that it computes the loss from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, torch.arange(len(x))), "logits": logits}


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_the_logits_before_the_loss(way: str) -> None:
    found = []
    for planned in (False, True):
        harness.seed_all()
        model, x = _WithLoss(), torch.randn(5, 4)
        if planned:
            model = STRATEGIES[way](model, (x,), {})
        output = model(x)
        found.append(torch.autograd.grad(output["loss"], [output["logits"], *model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_backward_with_inputs_touches_only_them(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        model(x)[0].square().sum().backward(inputs=[next(model.parameters())])

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_outputs_that_the_loss_ignores(used: tuple[int, ...], way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        outputs = model(x)
        sum((outputs[i].square().sum() for i in used), torch.zeros(())).backward()

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_outputs_arrive_one_after_the_other(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        for used in ((0,), (1, 2), (0, 1, 2)):
            outputs = model(x)
            sum((outputs[i].square().sum() for i in used), torch.zeros(())).backward()

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_penalty(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        first, second, _ = model(x)
        (gradient,) = torch.autograd.grad(first.sum() + second.sum(), x, create_graph=True)
        (first.mean() + (gradient.norm(dim=-1) - 1).square().mean()).backward()
        return gradient

    _check(steps, way, rounding=SECOND_ORDER)


@pytest.mark.parametrize("way", WAYS)
def test_third_order(way: str) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), (torch.randn(3, 4, requires_grad=True),), {}

    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        value = model(x).sum()
        orders = []
        for _ in range(3):
            (value_gradient,) = torch.autograd.grad(value, x, create_graph=True)
            orders.append(value_gradient)
            value = value_gradient.square().sum()
        value.backward()
        return orders

    _check(steps, way, build, rounding=SECOND_ORDER)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_gradients_to_parameters(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        parameters = list(model.parameters())
        first = functional.cross_entropy(model(x)[0], torch.arange(6) % 3)
        inner = torch.autograd.grad(first, parameters, create_graph=True, allow_unused=True)
        sum(g.square().sum() for g in inner if g is not None).backward()  # type: ignore[union-attr]
        return inner

    _check(steps, way, rounding=SECOND_ORDER)


@pytest.mark.parametrize("way", WAYS)
def test_several_forwards_before_one_backward(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        losses = [model(x * scale)[0].square().sum() for scale in (1.0, 0.5, 2.0)]
        sum(losses[1:], losses[0]).backward()
        return losses

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_forwards_and_backwards_interleaved(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        first = model(x)[0].square().sum()
        second = model(-x)[1].sum()
        first.backward()
        third = model(2 * x)[2].mean()
        third.backward()
        second.backward()

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_output_of_one_call_is_input_of_the_next(way: str) -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 6))
        return model, (torch.randn(4, 6, requires_grad=True),), {}

    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(model(x))
        y.square().sum().backward()
        return y

    _check(steps, way, build)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_parameters_outputs_and_inputs(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        calls: list[Any] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name: calls.append((name, g.clone())))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad.clone())))
        x.register_hook(lambda g: g * 2)
        first, second, _ = model(x)
        first.register_hook(lambda g: g.clamp(-0.1, 0.1))
        second.retain_grad()
        (first.square().sum() + second.sum()).backward()
        return sorted(((name, g) for name, g in calls), key=lambda entry: entry[0]), second.grad

    _check(steps, way)


@pytest.mark.parametrize("way", WAYS)
def test_optimizer_in_backward(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            model(x)[0].square().sum().backward()
        return [p.detach().clone() for p in model.parameters()]

    def build() -> Any:
        return TwoHeads().train(), (torch.randn(6, 8),), {}

    _check(steps, way, build)


@pytest.mark.parametrize("way", WAYS)
def test_parameter_changed_before_backward_raises(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        loss = model(x)[0].square().sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (torch.randn(3, 4),), {}

    harness.seed_all()
    for make_planned in (None, STRATEGIES[way]):
        model, args, kwargs = build()
        steps(make_planned(model, args, kwargs) if make_planned else model, args[0])


@pytest.mark.parametrize("way", WAYS)
def test_input_changed_before_backward_raises(way: str) -> None:
    model, args = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (torch.randn(3, 4),)
    planned = STRATEGIES[way](model, args, {})
    loss = planned(*args).square().sum()
    args[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_output_may_be_changed_in_place(way: str) -> None:
    def build() -> Any:
        return (
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
            (torch.randn(4, 6, requires_grad=True),),
            {},
        )

    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x)
        y.mul_(2).relu_()
        y.sum().backward()
        return y

    _check(steps, way, build)


@pytest.mark.parametrize("way", WAYS)
def test_jacobian_vector_product_by_double_backward(way: str) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), (torch.randn(3, 4, requires_grad=True),), {}

    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x)
        dummy = torch.zeros_like(y, requires_grad=True)
        (gradient,) = torch.autograd.grad(y, x, dummy, create_graph=True)
        return torch.autograd.grad(gradient, dummy, torch.ones_like(x))

    _check(steps, way, build)


@pytest.mark.parametrize("way", ["dp", "recompute"])
def test_anomaly_mode_and_saved_tensor_hooks(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.detect_anomaly(check_nan=True), torch.autograd.graph.save_on_cpu():
            model(x)[0].square().sum().backward()

    _check(steps, way)


@pytest.mark.parametrize("way", ["dp", "recompute"])
def test_functional_call_and_swapped_parameters(way: str) -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> Any:
        fresh = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, fresh, (x,))
        loss = output[0].square().sum()
        return torch.autograd.grad(loss, list(fresh.values()), allow_unused=True)

    _check(steps, way)
