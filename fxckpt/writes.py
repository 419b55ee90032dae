"""Writes of a trace that need no functionalization: a pure operator can stand in the place of each."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxckpt.joint import Trace, in_shape_of, is_alias, pure_form

__all__ = ["SCATTERS", "chain_of", "is_plain_copy", "is_random", "plain_writes"]


def plain_writes(trace: Trace) -> dict[fx.Node, Any] | None:
    """In-place operators with their functional forms, if no other name for what they write to is read afterwards.

    None as value marks an update of an input that nothing reads; it may stay as it is. What is written into a view,
    as autograd does for gradients of strided views, has the view's ``scatter`` as functional form.

    Returns:
        None if there is a write that needs the full treatment.
    """
    named = {*trace.output_nodes, *(node for record in trace.records for _, node in record.contributions)}
    named.update(node for record in trace.records for node in record.totals if node is not None)
    position = {node: place for place, node in enumerate(trace.graph_module.graph.nodes)}
    found: dict[fx.Node, Any] = {}
    for node in position:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or target in named:
            return None
        if target.op == "placeholder":
            if set(target.users) != {node} or node.users or node in named:
                return None
            found[node] = None
        elif _writes_into_view(node, position, found, node.name in trace.backward_tag):
            found[node] = SCATTERS[target.target]
        else:
            form, chain = pure_form(node), chain_of(target, found)
            if form is None or not chain or not _unseen(chain, node, position, found):
                return None
            if is_alias(form) and torch.Tag.inplace_view not in node.target.tags:
                return None
            found[node] = form
    return found


SCATTERS: dict[Any, Any] = {
    torch.ops.aten.as_strided.default: torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.view.default: in_shape_of,
}
"""What gives a base the value that has been written into a view of it."""


def chain_of(target: fx.Node, found: dict[fx.Node, Any]) -> list[fx.Node]:
    """``target``, what it is a view of, and so on to the operator that made the memory; empty if that is unclear."""
    chain = [target]
    while is_alias(chain[-1].target) and chain[-1].target is not operator.getitem:
        if chain[-1] in found and not is_alias(found[chain[-1]]):
            break  # it will be a value of its own
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node) or source.meta["val"].dtype is not target.meta["val"].dtype:
            return []
        chain.append(source)
    maker = chain[-1].args[0] if chain[-1].target is operator.getitem else chain[-1]
    fresh = (
        isinstance(maker, fx.Node) and maker.op == "call_function" and (not is_alias(maker.target) or maker in found)
    )
    return chain if fresh else []


def _unseen(
    chain: list[fx.Node], write: fx.Node, position: dict[fx.Node, int], found: dict[fx.Node, Any]
) -> bool:  # fmt: skip
    """Whether all that else reads the memory of ``chain`` does so before ``write``, and makes no view of it."""
    own = {write, *chain, *_written(found)}
    others = {user for node in chain for user in node.users if not _is_idle(user)} - own
    return all(position[user] < position[write] and not is_alias(user.target) for user in others)


def _written(found: dict[fx.Node, Any]) -> set[fx.Node]:
    """Views that serve to write into their bases."""
    return {write.args[0] for write, form in found.items() if form in SCATTERS.values()}  # type: ignore[misc]


def _is_idle(node: fx.Node) -> bool:
    """A view that nobody reads: autograd makes some when a base is written to."""
    return is_alias(node.target) and not node.users


def _writes_into_view(node: fx.Node, position: dict[fx.Node, int], found: dict[fx.Node, Any], backward: bool) -> bool:
    """Whether a view of memory that was made for it is written to, and the memory is read as a whole afterwards."""
    view = node.args[0]
    if not isinstance(view, fx.Node) or view.target not in SCATTERS or node.users:
        return False
    if any(position[user] > position[node] or is_alias(user.target) for user in view.users if user is not node):
        return False
    if not is_plain_copy(node) and (pure_form(node) is None or is_random(node)):
        return False
    base = view.args[0]
    if not isinstance(base, fx.Node) or base.op != "call_function" or is_alias(found.get(base) or base.target):
        return False
    if SCATTERS[view.target] is in_shape_of and not (backward and _may_replace(node, base, found)):
        return False
    earlier = {user for user in base.users if position[user] < position[node] and not _is_idle(user)}
    return not any(is_alias(user.target) for user in earlier - {view} - _written(found))


def _may_replace(copy: fx.Node, base: fx.Node, found: dict[fx.Node, Any]) -> bool:
    """Whether what is copied over all of ``base`` can take its place: nobody else may come to hold the same memory."""
    if not is_plain_copy(copy):
        return False
    view, source = copy.args[:2]
    values = [node.meta["val"] for node in (base, view, source)]  # type: ignore[union-attr]
    return all(value.is_contiguous() for value in values) and bool(chain_of(source, found))  # type: ignore[arg-type]


def is_plain_copy(node: fx.Node) -> bool:
    """Whether ``node`` copies something of the same shape and type."""
    if node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[1], fx.Node):
        return False
    one, other = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    return bool((one.shape, one.dtype) == (other.shape, other.dtype))


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
