"""Models that cannot be captured whole: what is planned, what is left, and that everything else is as in eager."""

from __future__ import annotations

import inspect
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt import auto_checkpoint, get_graph_module, get_plan, get_report, make_plan
from fxckpt.check import CheckResult
from fxckpt.errors import BudgetInfeasibleError, CaptureError, FxckptError, InvalidArgumentError
from fxckpt.measure import compare_steps, default_loss
from fxckpt.model import planner_of
from fxckpt.plan import Plan
from fxckpt.regions import thin
from fxckpt.report_regions import RegionsReport
from tests import harness


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).sin())


class Router(nn.Module):
    """Takes one of two blocks by the value of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line in the report
            return self.left(x)
        return self.right(x)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.router, self.head = Block(width), Router(width), Block(width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.router(self.stem(x)))


def _net() -> tuple[Net, Tensor]:
    harness.seed_all()
    return Net(), torch.rand(64, 16)


def _build() -> Any:
    model, x = _net()
    return model, (x,), {}


def _loss(output: Tensor) -> Tensor:
    return output.square().sum()


def _report(model: nn.Module) -> RegionsReport:
    report = get_report(model)
    assert isinstance(report, RegionsReport)
    return report


def _smallest(**options: Any) -> int:
    model, x = _net()
    with pytest.raises(BudgetInfeasibleError) as caught:
        make_plan(model, x, budget_gb=1e-9, **options)
    return caught.value.min_peak_bytes


def test_the_report_names_what_is_left_why_and_where() -> None:
    model, x = _net()
    planned = auto_checkpoint(model, x, strategy="none")
    report = _report(planned)
    assert [row[0] for row in report.rows] == ["stem", "router.left", "head"]
    source, first = inspect.getsourcelines(Router.forward)
    line = first + next(index for index, text in enumerate(source) if "the line in the report" in text)
    assert [item.module for item in report.left] == ["router"]
    assert report.left[0].source == f"{__file__}:{line}"
    text = " ".join(str(report).split())
    for words in ("router.left", "Left in Python", f"router, {__file__}:{line}", report.left[0].reason):
        assert " ".join(words.split()) in text
    with pytest.raises(FxckptError, match="not captured whole"):
        get_graph_module(planned)


def test_the_report_as_data_and_markdown() -> None:
    model, x = _net()
    report = _report(auto_checkpoint(model, x, strategy="sqrtn"))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert [region["path"] for region in data["regions"]] == ["stem", "router.left", "head"]
    assert data["plain_peak_bytes"] >= data["predicted_peak_bytes"] == report.peak_bytes
    assert data["left"][0]["module"] == "router"
    assert report.overhead > 0
    assert "| stem" in report.to_markdown()


@pytest.mark.parametrize("strategy", ["none", "sqrtn", "dp"])
def test_numbers_are_eagers(strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "dp":
        options["budget_gb"] = _smallest() / 2**30

    def make(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        return auto_checkpoint(model, *args, **options)

    other_side = lambda: [((-torch.rand(64, 16),), {})]  # noqa: E731  the router goes right
    assert harness.compare(_build, _loss, make_planned=make, extra_batches=other_side, repeat=2) == []


def test_a_block_that_is_met_later_becomes_a_region() -> None:
    model, x = _net()
    planned = auto_checkpoint(model, x, strategy="none")
    seen = []
    model.router.right.register_forward_hook(lambda *_: seen.append("hook"))
    planned(-x).sum().backward()
    assert model.router.right.up.weight.grad is not None
    assert seen == ["hook"]


def test_later_steps_run_the_plans_that_share_the_budget() -> None:
    model, x = _net()
    planned = auto_checkpoint(model, x, budget_gb=_smallest() / 2**30)
    regions = planner_of(planned).regions
    assert regions is not None
    uses = dict(regions.uses)
    for _ in range(3):  # without gradients from before, then with them
        planned(x).sum().backward()
    assert regions.uses == uses


def test_a_region_met_later_takes_what_the_budget_leaves() -> None:
    plans = {}
    for budget in (_smallest(), 2**30):
        model, x = _net()
        planned = auto_checkpoint(model, x, budget_gb=budget / 2**30)
        planned(-x).sum().backward()
        plans[budget] = dict(_plans_of_uses(planned))["router.right"]
    small, large = plans.values()
    assert small.extra_seconds > large.extra_seconds == 0


def _plans_of_uses(planned: nn.Module) -> list[tuple[str, Plan]]:
    regions = planner_of(planned).regions
    assert regions is not None
    return [(use.path, use.decision.plan) for use in regions.uses.values() if use.decision is not None]


def test_leave_keeps_modules_out_of_every_region() -> None:
    model, x = _net()
    report = _report(auto_checkpoint(model, x, strategy="none", leave=("router", "st*")))
    assert [row[0] for row in report.rows] == ["head"]
    assert "as asked" in str(report)
    inner = _report(auto_checkpoint(model, x, strategy="none", leave=("*.down", "router.*")))
    assert not [row[0] for row in inner.rows if row[0].endswith("down") or row[0].startswith("router")]


def test_leave_works_for_a_model_that_could_be_captured_whole() -> None:
    harness.seed_all()
    model = nn.Sequential(Block(16), Block(16), Block(16))
    planned = auto_checkpoint(model, torch.rand(8, 16), strategy="none", leave=("1",))
    assert [row[0] for row in _report(planned).rows] == ["0", "2"]


def test_regions_says_what_to_plan() -> None:
    model, x = _net()
    report = _report(auto_checkpoint(model, x, strategy="none", regions=("router.*",)))
    assert [row[0] for row in report.rows] == ["router.left"]


@pytest.mark.parametrize("option", ["leave", "regions"])
def test_patterns_that_match_nothing_are_refused(option: str) -> None:
    model, x = _net()
    for wrong in (("encoder.*",), "router"):
        with pytest.raises(InvalidArgumentError, match=r"encoder|tuple"):
            auto_checkpoint(model, x, strategy="none", **{option: wrong})


def test_one_budget_covers_all_regions() -> None:
    plain = _plan(strategy="none")
    smallest = _smallest()
    assert smallest < plain.peak_bytes
    middle = (smallest + plain.peak_bytes) // 2
    plans = [_plan(budget_gb=budget / 2**30) for budget in (smallest, middle, plain.peak_bytes)]
    for plan, budget in zip(plans, (smallest, middle, plain.peak_bytes), strict=True):
        assert plan.peak_bytes <= plan.budget_bytes == budget
        assert [path for path, _ in plan.regions] == ["stem", "router.left", "head"]
    prices = [plan.extra_seconds for plan in plans]
    assert prices[0] > prices[1] > prices[2] == 0
    with pytest.raises(BudgetInfeasibleError) as caught:
        _plan(budget_gb=(smallest - 1) / 2**30)
    assert caught.value.min_peak_bytes == smallest
    assert "Try: budget_gb=" in str(caught.value)
    best = _plan(budget_gb=1e-9, on_infeasible="best")
    assert best.peak_bytes == smallest


def _plan(**options: Any) -> Plan:
    model, x = _net()
    return make_plan(model, x, **options)


def test_a_plan_with_regions_comes_back_from_json() -> None:
    plan = _plan(budget_gb=_smallest() / 2**30)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    model, x = _net()
    planned = auto_checkpoint(model, x, plan=read)
    assert {path: part.segments for path, part in get_plan(planned).regions} == {
        path: part.segments for path, part in plan.regions
    }


class Counting(nn.Module):
    """State that a forward too many would show."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.drop = Net(), nn.BatchNorm1d(16), nn.Dropout()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.norm(self.net(x)))


def test_planning_leaves_no_trace() -> None:
    harness.seed_all()
    model = Counting()
    x = torch.rand(64, 16)
    fired: list[str] = []
    for name in ("net", "net.router", "net.router.left", "norm"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    before = harness.freeze(model.state_dict())
    attributes = [sorted(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    planned = auto_checkpoint(model, x, strategy="none")
    assert list(harness.differences(before, harness.freeze(model.state_dict()))) == []
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert (model.calls, model.norm.num_batches_tracked.item()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert fired == []
    planned(x).sum().backward()
    assert (model.calls, model.norm.num_batches_tracked.item()) == (1, 1)
    assert fired == ["net.router.left", "net.router", "net", "norm"]


def test_after_a_step_the_original_runs_its_own_code() -> None:
    model, x = _net()
    planned = auto_checkpoint(model, x, strategy="sqrtn")
    planned(x).sum().backward()
    assert not any("forward" in vars(module) for module in model.modules())
    harness.seed_all()
    twin = Net()
    assert torch.equal(model(x), twin(x))
    assert torch.equal(planned.eval()(x), twin(x))


def test_an_error_in_forward_puts_every_forward_back() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three")
            return super().forward(x)

    harness.seed_all()
    model = Fails()
    planned = auto_checkpoint(model, torch.rand(8, 16), strategy="none")
    with pytest.raises(ValueError, match="three"):
        planned(torch.rand(3, 16))
    assert not any("forward" in vars(module) for module in model.modules())
    planned(torch.rand(8, 16)).sum().backward()


def test_nothing_to_plan_is_the_error_of_the_whole() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * (2 if x.sum() > 0 else 3)

    with pytest.raises(CaptureError) as caught:
        auto_checkpoint(Alone(), torch.ones(4), strategy="none")
    assert caught.value.source.startswith(__file__)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 1000])
def test_few_candidates_are_looked_at_first_and_last_among_them(count: int) -> None:
    chosen = thin(count)
    assert chosen == sorted(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert len(chosen) <= 16


def test_a_hook_that_forward_needs_runs_while_planning() -> None:
    harness.seed_all()
    model = Net()
    model.stem.register_forward_pre_hook(lambda _, args: (args[0][:, :16],))
    planned = auto_checkpoint(model, torch.rand(8, 20), strategy="none")
    assert [row[0] for row in _report(planned).rows] == ["stem", "router.left", "head"]


def test_the_check_takes_models_in_regions() -> None:
    model, x = _net()
    twin, _ = _net()
    planned = auto_checkpoint(twin, x, budget_gb=_smallest() / 2**30)
    found = compare_steps(model, planned, (x,), {}, default_loss, 0, measure=True)
    result = CheckResult.of(found, get_report(planned))
    assert result.equal
    assert "in regions" in result.render()
    assert result.predicted < result.plain_predicted
    assert result.measured < result.plain_measured


def test_a_region_lets_go_of_its_inputs_when_its_backward_has_run() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(16), Block(16)
            self.between: Any = lambda: None

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * (2 if x.sum() > 0 else 3)
            self.between = weakref.ref(y.untyped_storage())
            return self.second(y)

    harness.seed_all()
    model, x = Two(), torch.rand(8, 16)
    planned = auto_checkpoint(model, x, strategy="none", regions=("first", "second"))
    alive = []
    total = planned(x).sum()
    model.first.down.bias.register_hook(lambda _: alive.append(model.between() is not None))
    total.backward(retain_graph=True)
    total.backward()
    assert alive == [True, False]


class Between(nn.Module):
    """Python between the regions that holds much for backward, and lets go of what a region returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(16), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * (2 if x.sum() > 0 else 3)
        for _ in range(6):
            y = (y + 0.1).sin()
        return self.second(y)


@pytest.mark.parametrize("strategy", ["none", "sqrtn", "dp"])
def test_what_the_python_in_between_holds_is_predicted(strategy: str) -> None:
    harness.seed_all()
    model, x = Between(), torch.rand(2048, 16)
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "dp":
        options.update(budget_gb=1e-9, on_infeasible="best")
    planned = auto_checkpoint(model, x, **options)
    found = compare_steps(model, planned, (x,), measure=True)
    assert found.equal
    assert found.planned_peak is not None
    assert found.planned_peak.total_bytes == pytest.approx(_report(planned).peak_bytes, rel=0.05)


def test_a_hook_of_a_library_that_sleeps_while_planning_still_fires_later() -> None:
    found: list[Tensor] | None = None

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if found is not None:
            found.append(output)

    hook.__module__ = "transformers.utils.output_capturing"
    model, x = _net()
    model.stem.up.register_forward_hook(hook)
    planned = auto_checkpoint(model, x, strategy="none")
    found = []
    planned(x)
    assert len(found) == 1
