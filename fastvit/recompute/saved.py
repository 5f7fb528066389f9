"""The objects that a pack hook returns to autograd for a saved tensor: the tensor itself, or a recipe."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from .values import Given, Source, Value, plainly


class Kept:
    """A saved tensor that stays in memory, with the version check that autograd skips under hooks."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor, is_input: bool = False):
        # Detached, because an op's output refers to its node, and the node refers to this object: a cycle.
        self.tensor = tensor if is_input or tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def is_intact(self) -> bool:
        return self.tensor._version == self.version

    def is_freed(self) -> bool:
        """Whether it is a parameter whose memory is freed for now, as FSDP does between uses."""
        tensor = self.tensor
        return type(tensor) is Parameter and not tensor.untyped_storage().nbytes() and tensor.numel() > 0

    def is_there(self) -> bool:
        tensor = self.tensor
        return tensor._version == self.version and not (type(tensor) is Parameter and self.is_freed())

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


class Recipe:
    """Stands for a saved tensor that is a value that can be rebuilt, or a view of one.

    It holds the tensor until all inputs of the value are kept.
    """

    __slots__ = ("__weakref__", "geometry", "kept", "source", "value")

    def __init__(self, value: Value, tensor: Tensor, base: Tensor):
        self.value = value
        self.geometry = whole = value.lies_in(base)
        if tensor is not base:
            geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
            if geometry != whole:
                self.geometry = geometry
        self.kept: Kept | None = None
        self.source: Source | None = None

    def settle(self) -> Value | Given | None:
        """Drops the tensor where all ingredients are kept; otherwise returns the first that is not."""
        ingredients: list[Kept] = []
        missing = self.value.gather(ingredients)
        if missing is None:
            self.source = self.value.shared(ingredients)
            self.source.readers += 1
            self.kept = None
        return missing

    def hold(self, kept: Kept) -> None:
        """Keeps the tensor, so that other recipes may use it as an ingredient."""
        self.kept = kept
        self.value.keeper = weakref.ref(kept)

    def unpack(self) -> Tensor:
        if self.kept is not None:
            return self.kept.unpack()
        return plainly(self._rebuilt)

    def _rebuilt(self) -> Tensor:
        tensor = self.source.read(self.value)
        return tensor if self.value.geometry is self.geometry else torch.as_strided(tensor, *self.geometry)
