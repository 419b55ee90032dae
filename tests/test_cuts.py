from __future__ import annotations

import dataclasses

import pytest

from fxckpt.passes.cuts import cuts
from fxckpt.plan import Graph
from tests.oracle import Builder, mlp, random_graph


def stops(graph: Graph, **options: int) -> list[int]:
    return [stage.stop for stage in cuts(graph, **options).stages]


def residual(blocks: int) -> Graph:
    """Blocks ``x + f(x)``, where ``f`` is wide inside."""
    builder = Builder()
    x = builder.op(builder.input(), size=2, weight=1)
    for _ in range(blocks):
        up = builder.op(x, size=8, reads=(x,), weight=1)
        down = builder.op(up, size=2, reads=(up,), weight=1)
        x = builder.op(x, down, size=2)
    last = builder.op(x, size=1, reads=(x,))
    return builder.build(last)


def test_a_chain_is_cut_everywhere() -> None:
    assert stops(mlp(3)) == [1, 2, 3, 4, 5, 6]


def test_residual_blocks_are_cut_between_blocks() -> None:
    assert stops(residual(3)) == [1, 4, 7, 10, 11]


def test_forbidden_positions_are_left_alone() -> None:
    graph = dataclasses.replace(mlp(3), forbidden=((1, 4),))
    assert stops(graph) == [1, 5, 6]


def test_a_tuple_is_not_handed_across_a_cut() -> None:
    builder = Builder()
    x = builder.op(builder.input(), size=4, weight=1)
    left, right = builder.pair(x, sizes=(1, 1), reads=(0, 1))
    last = builder.op(left, right, reads=(left, right))
    assert not {2, 3} & set(stops(builder.build(last)))


def test_the_boundary_is_what_later_stages_and_the_caller_read() -> None:
    builder = Builder()
    x = builder.op(builder.input(), size=1, weight=1)
    skip = builder.op(x, size=1, reads=(x,))
    y = builder.op(skip, size=1, reads=(skip,))
    result = builder.op(y, size=1, reads=(y,))
    z = builder.op(result, size=1, reads=(result,))
    last = builder.op(z, skip, size=1, reads=(z,))
    graph = builder.build(result, last)
    storage = {value: graph.nodes[value].storages[0] for value in (x, skip, y, result, z, last)}
    at = {stage.stop: set(stage.boundary) for stage in cuts(graph).stages}
    assert at[1] == {storage[x]}
    assert at[6] == {storage[result], storage[last]}
    for stop, expected in ((3, {storage[skip], storage[y]}), (5, {storage[skip], storage[z], storage[result]})):
        assert at.get(stop, expected) == expected


def test_a_cut_goes_where_backward_reads_what_crosses() -> None:
    builder = Builder()
    x = builder.op(builder.input(), size=2, weight=1)
    for _ in range(3):
        wide = builder.op(x, size=6, reads=(x,), weight=1)
        added = builder.op(wide, size=2)  # nobody reads this in backward, only its activation below
        x = builder.op(added, size=2, reads=(-1,))
    assert stops(builder.build(builder.op(x, reads=(x,)))) == [1, 4, 7, 10, 11]


def test_of_equal_positions_the_first_is_taken() -> None:
    builder = Builder()
    x = builder.op(builder.input(), size=2, weight=1)
    for _ in range(3):
        x = builder.view(x)
    assert stops(builder.build(builder.op(x, reads=(x,)))) == [1, 5]


def test_merging_keeps_stages_even() -> None:
    sizes = [stage.stop - stage.start for stage in cuts(mlp(32), max_stages=8).stages]
    assert len(sizes) == 8
    assert max(sizes) <= 3 * min(sizes)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_there_are_at_most_so_many_stages(most: int) -> None:
    assert len(cuts(mlp(8), max_stages=most).stages) == most


def test_equal_blocks_share_a_key() -> None:
    stages = cuts(residual(4)).stages
    assert stages[1].key == stages[2].key == stages[3].key
    assert len({stage.key for stage in stages}) == 3


def test_a_key_tells_costs_apart() -> None:
    graph = residual(2)
    dearer = tuple(dataclasses.replace(node, seconds=node.seconds + (i == 7)) for i, node in enumerate(graph.nodes))
    before, after = cuts(graph).stages, cuts(dataclasses.replace(graph, nodes=dearer)).stages
    assert [a.key == b.key for a, b in zip(before, after, strict=True)].count(False) == 1


@pytest.mark.parametrize("seed", range(40))
def test_stages_partition_the_forward_at_clean_positions(seed: int) -> None:
    graph = random_graph(seed, 30)
    chain = cuts(graph)
    assert [stage.start for stage in chain.stages] == [0, *(stage.stop for stage in chain.stages[:-1])]
    assert chain.stages[-1].stop == len(graph.forward)
    place = {value: position for position, value in enumerate(graph.forward)}
    for stage in chain.stages[:-1]:
        crossing = {
            storage
            for value in graph.forward[stage.stop :]
            for read in graph.nodes[value].inputs
            if place.get(read, -1) < stage.stop
            for storage in graph.nodes[read].storages
            if any(storage in graph.nodes[maker].allocates for maker in graph.forward)
        }
        held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
        done = {s for value in graph.forward[: stage.stop] for s in graph.nodes[value].storages}
        assert set(stage.boundary) == crossing | (held & done)
        for value in graph.forward[stage.stop :]:
            for read in graph.nodes[value].inputs:
                assert not graph.nodes[read].container or place[read] >= stage.stop
