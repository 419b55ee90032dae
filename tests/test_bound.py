from __future__ import annotations

import random
import time

import pytest

from fxckpt.passes.bound import bound
from fxckpt.passes.cuts import cuts
from fxckpt.passes.dp import dp
from fxckpt.passes.menu import menu
from fxckpt.plan import Graph
from tests.oracle import Builder, Replay, checkmate, mlp, random_graph, replay


def reached(graph: Graph) -> list[Replay]:
    """Peak and price of the plans that the dynamic program finds."""
    chain = cuts(graph)
    return [replay(graph, plan) for plan in dp(graph, chain, menu(graph, chain), 5000).plans]


def chain(seed: int) -> Graph:
    """A chain of operations of random sizes, costs and reads."""
    draw = random.Random(seed)
    builder = Builder()
    value = builder.input()
    for _ in range(draw.randrange(4, 7)):
        reads = tuple(number for number in (value, -1) if draw.random() < 0.6)
        weight, size = draw.choice((0, 0, 2)), draw.randrange(1, 6)
        value = builder.op(value, size=size, seconds=float(draw.randrange(1, 6)), reads=reads, weight=weight)
    return builder.build(value)


@pytest.mark.parametrize("seed", range(40))
def test_never_above_the_optimum(seed: int) -> None:
    graph = chain(seed)
    results = reached(graph)
    low, high = min(result.peak_bytes for result in results), max(result.peak_bytes for result in results)
    for budget in range(max(low - 2, 1), high + 1, 2):
        optimum = checkmate(graph, budget)
        if optimum is not None:
            assert bound(graph, budget) <= optimum + 1e-6
            found = [result.extra_seconds for result in results if result.peak_bytes <= budget]
            assert min(found, default=float("inf")) >= optimum - 1e-6


@pytest.mark.parametrize("seed", range(60))
def test_never_above_a_plan(seed: int) -> None:
    graph = random_graph(seed, 24, reach=2, pinned=0.0, fresh_gradients=seed % 2 == 0)
    for result in reached(graph):
        assert bound(graph, result.peak_bytes) <= result.extra_seconds + 1e-6


def test_tight_on_a_chain() -> None:
    graph = mlp(20, 2, 8)
    for result in reached(graph):
        if result.peak_bytes < 60:
            break
        assert bound(graph, result.peak_bytes) >= 0.9 * result.extra_seconds


@pytest.mark.parametrize("seed", range(20))
def test_stops_where_enough_is_reached(seed: int) -> None:
    graph = random_graph(seed, 24, reach=2, pinned=0.0)
    for result in reached(graph):
        whole = bound(graph, result.peak_bytes)
        for enough in (0.0, whole / 2, whole, whole + 1):
            part = bound(graph, result.peak_bytes, enough=enough)
            assert min(whole, enough) <= part <= whole


def test_zero_where_everything_fits_and_monotone_below() -> None:
    graph = mlp(8, 2, 8, weight=2)
    peak = max(result.peak_bytes for result in reached(graph))
    bounds = [bound(graph, budget) for budget in range(peak, graph.fixed_bytes, -3)]
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    assert bounds[-1] > 0


def test_a_large_graph_takes_a_moment() -> None:
    graph = mlp(2000, 2, 8, weight=3)
    start = time.perf_counter()
    assert bound(graph, 9000) > 0
    assert time.perf_counter() - start < 10
