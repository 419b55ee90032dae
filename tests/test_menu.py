from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from fxckpt.menus import resized_menus
from fxckpt.passes.cuts import cuts
from fxckpt.passes.menu import menu
from fxckpt.plan import Chain, Graph, MenuPoint, Plan, Segment, Stage
from tests.oracle import Builder, choices, corners, mlp, random_graph, replay


def one_stage(graph: Graph) -> Chain:
    made = {storage for value in graph.forward for storage in graph.nodes[value].allocates}
    held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    return Chain((Stage(0, len(graph.forward), tuple(sorted(held & made))),))


def points(graph: Graph) -> tuple[MenuPoint, ...]:
    return menu(graph, one_stage(graph))[0]


def pairs(menu_points: tuple[MenuPoint, ...]) -> list[tuple[int, int]]:
    return [(point.kept_bytes, round(point.extra_seconds)) for point in menu_points]


@pytest.mark.parametrize("seed", range(200))
def test_points_are_the_corners_of_all_choices(seed: int) -> None:
    graph = random_graph(seed, 9, loose=True, state_bytes=2)
    everything = choices(graph, 0, len(graph.forward), one_stage(graph).stages[0].boundary)
    assert pairs(points(graph)) == corners(everything)


@pytest.mark.parametrize("seed", range(60))
def test_points_of_every_window_are_corners(seed: int) -> None:
    graph = random_graph(seed, 12, reach=2, state_bytes=1)
    chain = cuts(graph)
    for first, menu_points in enumerate(menu(graph, chain, widest=3, most=100)):
        for width, group in itertools.groupby(menu_points, key=lambda point: point.stages):
            start, end = chain.stages[first], chain.stages[first + width - 1]
            assert pairs(tuple(group)) == corners(choices(graph, start.start, end.stop, end.boundary))


def test_time_and_peaks_are_those_of_a_replay() -> None:
    exact = total = 0
    for seed in range(60):
        graph = random_graph(seed, 10)
        for point in points(graph):
            plan = Plan("dp", (Segment(0, len(graph.forward), tuple(graph.nodes[value].name for value in point.kept)),))
            result = replay(graph, plan)
            tangents = sum(slot.bytes for slot in graph.slots if slot.tangent >= 0)
            held = sum(graph.storage_bytes[storage] for storage in one_stage(graph).stages[0].boundary)
            peak = max(point.forward_peak_bytes, point.backward_peak_bytes + tangents + held)
            assert result.extra_seconds == pytest.approx(point.extra_seconds)
            # Results that are made twice, kept and again, live a little differently.
            assert result.peak_bytes - graph.fixed_bytes == pytest.approx(peak, rel=0.15)
            exact += result.peak_bytes - graph.fixed_bytes == peak
            total += 1
    assert exact > 0.9 * total


def test_a_cheap_result_is_recomputed_before_a_dear_one() -> None:
    builder = Builder()
    x = builder.input()
    dear = builder.op(x, size=4, seconds=9.0, reads=(-1,), weight=1)
    cheap = builder.op(dear, size=4, seconds=1.0, reads=(-1,))
    last = builder.op(cheap, size=1, seconds=1.0)
    assert pairs(points(builder.build(last))) == [(8, 0), (4, 1), (0, 10)]


def test_views_are_free_and_keep_what_they_show() -> None:
    builder = Builder()
    base = builder.op(builder.input(), size=4, seconds=5.0)
    view = builder.view(base)
    last = builder.op(view, reads=(view,))
    graph = builder.build(last)
    first, second = points(graph)
    assert (first.kept, first.kept_bytes, first.extra_seconds) == ((base,), 4, 0.0)
    assert (second.kept, second.kept_bytes, second.extra_seconds) == ((), 0, 5.0)


def test_results_of_one_operation_are_kept_one_by_one() -> None:
    builder = Builder()
    first = builder.op(builder.input())
    large, small = builder.pair(first, sizes=(8, 1), reads=(1,), seconds=5.0)
    last = builder.op(large, small)
    first, second = points(builder.build(last))
    assert (first.kept, first.kept_bytes) == ((small,), 1)
    assert (second.kept, second.extra_seconds) == ((), 6.0)


def test_what_cannot_be_recomputed_is_kept() -> None:
    builder = Builder()
    value = builder.op(builder.input(), size=4, reads=(-1,), weight=1, recomputable=False)
    graph = builder.build(builder.op(value))
    assert [point.kept for point in points(graph)] == [(value,)]


def test_what_must_not_be_kept_is_recomputed() -> None:
    builder = Builder()
    value = builder.op(builder.input(), size=4, reads=(-1,), weight=1, keepable=False)
    graph = builder.build(builder.op(value))
    assert [(point.kept, point.extra_seconds) for point in points(graph)] == [((), 1.0)]


def test_recomputing_a_random_result_costs_its_state() -> None:
    builder = Builder(state_bytes=3)
    value = builder.op(builder.input(), size=5, reads=(-1,), weight=1, random=True)
    assert pairs(points(builder.build(builder.op(value)))) == [(5, 0), (3, 1)]


def test_what_only_backward_reads_costs_nothing_extra() -> None:
    builder = Builder()
    x = builder.input()
    mask = builder.op(x, size=4, seconds=7.0, grad=False)
    last = builder.op(x, reads=(mask,))
    assert pairs(points(builder.build(last))) == [(0, 0)]


def test_equal_stages_have_equal_menus() -> None:
    graph = mlp(6, width=2, hidden=8, weight=1)
    menus = menu(graph, cuts(graph), widest=3)
    shapes = [[(p.kept_bytes, p.extra_seconds, p.backward_peak_bytes, p.stages) for p in stage] for stage in menus]
    assert shapes[1] == shapes[3] == shapes[5]
    assert shapes[2] == shapes[4] == shapes[6]


def test_shared_inputs_and_boundaries_are_free() -> None:
    graph = mlp(3, width=2, hidden=8)
    for stage in menu(graph, cuts(graph), widest=1):
        assert pairs(stage) == [(0, 0)]


def test_what_is_read_beyond_a_later_cut_is_kept() -> None:
    """Plans are cut at the region's outputs; then a window that goes beyond one is two segments."""
    dearer = 0
    for seed in range(40):
        graph = random_graph(seed, 12, reach=2, pinned=0.0)
        chain = cuts(graph)
        if len(chain.stages) < 2:
            continue
        end = chain.stages[len(chain.stages) // 2].start
        for ends in ((end,), ()):
            for point in menu(graph, one_stage(graph), most=100, ends=ends)[0]:
                kept = tuple(graph.nodes[value].name for value in point.kept)
                stop = len(graph.forward)
                result = replay(graph, Plan("dp", (Segment(0, end, kept), Segment(end, stop, kept))))
                if ends:
                    assert result.extra_seconds == pytest.approx(point.extra_seconds)
                else:
                    dearer += result.extra_seconds != pytest.approx(point.extra_seconds)
    assert dearer > 0


@pytest.mark.parametrize("weight", [5, 40, 100])
@pytest.mark.parametrize("growth", [0.5, 3, 8])
def test_menus_at_other_sizes_are_those_of_a_fresh_start(weight: int, growth: float) -> None:
    """Also where gradients of parameters are most of the memory at some sizes and little of it at others."""
    before, after = mlp(6, 4, 8, weight=weight), mlp(6, round(4 * growth), round(8 * growth), weight=weight)
    chain = cuts(before)
    found = resized_menus(before, after, menu(before, chain))
    fresh = menu(after, Chain(tuple(dataclasses.replace(stage, key="") for stage in chain.stages)))
    for points_found, points_fresh in zip(found, fresh, strict=True):
        exact = {(point.stages, point.kept): point for point in points_fresh}
        assert exact.keys() == {(point.stages, point.kept) for point in points_found}
        for point in points_found:
            assert figures(point) == pytest.approx(figures(exact[point.stages, point.kept]))


def figures(point: MenuPoint) -> list[float]:
    return [
        point.kept_bytes, point.extra_seconds, point.forward_peak_bytes, point.backward_peak_bytes, point.idle_seconds
    ]  # fmt: skip


def at_other_sizes(graph: Graph, draw: random.Random) -> Graph:
    growth = draw.choice([0.5, 2, 3])
    sizes = [round(size * (growth if draw.random() < 0.7 else 1)) for size in graph.storage_bytes]
    nodes = [
        dataclasses.replace(node, seconds=node.seconds * growth, workspace_bytes=node.workspace_bytes + 1)
        for node in graph.nodes
    ]
    slots = [dataclasses.replace(slot, bytes=round(slot.bytes * growth)) for slot in graph.slots]
    return dataclasses.replace(graph, storage_bytes=tuple(sizes), nodes=tuple(nodes), slots=tuple(slots))


def test_menus_of_any_graph_are_exact_at_other_sizes() -> None:
    """The same kept set has the same numbers whether its menu was made for these sizes or brought to them."""
    common = exact_peaks = 0
    for seed in range(40):
        before = random_graph(seed, 14, reach=3, pinned=0.1)
        after = at_other_sizes(before, random.Random(seed))
        chain = cuts(before)
        menus = menu(before, chain, most=100)
        for points, same in zip(menus, resized_menus(before, before, menus), strict=True):
            assert [figures(point) for point in same] == [pytest.approx(figures(point)) for point in points]
        for found, fresh in zip(resized_menus(before, after, menus), menu(after, chain, most=100), strict=True):
            exact = {(point.stages, point.kept): point for point in fresh}
            for point, other in ((p, exact[p.stages, p.kept]) for p in found if (p.stages, p.kept) in exact):
                common += 1
                assert figures(point)[:2] == pytest.approx(figures(other)[:2])
                # Moments that were far below the peak are not looked at, and may be the highest now.
                assert point.backward_peak_bytes <= other.backward_peak_bytes
                assert point.forward_peak_bytes <= other.forward_peak_bytes
                exact_peaks += figures(point)[2:4] == figures(other)[2:4]
    assert common > 500
    assert exact_peaks >= 0.85 * common
