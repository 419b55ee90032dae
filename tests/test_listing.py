"""Straight-line code: what it computes, when its values die, and what is compiled once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.listing import Listing, Var

aten = torch.ops.aten


def _listing(rows: int, width: int) -> Listing:
    listing = Listing("block")
    x, y, where = listing.argument("x"), listing.argument("y"), listing.argument("where")
    total = listing.call("add", aten.add.Tensor, (x, y), {"alpha": 2})
    flat = listing.call("view", aten.view.default, (total, [rows, width]), {})
    both = listing.call("cat", aten.cat.default, ([flat, flat], 1), {})
    picked = listing.call("index", aten.index.Tensor, (both, [None, where]), {})
    listing.result = ([both, None], [picked], [])
    return listing


def test_function_and_graph_compute_the_same() -> None:
    listing = _listing(2, 3)
    x, y, where = torch.randn(6), torch.randn(6), torch.tensor([0, 5])
    expected = (x + 2 * y).view(2, 3).repeat(1, 2)
    for code in (listing.function(), listing.graph_module()):
        boxed: list[Any] = [x, y, where]
        (both, nothing), (picked,), rest = code(boxed)
        assert torch.equal(both, expected)
        assert torch.equal(picked, expected[:, [0, 5]])
        assert (nothing, list(rest), boxed) == (None, [], [])


def test_values_die_at_their_last_use() -> None:
    alive: list[Any] = []

    def watch(value: Tensor, of: Any) -> Tensor:
        alive.append(of[0]() is not None)
        return value

    listing = Listing("dies")
    x, of = listing.argument("x"), listing.argument("of")
    one = listing.call("sin", aten.sin.default, (x,), {})
    listing.call("unused", aten.cos.default, (one,), {})
    watched = listing.call("watch", watch, (one, of), {})
    listing.result = [watched]
    first = torch.ones(3)
    boxed = [first, [weakref.ref(first)]]
    del first
    (result,) = listing.function()(boxed)
    assert alive == [False]
    assert torch.equal(result, torch.ones(3).sin())


def test_other_names_and_numbers_share_what_is_compiled() -> None:
    one, other = _listing(2, 3), _listing(4, 5)
    other.variables[0].name = "z"
    assert one.function().__code__ is other.function().__code__
    assert other.function().__code__ is not Listing("empty", result=[]).function().__code__


def test_the_graph_carries_names_and_marks() -> None:
    listing = Listing("named")
    x = listing.argument("x")
    listing.result = [listing.call("again", aten.sin.default, (x,), {}, recomputed=True)]
    module = listing.graph_module()
    assert isinstance(module, fx.GraphModule)
    nodes = list(module.graph.nodes)
    assert [node.name for node in nodes] == ["x", "again", "output"]
    assert nodes[1].meta["recomputed"] is True
    assert "sin" in module.code
    assert repr(Var(0, "x")) == "x"
