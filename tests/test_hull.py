from __future__ import annotations

import itertools
import random

import pytest

from fxckpt.hull import Operation, Storage, hull
from tests.oracle import corners


def problem(seed: int) -> tuple[list[Operation], list[Storage]]:
    draw = random.Random(seed)
    operations: list[Operation] = []
    storages: list[Storage] = []
    for _ in range(8):
        reads = tuple(draw.sample(range(len(storages)), min(len(storages), draw.choice((0, 1, 1, 2)))))
        makes = tuple(range(len(storages), len(storages) + draw.choice((1, 1, 1, 2))))
        recomputable = draw.random() < 0.9
        state = draw.choice((0, 0, 0, 2))
        operations.append(Operation(reads, makes, draw.randrange(9), state, recomputable))
        for _ in makes:
            keepable = not recomputable or draw.random() < 0.9
            storages.append(Storage(draw.randrange(1, 9), keepable, draw.random() < 0.4))
    return operations, storages


def cost(operations: list[Operation], storages: list[Storage], kept: set[int]) -> tuple[int, int] | None:
    """Bytes and ticks of keeping exactly ``kept``, None if something cannot be made again."""
    maker = {made: operation for operation in operations for made in operation.makes}
    stack = [number for number, storage in enumerate(storages) if storage.needed]
    again: list[Operation] = []
    while stack:
        number = stack.pop()
        if number not in kept and maker[number] not in again:
            again.append(maker[number])
            stack += maker[number].reads
    if not all(operation.recomputable for operation in again):
        return None
    size = sum(storages[number].size for number in kept) + sum(operation.state_bytes for operation in again)
    return size, sum(operation.ticks for operation in again)


@pytest.mark.parametrize("seed", range(150))
def test_the_hull_is_that_of_all_choices(seed: int) -> None:
    operations, storages = problem(seed)
    options = [number for number, storage in enumerate(storages) if storage.keepable]
    subsets = itertools.chain.from_iterable(itertools.combinations(options, n) for n in range(len(options) + 1))
    everything = [cost(operations, storages, set(kept)) for kept in subsets]
    expected = corners(point for point in everything if point is not None)
    result = hull(operations, storages, {})
    assert [result.points[index] for index in result.select(1000)] == expected
    for index, point in enumerate(result.points):
        assert cost(operations, storages, set(result.kept(index))) == point


def test_solved_components_are_used_again() -> None:
    operations = [Operation((), (number,), 3) for number in range(5)]
    storages = [Storage(2, True, True)] * 5
    known: dict[object, object] = {}
    result = hull(operations, storages, known)
    assert result.points == [(10, 0), (8, 3), (6, 6), (4, 9), (2, 12), (0, 15)]
    assert len(known) == 1


def test_the_most_telling_corners_are_selected() -> None:
    gains = (100, 90, 3, 2, 1)
    operations = [Operation((), (number,), 1) for number in range(5)]
    storages = [Storage(gain, True, True) for gain in gains]
    result = hull(operations, storages, {})
    assert [result.points[index] for index in result.select(3)] == [(196, 0), (6, 2), (0, 5)]


def test_nothing_to_decide() -> None:
    result = hull([], [], {})
    assert (result.points, result.kept(0), result.select(5)) == ([(0, 0)], [], [0])
