"""Output structures with holes for tensors: recorded once with fake tensors, filled with real ones in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fxckpt.state import contains_tensor

__all__ = ["Template"]


class Template:
    """A value that holds fake tensors, and how to build the same value around real ones."""

    def __init__(self, value: Any, places: dict[int, int]) -> None:
        """
        Args:
            value: any structure; its tensors are the fakes.
            places: id of each fake -> index into the list that :meth:`fill` gets.
        """
        self.value, self.places = value, places
        leaves, self.spec = pytree.tree_flatten(value)
        self.leaves: list[Callable[[list[Tensor]], Any]] = [self._leaf(leaf) for leaf in leaves]
        self.single = isinstance(value, Tensor)

    def _leaf(self, leaf: Any) -> Callable[[list[Tensor]], Any]:
        if isinstance(leaf, Tensor):
            index = self.places[id(leaf)]
            return lambda tensors: tensors[index]
        if contains_tensor(leaf):  # a class that pytree does not know
            return lambda tensors: copy.deepcopy(leaf, {key: tensors[place] for key, place in self.places.items()})
        return lambda tensors: leaf

    def fill(self, tensors: list[Tensor]) -> Any:
        """The structure around ``tensors``."""
        if self.single:
            return self.leaves[0](tensors)
        return pytree.tree_unflatten([leaf(tensors) for leaf in self.leaves], self.spec)
