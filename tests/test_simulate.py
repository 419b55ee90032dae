from __future__ import annotations

import dataclasses
import random

import pytest

from fxckpt.passes import simulate as module
from fxckpt.passes.cuts import cuts
from fxckpt.passes.schedule import schedule
from fxckpt.passes.simulate import simulate
from fxckpt.plan import Graph, Plan, Segment, Timeline
from tests.oracle import Builder, mlp, random_graph, replay


@pytest.fixture(autouse=True)
def _no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, a constant during backward, is left out of the sums below."""
    monkeypatch.setattr(module, "LOSS_BYTES", 0)


def _run(graph: Graph, plan: Plan, tangents: frozenset[int] | None = None) -> Timeline:
    return simulate(graph, schedule(graph, plan, tangents), tangents)


def _two() -> tuple[Graph, list[str]]:
    """Input of 2 bytes, weight of 1; an operation with a result of 3, one with a result of 5."""
    builder = Builder()
    x = builder.input(2)
    a = builder.op(x, size=3, seconds=2.0, reads=(-1,), weight=1)
    b = builder.op(a, size=5, seconds=4.0, reads=(a,))
    graph = builder.build(b)
    return graph, [graph.nodes[value].name for value in (a, b)]


def test_a_step_that_one_can_add_up_by_hand() -> None:
    graph, names = _two()
    found = _run(graph, Plan("none", (Segment(0, 2, tuple(names)),)))
    assert [
        (label[1], total) for label, total in zip(found.labels, found.total_bytes, strict=True)
    ] == [
        ("forward", 3 + 3),  # fixed, a
        ("forward", 3 + 3 + 5),  # and b
        ("backward", 11 + 5),  # its gradient arrives
        ("backward", 16 + 3),  # the gradient of a
        ("backward", 19 + 1),  # the gradient of the weight
        ("backward", 3 + 5 + 1),  # all but the output and that gradient is gone
    ]  # fmt: skip
    assert (found.peak_bytes, found.peak_index, found.peak_phase) == (20, 4, "backward")
    parts = dict(zip(found.categories, found.peak_parts, strict=True))
    assert (parts["kept"], parts["outputs"]) == (3, 5)
    assert found.recompute_seconds == 0
    assert found.plain_seconds == (2 + 4) + (2 + 4)


def test_the_loss_is_held_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, names = _two()
    plan = Plan("none", (Segment(0, 2, tuple(names)),))
    without = _run(graph, plan)
    monkeypatch.setattr(module, "LOSS_BYTES", 10)
    more = [b - a for a, b in zip(without.total_bytes, _run(graph, plan).total_bytes, strict=True)]
    assert more == [0, 0, 10, 10, 10, 10]


def test_generator_states_are_kept_for_a_random_operation() -> None:
    builder = Builder(state_bytes=1000)
    a = builder.op(builder.input(), reads=(-1,), weight=1, random=True)
    graph = builder.build(builder.op(a, reads=(a,)))
    kept = _run(graph, Plan("none", (Segment(0, 2, (graph.nodes[a].name,)),)))
    replayed = _run(graph, Plan("dp", (Segment(0, 2),)))
    assert 1000 <= kept.peak_bytes < 2000 <= replayed.peak_bytes  # one state for double backward, one for the replay


def test_recomputation_is_paid_in_seconds_and_seen_in_the_parts() -> None:
    graph, names = _two()
    found = _run(graph, Plan("dp", (Segment(0, 2),)))
    assert found.recompute_seconds == 2
    assert found.plain_seconds == 12
    assert found.total_bytes[:2] == (6, 11)
    start = [label[1] for label in found.labels].index("backward")
    assert found.total_bytes[start] == 3 + 5 + 5  # a went with the end of forward
    assert (found.labels[start + 1][2], found.total_bytes[start + 1]) == (names[0], 13 + 3)
    parts = dict(zip(found.categories, found.peak_parts, strict=True))
    assert (parts["kept"], parts["recomputed"]) == (0, 3)


def test_scratch_memory_counts_while_its_operation_runs() -> None:
    graph, names = _two()
    nodes = tuple(dataclasses.replace(n, workspace_bytes=100 * (n.name == names[0])) for n in graph.nodes)
    plan = Plan("none", (Segment(0, 2, tuple(names)),))
    plain, found = _run(graph, plan), _run(dataclasses.replace(graph, nodes=nodes), plan)
    assert found.total_bytes == (106, *plain.total_bytes[1:])
    assert sum(found.peak_parts) == found.peak_bytes == 106


def test_existing_gradients_are_added_to_and_fresh_ones_stay() -> None:
    graph, names = _two()
    plan = Plan("none", (Segment(0, 2, tuple(names)),))
    fresh, existing = _run(graph, plan), _run(dataclasses.replace(graph, fresh_gradients=False), plan)
    assert fresh.total_bytes[-1] - existing.total_bytes[-1] == 1
    assert fresh.total_bytes[:-1] == existing.total_bytes[:-1]


def test_an_output_without_gradient_is_let_go_when_the_loss_is_known() -> None:
    builder = Builder()
    x = builder.input()
    a = builder.op(x, size=3, weight=1)
    used, unused = builder.op(a, size=5), builder.op(a, size=70)
    graph = builder.build(used, unused)
    slots = {entry.value: index for index, entry in enumerate(graph.slots)}
    plan = Plan("none", (Segment(0, 3),))
    found = _run(graph, plan, frozenset({slots[used]}))
    backward = [total for label, total in zip(found.labels, found.total_bytes, strict=True) if label[1] == "backward"]
    assert max(backward) < 70
    held = _run(graph, plan).total_bytes
    assert (held[3] > 140, held[-1] > 75) == (True, True)  # with its gradient, and at the end of the step


def _plan(graph: Graph, draw: random.Random) -> Plan:
    stages = cuts(graph).stages
    ends = [i for i in range(1, len(stages)) if draw.random() < 0.4] + [len(stages)]
    segments = []
    for low, high in zip([0, *ends], ends, strict=False):
        start, stop = stages[low].start, stages[high - 1].stop
        nodes = [graph.nodes[value] for value in graph.forward[start:stop]]
        kept = tuple(node.name for node in nodes if not node.container and draw.random() < 0.4)
        segments.append(Segment(start, stop, kept))
    return Plan("dp", tuple(segments))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_peak_and_time_are_those_of_an_independent_replay(seed: int, fresh: bool) -> None:
    graph = random_graph(seed, 14, fresh_gradients=fresh, state_bytes=0)
    plan = _plan(graph, random.Random(seed))
    found, expected = _run(graph, plan), replay(graph, plan)
    assert (found.peak_bytes, found.recompute_seconds) == (expected.peak_bytes, expected.extra_seconds)
    assert sum(found.peak_parts) == found.peak_bytes == max(found.total_bytes)
    assert found.total_bytes[found.peak_index] == found.peak_bytes
    assert found.labels[found.peak_index][:2] == (found.peak_segment, found.peak_phase)


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_left_at_the_end_is_fixed_outputs_and_gradients(seed: int) -> None:
    graph = random_graph(seed, 14, state_bytes=0)
    found = _run(graph, _plan(graph, random.Random(seed)))
    outputs = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    given = {storage for node in graph.nodes if node.phase == "input" for storage in node.storages}
    left = sum(graph.storage_bytes[storage] for storage in outputs - given)
    leaves = sum(entry.bytes for entry in graph.slots if entry.owner == -1)
    assert found.total_bytes[-1] == graph.fixed_bytes + left + leaves


def test_highest_memory_of_each_segments_backward() -> None:
    graph = mlp(6, width=2, hidden=3, weight=2)
    plan = Plan("dp", tuple(Segment(stage.start, stage.stop) for stage in cuts(graph).stages))
    found = _run(graph, plan)
    for index, peak in enumerate(found.segment_peaks):
        own = [
            total
            for label, total in zip(found.labels, found.total_bytes, strict=True)
            if label[:2] == (index, "backward")
        ]
        assert peak == max(own)
