from __future__ import annotations

import dataclasses
import json

import pytest

from fxckpt.errors import FxckptError, PlanMismatchError
from fxckpt.plan import Graph, Node, Plan, Segment
from fxckpt.units import GIB, MIB, format_bytes, gib_to_bytes

NESTED = Plan(
    strategy="dp",
    segments=(
        Segment(0, 2, kept=("mm", "relu"), name="segment_0_stem"),
        Segment(2, 6, inner=(Segment(2, 4, inner=(Segment(2, 3), Segment(3, 4, kept=("exp",)))), Segment(4, 6))),
    ),
    fingerprint="0123abcd",
    budget_bytes=5 * GIB + 1,
    peak_bytes=5 * GIB,
    extra_seconds=0.1 + 0.2,
)


def test_json_round_trip_is_exact() -> None:
    text = NESTED.to_json()
    assert Plan.from_json(text) == NESTED
    assert Plan.from_json(text).to_json() == text
    assert hash(Plan.from_json(text)) == hash(NESTED)
    assert "\n" not in NESTED.to_json(indent=None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "3",
        json.dumps({**json.loads(NESTED.to_json()), "format": 0}),
        json.dumps({**json.loads(NESTED.to_json()), "unknown": 0}),
        json.dumps({**json.loads(NESTED.to_json()), "segments": [{"start": 0}]}),
    ],
)
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        Plan.from_json(text)
    assert isinstance(caught.value, FxckptError)


def test_data_between_passes_is_frozen_and_without_a_dict() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NESTED.strategy = "none"  # type: ignore[misc]
    assert not hasattr(NESTED, "__dict__")


def test_totals_follow_the_nodes() -> None:
    graph = Graph(
        nodes=(Node("x", "input", "input"), Node("y", "relu", "forward")),
        forward=(1,), grad_nodes=(), slots=(), storage_bytes=(), outputs=(1,),
    )  # fmt: skip
    assert graph.total(0) == 2
    assert graph.total(3) == 5


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * MIB // 2, "1.50 MiB"), (-GIB, "-1.00 GiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_gib_come_back_to_the_byte() -> None:
    for count in (1, 12345678901, 2**40 + 1, 3 * GIB):
        assert gib_to_bytes(count / GIB) == count
