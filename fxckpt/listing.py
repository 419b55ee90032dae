"""Straight-line code of a segment: a list of calls, as a function that runs and as a graph that people read."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxckpt import _torch

__all__ = ["Code", "Listing", "Var"]

Code = Callable[[list[Any]], Any]
"""Takes its arguments in one list, which it empties, so that each dies at its last use."""


class Var:
    """A local variable of a :class:`Listing`."""

    __slots__ = ("index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True)
class _Call:
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclass(slots=True)
class Listing:
    """Calls in order, each of which defines one variable; arguments come first.

    Attributes:
        name: of the segment.
        result: nested lists of variables and None that the code returns.
    """

    name: str
    variables: list[Var] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    result: Any = None

    def argument(self, name: str) -> Var:
        """A further argument; all of them come before the first call."""
        self.variables.append(Var(len(self.variables), name))
        return self.variables[-1]

    def call(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **meta: Any) -> Var:
        """``name = target(*args, **kwargs)``; arguments are variables, plain values, and lists of them."""
        self.calls.append(_Call(target, args, kwargs, meta))
        return self.argument(name)

    def function(self) -> Code:
        """The code, each operator reached by the shortest way.

        Names and numbers are not part of its text, so that layers of the same structure share what is compiled.
        """
        writer = _Writer(self)
        code = _compiled(writer.text())
        return types.FunctionType(code, {"__builtins__": builtins, **writer.names}, self.name)

    def graph_module(self) -> fx.GraphModule:
        """The same calls as an fx graph; running it does what :meth:`function` does."""
        graph = fx.Graph()
        graph.set_codegen(_torch.BoxedCodeGen())
        nodes: list[fx.Node] = []

        def node_of(value: Any) -> Any:
            if isinstance(value, Var):
                return nodes[value.index]
            return [node_of(item) for item in value] if isinstance(value, (list, tuple)) else value

        arguments = len(self.variables) - len(self.calls)
        for variable in self.variables[:arguments]:
            nodes.append(graph.placeholder(variable.name))
        for variable, call in zip(self.variables[arguments:], self.calls, strict=True):
            args = tuple(node_of(value) for value in call.args)
            kwargs = {key: node_of(value) for key, value in call.kwargs.items()}
            node = graph.create_node("call_function", call.target, args, kwargs, variable.name)
            node.meta.update(call.meta)
            nodes.append(node)
        graph.output(node_of(self.result))
        graph.lint()
        return _torch.lazy_graph_module(torch.nn.Module(), graph, self.name)


class _Writer:
    """Python text of a listing; what is not a variable goes by a short name into ``names``."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.names: dict[str, Any] = {}
        self.short: dict[Any, str] = {}

    def text(self) -> str:
        listing = self.listing
        count = len(listing.variables) - len(listing.calls)
        unpack = "".join(f"v{index}, " for index in range(count))
        lines = ["def forward(boxed):", f"  {unpack}= boxed" if count else "  pass", "  boxed.clear()"]
        last = self._last_uses(count)
        for index, call in enumerate(listing.calls, count):
            arguments = [self._value(value) for value in call.args]
            arguments += [f"{key}={self._value(value)}" for key, value in call.kwargs.items()]
            line = f"  v{index} = {self._target(call.target)}({', '.join(arguments)})"
            lines.append(line + "".join(f"; v{dying} = None" for dying in last.get(index, ())))
        lines.append(f"  return {self._result(listing.result)}")
        return "\n".join(lines)

    def _last_uses(self, count: int) -> dict[int, list[int]]:
        """Call -> variables that die with it; a result that nobody reads dies with its own call."""
        listing, last = self.listing, {index: index for index in range(count, len(self.listing.variables))}
        for index, call in enumerate(listing.calls, count):
            for used in _variables([call.args, list(call.kwargs.values())]):
                last[used] = index
        returned = set(_variables(listing.result))
        dying: dict[int, list[int]] = {}
        for variable, index in last.items():
            if variable not in returned:
                dying.setdefault(index, []).append(variable)
        return dying

    def _value(self, value: Any) -> str:
        if isinstance(value, Var):
            return f"v{value.index}"
        if value is None or value is True or value is False:
            return repr(value)
        if isinstance(value, (list, tuple)) and (
            not value or next(_variables(value), None) is not None or None in value
        ):
            inside = ", ".join(self._value(item) for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if value else ''})"
        name = f"c{len(self.names)}"
        self.names[name] = list(value) if isinstance(value, (list, tuple)) else value
        return name

    def _result(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._result(item) for item in value)}]"
        return self._value(value)

    def _target(self, target: Any) -> str:
        if target not in self.short:
            self.short[target] = f"{getattr(target, '__name__', 'f').replace('.', '_')}_{len(self.names)}"
            self.names[self.short[target]] = _torch.fast_callable(target) if _torch.is_operator(target) else target
        return self.short[target]


def _variables(value: Any) -> Any:
    """Indices of the variables in nested lists and tuples."""
    if isinstance(value, Var):
        yield value.index
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _variables(item)


@functools.lru_cache(maxsize=512)
def _compiled(text: str) -> types.CodeType:
    module = compile(text, "<fxckpt segment>", "exec")
    return next(item for item in module.co_consts if isinstance(item, types.CodeType))
