"""What a pack hook hands to autograd in place of a tensor: the tensor, or a recipe for it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from .values import Given, Source, Value, plainly


class Kept:
    """A saved tensor, with the check that autograd leaves to whoever installs hooks."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor, is_input: bool = False):
        # An op's own output would keep the op alive, which keeps this alive.
        self.tensor = tensor if is_input or tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def is_intact(self) -> bool:
        return self.tensor._version == self.version

    def is_freed(self) -> bool:
        """Whether it is a parameter whose memory somebody has taken away for now, as sharding does."""
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
    """Stands for a saved tensor that lies in a value that can be rebuilt: all of it, or a view.

    Until all that the value is made from is kept by somebody, it holds the tensor.
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
        """Lets go of the tensor; or says which value nobody keeps yet."""
        ingredients: list[Kept] = []
        missing = self.value.gather(ingredients)
        if missing is None:
            self.source = self.value.shared(ingredients)
            self.source.readers += 1
            self.kept = None
        return missing

    def hold(self, kept: Kept) -> None:
        """Keeps the tensor after all, from which other recipes may then be followed."""
        self.kept = kept
        self.value.keeper = weakref.ref(kept)

    def unpack(self) -> Tensor:
        if self.kept is not None:
            return self.kept.unpack()
        return plainly(self._rebuilt)

    def _rebuilt(self) -> Tensor:
        tensor = self.source.read(self.value)
        return tensor if self.value.geometry is self.geometry else torch.as_strided(tensor, *self.geometry)
