"""A recipe, which a pack hook returns to autograd in place of a saved tensor; and the unpack hook."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from .kept import Kept, Unread
from .masks import GATES
from .values import Ingredient, Source, Value, plainly


class Recipe:
    """Stands for a saved tensor that is a value that can be rebuilt, or a view of one.

    It holds the tensor until all inputs of the value are kept.
    """

    __slots__ = ("__weakref__", "geometry", "kept", "source", "value")

    def __init__(self, value: Value, tensor: Tensor, base: Tensor):
        self.value = value
        self.geometry = value.lies_in(base)
        if tensor is not base:
            geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
            if geometry != self.geometry:
                self.geometry = geometry
        self.kept: Kept | None = None
        self.source: Source | None = None

    def settle(self) -> Value | Ingredient | None:
        """Drops the tensor where all ingredients are kept; otherwise returns the first that is not."""
        ingredients: list[Kept] = []
        missing = self.value.gather(ingredients)
        if missing is None:
            for kept in ingredients:
                kept.is_read = True
            self.source = self.value.shared(ingredients)
            self.source.readers += 1
            self.kept = None
        return missing

    def hold(self, kept: Kept) -> None:
        """Keeps the tensor, so that other recipes may use it as an ingredient."""
        self.kept = kept
        before = self.value.kept()
        if before is not None and kept.is_intact():
            before.restore(kept.tensor)
        if self.value.memory is None:
            self.value.keeper = weakref.ref(kept)

    def unpack(self) -> Tensor:
        if self.kept is not None:
            return self.kept.unpack()
        return plainly(self._rebuilt)

    def _rebuilt(self) -> Tensor:
        assert self.source is not None
        tensor = self.source.read(self.value)
        return tensor if self.value.geometry is self.geometry else torch.as_strided(tensor, *self.geometry)


def reduce_to_gate(node) -> None:
    """Keeps a bit an element of what an activation has saved, where its node alone reads that."""
    found = GATES.get(node.name())
    if found is not None:
        attribute, gate_of = found
        packed = getattr(node, attribute).data
        kept = packed.kept if type(packed) is Recipe else packed  # a recipe that waits has the tensor
        if type(kept) is Kept:
            kept.reduce_to_gate(partial(gate_of, node))


def unpack(packed: Kept | Recipe | Unread) -> Tensor:
    """The unpack hook."""
    if type(packed) is Kept and packed.outer is None:
        tensor = packed.tensor
        if tensor._version == packed.version:
            return tensor
    return packed.unpack()
