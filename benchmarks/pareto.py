"""Peak, counted overhead and bound over ten budgets, with what else there is measured in the same run."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.counting import WorkCounter, counted_seconds
from benchmarks.models import MODELS, Workload
from benchmarks.peers import Peer, peers
from fxckpt import auto_checkpoint, get_report, make_plan
from fxckpt.errors import BudgetInfeasibleError
from fxckpt.measure import held_bytes, measure_peak

__all__ = ["pareto"]

FRACTIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
POINTS = 10
MEGABYTE = 1e6
DEVICE = "a100"  # whose roofline seconds are planned with and counted


def pareto(name: str, *, existing: bool = False, with_peers: bool = True) -> list[dict[str, Any]]:
    """Measure model ``name``: one row for plain, one for each peer, ten for fxckpt.

    Peaks are those of the allocator above what is held when the step begins; overheads are counted work relative
    to plain, minus one.

    Args:
        name: one of :data:`benchmarks.models.MODELS`.
        existing: gradients are allocated when the step begins, so that activations alone count.
        with_peers: measure the peers too.
    """
    bench = _Bench(name, existing)
    rows = [bench.plain_row()]
    _show(name, rows[0])
    if with_peers:
        for peer in peers():
            rows.append(bench.peer_row(peer))
            _show(name, rows[-1])
    for row in bench.fxckpt_rows():
        rows.append(row)
        _show(name, row)
    return rows


class _Bench:
    """One model: plain figures to compare with, and the measurement of a transformed model."""

    def __init__(self, name: str, existing: bool) -> None:
        self.name, self.existing = name, existing
        work = self.build()
        self.plain_state: list[torch.Tensor | None] = []
        self.plain_seconds = 1.0
        self.plain_peak, self.plain_seconds, self.plain_state, _ = self.measure(work, work.model)
        self.plain_seconds = max(self.plain_seconds, 1e-12)

    def build(self) -> Workload:
        torch.manual_seed(0)
        return MODELS[self.name]()

    def measure(
        self, work: Workload, model: nn.Module, peer: Peer | None = None
    ) -> tuple[int, float, list[torch.Tensor | None], str]:
        """Peak in bytes, counted seconds, and the state after the first step with how it compares with plain."""
        self._reset_gradients(work.model)
        torch.manual_seed(1)
        if peer is not None and peer.counter is not None:
            seconds = _compiled_seconds(work, model, peer.counter)
        else:
            seconds = counted_seconds(lambda: work.step(model), DEVICE)
        state = [p.grad for p in work.model.parameters()] + list(work.model.buffers())
        verdict = self._verdict(state)
        kept = state if not self.plain_state else []
        kept = [None if t is None else t.clone() for t in kept]
        del state
        self._reset_gradients(work.model)
        peak = measure_peak(lambda: work.step(model)).peak_bytes
        return peak, seconds, kept, verdict

    def _reset_gradients(self, model: nn.Module) -> None:
        """Gradients None, or zeros where they have to exist already: adding to zero does not change a number."""
        for parameter in model.parameters():
            if not self.existing:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _verdict(self, state: list[torch.Tensor | None]) -> str:
        if not self.plain_state:
            return "equal"
        worst = 0.0
        for mine, plain in zip(state, self.plain_state, strict=True):
            if mine is None or plain is None:
                if mine is not plain:
                    return "None differs"
            elif not torch.equal(mine, plain):
                scale = plain.double().norm().item() or 1.0
                worst = max(worst, (mine.double() - plain.double()).norm().item() / scale)
        return f"off by {worst:.1e}" if worst else "equal"

    def row(self, method: str, peak: int, seconds: float, verdict: str, **more: Any) -> dict[str, Any]:
        return {
            "model": self.name,
            "method": method,
            "gradients": "existing" if self.existing else "fresh",
            "peak_bytes": peak,
            "share": peak / self.plain_peak,
            "overhead": seconds / self.plain_seconds - 1,
            "numbers": verdict,
            **more,
        }

    def plain_row(self) -> dict[str, Any]:
        return self.row("plain", self.plain_peak, self.plain_seconds, "equal", plain_seconds=self.plain_seconds)

    def peer_row(self, peer: Peer) -> dict[str, Any]:
        work = self.build()
        try:
            peak, seconds, _, verdict = self.measure(work, peer.apply(work), peer)
        except Exception as error:  # a peer that fails is a result
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
            return {"model": self.name, "method": peer.name, "error": text}
        return self.row(peer.name, peak, seconds, verdict)

    def fxckpt_rows(self) -> Iterator[dict[str, Any]]:
        work = self.build()
        state = copy.deepcopy(work.model.state_dict())
        self._reset_gradients(work.model)
        held = held_bytes((work.model, work.args, work.kwargs))
        for budget_bytes in self._budgets(work, held):
            work.model.load_state_dict(state)
            self._reset_gradients(work.model)
            start = time.perf_counter()
            with work.context():
                planned = auto_checkpoint(
                    work.model, *work.args, example_kwargs=work.kwargs, budget_gb=budget_bytes / 2**30, cost=DEVICE,
                    reserve_gb=work.outside_bytes / 2**30,
                )  # fmt: skip
            plan_seconds = time.perf_counter() - start
            report = get_report(planned)
            peak, seconds, _, verdict = self.measure(work, planned)
            bound = None if report.bound_seconds is None else report.bound_seconds / report.plain_seconds
            yield self.row(
                "fxckpt",
                peak,
                seconds,
                verdict,
                budget_bytes=budget_bytes - held,
                predicted_bytes=report.peak_bytes + work.outside_bytes - held,
                predicted_overhead=report.overhead,
                bound=bound,
                plan_seconds=plan_seconds,
            )

    def _budgets(self, work: Workload, held: int) -> list[int]:
        smallest = _smallest(work)
        budgets = [held + int(fraction * self.plain_peak) for fraction in FRACTIONS]
        budgets = [budget for budget in budgets if budget >= smallest]
        gap = POINTS - len(budgets)
        lowest = max(smallest, budgets[-1] if budgets else held + self.plain_peak)
        below = [smallest + (lowest - smallest) * (gap - 1 - index) // gap for index in range(gap)]
        return list(dict.fromkeys(budgets + below))  # a model that is all parameters has nothing to choose


def _smallest(work: Workload) -> int:
    try:
        with work.context():
            make_plan(
                work.model, *work.args, example_kwargs=work.kwargs, budget_gb=1e-6 + work.outside_bytes / 2**30,
                cost=DEVICE, reserve_gb=work.outside_bytes / 2**30,
            )  # fmt: skip
    except BudgetInfeasibleError as error:
        return error.min_peak_bytes
    raise AssertionError("a budget of a kilobyte was met")


def _compiled_seconds(work: Workload, model: nn.Module, counter: WorkCounter) -> float:
    """Work inside the compiled graphs, plus that of the loss outside of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counter.active, before = True, counter.seconds
        work.step(model)
        counter.active = False
    return counter.seconds - before + _loss_seconds(work)


def _loss_seconds(work: Workload) -> float:
    state = copy.deepcopy(work.model.state_dict())
    random_state = torch.get_rng_state()
    with torch.no_grad(), work.context():
        output = work.model(*work.args, **work.kwargs)
    work.model.load_state_dict(state)
    torch.set_rng_state(random_state)
    if not isinstance(output, torch.Tensor):
        return 0.0
    output = output.detach().requires_grad_()
    return counted_seconds(lambda: work.loss(output).backward(), DEVICE)  # type: ignore[no-untyped-call]


def _show(name: str, row: dict[str, Any], show: Callable[..., None] = print) -> None:
    if "error" in row:
        show(f"{name:14} {row['method']:22} {row['error']}", flush=True)
        return
    line = f"{name:14} {row['method']:22} {row['peak_bytes'] / MEGABYTE:8.1f} MB {row['share']:6.3f}"
    line += f" {row['overhead']:+8.2%}  {row['numbers']}"
    if "budget_bytes" in row:
        bound = "" if row["bound"] is None else f", bound {row['bound']:+.2%}"
        line += f"  (budget {row['budget_bytes'] / MEGABYTE:.1f}, predicted {row['predicted_bytes'] / MEGABYTE:.1f} MB"
        line += f" {row['predicted_overhead']:+.2%}{bound}, planned in {row['plan_seconds']:.1f} s)"
    show(line, flush=True)
