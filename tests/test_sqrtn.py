from __future__ import annotations

import pytest

from fxckpt.passes.cuts import cuts
from fxckpt.passes.sqrtn import sqrtn
from fxckpt.plan import Segment
from tests.oracle import Builder, mlp, random_graph, replay


def test_the_first_plan_has_about_sqrt_n_segments() -> None:
    graph = mlp(32)
    chain = cuts(graph)
    assert len(sqrtn(graph, chain).plans[0].segments) == 8
    assert {len(plan.segments) for plan in sqrtn(graph, chain).plans} >= {1, 2, 4, 16, 64}


def test_sqrt_n_lowers_the_peak_of_a_long_chain_fourfold() -> None:
    graph = mlp(64)
    plans = sqrtn(graph, cuts(graph)).plans
    whole = next(plan for plan in plans if len(plan.segments) == 1)
    assert 4 * (replay(graph, plans[0]).peak_bytes - graph.fixed_bytes) <= replay(graph, whole).peak_bytes


def test_segments_hold_equal_bytes() -> None:
    builder = Builder()
    x = builder.input()
    for size in (12, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        x = builder.op(x, size=size, reads=(x,), weight=1)
    graph = builder.build(x)
    plan = next(plan for plan in sqrtn(graph, cuts(graph)).plans if len(plan.segments) == 2)
    assert [segment.stop for segment in plan.segments] == [1, 13]


def test_only_the_last_segment_keeps_what_it_need_not() -> None:
    graph = mlp(16)
    *others, last = sqrtn(graph, cuts(graph)).plans[0].segments
    assert all(segment.kept == () for segment in others)
    assert len(last.kept) > 0


def test_a_single_segment_recomputes_nothing() -> None:
    graph = mlp(4)
    plan = next(plan for plan in sqrtn(graph, cuts(graph)).plans if len(plan.segments) == 1)
    assert (plan.extra_seconds, replay(graph, plan).extra_seconds) == (0.0, 0.0)


def test_what_cannot_be_recomputed_is_kept() -> None:
    builder = Builder()
    x = builder.input()
    for index in range(9):
        x = builder.op(x, size=2, reads=(x, -1), weight=1, recomputable=index != 1)
    graph = builder.build(x)
    first = sqrtn(graph, cuts(graph)).plans[0].segments[0]
    assert isinstance(first, Segment)
    assert graph.nodes[graph.forward[1]].name in first.kept


@pytest.mark.parametrize("seed", range(40))
def test_predicted_time_is_that_of_a_replay(seed: int) -> None:
    graph = random_graph(seed, 24, reach=2)
    for plan in sqrtn(graph, cuts(graph)).plans:
        assert plan.strategy == "sqrtn"
        assert [s.start for s in plan.segments] == [0, *(s.stop for s in plan.segments[:-1])]
        assert replay(graph, plan).extra_seconds == pytest.approx(plan.extra_seconds)
