"""What the dynamic program needs to know of a chain of stages: memory and time between cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fxckpt.plan import Chain, Graph

__all__ = ["ChainCosts", "chain_costs"]

Floats = Any  # arrays: numpy's types are not checked, see pyproject.toml
Ints = Any


class ChainCosts(NamedTuple):
    """Bytes and seconds, indexed by cuts: cut ``c`` lies before stage ``c``, and ``X(c)`` is what crosses it.

    Attributes:
        seconds: time of forward up to a cut.
        boundary: ``boundary[a, p]`` are the storages of ``X(p)`` that are not in ``X(a)``.
        pinned: what cannot be recomputed, created before a cut, and states of generators.
        forward: ``forward[a, j]`` is the highest memory beyond ``X(a)`` while forward, started at ``a``, runs stage
            ``j`` and keeps nothing.
        gradients: alive when the backward of all later stages is done; 0 at the end in forward.
        tangents: gradients that come from outside.
        piled: ``piled[b, p]`` are gradients that a segment ending at cut ``b`` holds when it has come back to cut
            ``p``, although nothing reads them any more: those it was given, and those it will return when it is done.
        results: results of the region created before a cut.
        passing: those that the caller lets go of when forward is over, without what crosses the cut.
    """

    seconds: Floats
    boundary: Ints
    pinned: Ints
    forward: Ints
    gradients: Ints
    tangents: int
    piled: Ints
    results: Ints
    passing: Ints


def chain_costs(graph: Graph, chain: Chain) -> ChainCosts:
    """Costs of ``chain``.

    Args:
        graph: the joint graph with only those outputs that are held through backward.
        chain: its stages.
    """
    cuts = [0, *(stage.stop for stage in chain.stages)]
    count, size = len(cuts), len(graph.forward)
    cut_of: Any = np.searchsorted(np.array(cuts), np.arange(size), side="right")  # first cut behind a position
    held = {storage for value in graph.outputs for storage in graph.nodes[value].storages}
    runs = graph.executed()
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, value in enumerate(graph.forward):
        for storage in graph.nodes[value].allocates:
            birth[storage] = last[storage] = position
        if value in runs:
            for read in graph.nodes[value].inputs:
                for storage in graph.nodes[read].storages:
                    last[storage] = position
    crossing: Any = np.zeros((count + 1, count), dtype=np.int64)
    results: Any = np.zeros(count, dtype=np.int64)
    passing: Any = np.zeros(count, dtype=np.int64)
    released = {storage for value in graph.passing for storage in graph.nodes[value].storages}
    pinned: Any = np.zeros(count, dtype=np.int64)
    for storage, position in birth.items():
        kind = results if storage in held else pinned
        if storage in held or not graph.nodes[graph.forward[position]].recomputable:
            kind[cut_of[position] :] += graph.storage_bytes[storage]
        if storage in released:
            passing[cut_of[position] :] += graph.storage_bytes[storage]
    for position, value in enumerate(graph.forward):
        if value in runs and graph.nodes[value].random and graph.nodes[value].recomputable:
            pinned[cut_of[position] :] += graph.state_bytes
    for cut, stage in enumerate(chain.stages, start=1):
        for storage in stage.boundary:
            if storage not in held:
                crossing[cut_of[birth[storage]], cut] += graph.storage_bytes[storage]
            if storage in released:
                passing[cut] -= graph.storage_bytes[storage]
    boundary = np.cumsum(crossing[::-1], axis=0)[::-1][1:]  # born behind cut a, crossing cut p
    forward = _forward_peaks(graph, cuts, birth, last, held, runs)
    seconds: Any = np.zeros(count)
    for position, value in enumerate(graph.forward):
        if value in runs:
            seconds[cut_of[position]] += graph.nodes[value].seconds
    gradients, tangents, piled = _gradients(graph, cuts)
    return ChainCosts(np.cumsum(seconds), boundary, pinned, forward, gradients, tangents, piled, results, passing)


def _forward_peaks(
    graph: Graph, cuts: Sequence[int], birth: dict[int, int], last: dict[int, int], held: set[int], runs: set[int]
) -> Ints:
    """``[a, j]``: highest memory beyond ``X(a)`` while stage ``j`` runs in a forward that began at ``a``."""
    size = len(graph.forward)
    change: Any = np.zeros(size + 1, dtype=np.int64)
    extra: Any = np.zeros(size, dtype=np.int64)
    for position, value in enumerate(graph.forward):
        node = graph.nodes[value]
        if value not in runs:
            continue
        extra[position] = node.workspace_bytes
        for storage in node.allocates:
            if storage not in held:
                change[position] += graph.storage_bytes[storage]
                change[last[storage] + 1] -= graph.storage_bytes[storage]
        first = graph.nodes[node.inputs[0]].storages if node.inplace and node.inputs else ()
        if len(first) == 1 and first[0] in birth and last[first[0]] == position and first[0] not in held:
            extra[position] -= graph.storage_bytes[first[0]]
    live = np.cumsum(change)[:size] + extra
    peaks: Any = np.zeros((len(cuts), len(cuts) - 1), dtype=np.int64)
    for a, start in enumerate(cuts[:-1]):
        # What crosses cut a is counted as resident already, for as long as forward needs it.
        resident: Any = np.zeros(size + 1, dtype=np.int64)
        for storage, born in birth.items():
            if born < start <= last[storage] and storage not in held:
                resident[start] += graph.storage_bytes[storage]
                resident[last[storage] + 1] -= graph.storage_bytes[storage]
        beyond = live - np.cumsum(resident)[:size]
        for j in range(a, len(cuts) - 1):
            peaks[a, j] = beyond[cuts[j] : cuts[j + 1]].max()
    return peaks


def _gradients(graph: Graph, cuts: Sequence[int]) -> tuple[Ints, int, Ints]:
    """Gradients alive at each cut in backward, those from outside, and those that segments hold on to."""
    places = np.array(cuts)
    alive: dict[object, Any] = {}  # what holds a gradient: its bytes at each cut
    piled: Any = np.zeros((len(cuts), len(cuts)), dtype=np.int64)
    for slot, held in enumerate(_holders(graph)):
        owner = graph.slots[slot].owner
        if not held or owner < -1:
            continue
        # Consumed below the owner; a leaf's stays, or is added to the old one when its last part has come.
        end = graph.grad_nodes[owner].position if owner >= 0 else -1 if graph.fresh_gradients else held[-1][0]
        for (high, key, size), low in zip(held, [*(entry[0] for entry in held[1:]), end], strict=True):
            there = (max(low, end) < places) & (places <= high)
            alive[key] = np.maximum(alive.get(key, 0), size * there)
            if owner >= 0:
                piled[there] += size * (places <= end)
        if owner < 0 and not graph.fresh_gradients:
            piled[places > end] += held[-1][2] * (places <= end)
    total: Any = sum(alive.values(), np.zeros(len(cuts), dtype=np.int64))
    tangents = int(total[-1])
    total[-1] = 0
    piled[-1] = 0  # the whole is not a segment
    return total, tangents, piled


def _holders(graph: Graph) -> list[list[tuple[int, object, int]]]:
    """For each slot ``(position, key, bytes)``: what holds its total at cuts from there down to the next entry.

    The engine adds a further contribution in place, unless the memory is shared with another gradient.
    """
    found: list[list[tuple[int, object, int]]] = [[] for _ in graph.slots]
    users: dict[object, set[int]] = {}

    def hold(slot: int, place: int, key: object, size: int) -> None:
        found[slot].append((place, key, size))
        users.setdefault(key, set()).add(slot)

    for slot, entry in enumerate(graph.slots):
        if entry.tangent >= 0:
            hold(slot, len(graph.forward), ("tangent", slot), entry.bytes)
    for grad in graph.grad_nodes:
        for slot, value in grad.contributes:
            place, alone, size = grad.position, ("sum", slot), graph.slots[slot].bytes
            if found[slot]:
                last, key, _ = found[slot][-1]
                if len(users[key]) > 1:
                    users[key].discard(slot)
                    hold(slot, min(place, last), alone, size)
            elif value >= len(graph.nodes) and found[value - len(graph.nodes)]:
                hold(slot, place, *found[value - len(graph.nodes)][-1][1:])
            elif value < len(graph.nodes) and graph.nodes[value].storages:
                storage = graph.nodes[value].storages[0]  # a view keeps all of the memory that it shows a part of
                hold(slot, place, ("storage", storage), graph.storage_bytes[storage])
            else:
                hold(slot, place, alone, size)
        for slot in grad.reads:
            for _, key, _ in found[slot][-1:]:
                users[key].discard(slot)
    return found
