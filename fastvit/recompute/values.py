"""Values of a graph, and how they are rebuilt.

A `Value` is the result of one op, of which views are parts. The op's node in the autograd graph holds it. It
holds no tensor: it has a weak reference to the tensor where that is kept for backward, and the op and the
values that the op takes where it can be rebuilt. A recipe holds its ingredients, so everything is freed with
the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .kept import SMALLEST, Kept, stream_of
from .policy import Site

# Keys of what a scope notes in a node's metadata.
CALL = "fastvit.call"  # the eps of the call, and its bias without gradient
VERSION = "fastvit.version"  # the version of the tensor that the node made
VALUE = "fastvit.value"  # its Value

_DEEPEST = 4  # most rebuilt tensors on the way to an ingredient
MOST_OPS = 40  # in one recipe


class View:
    """A view of a value, by functions and their other arguments."""

    __slots__ = ("value", "views")

    def __init__(self, value: Value | Ingredient, views: tuple[tuple, ...]):
        self.value = value
        self.views = views

    def gather(self, ingredients: list[Kept]) -> Value | Ingredient | None:
        return self.value.gather(ingredients)

    def tensor(self) -> Tensor:
        result = self.value.tensor()
        for function, *arguments in self.views:
            result = function(result, *arguments)
        return result


class Ingredient:
    """A tensor without a known value, which cannot be rebuilt."""

    __slots__ = ()

    def gather(self, ingredients: list[Kept]) -> Ingredient | None:
        kept = self()
        if kept is None or not kept.is_there():
            return self
        ingredients.append(kept)
        return None

    def tensor(self) -> Tensor:
        kept = self()
        if kept.is_freed():
            _refuse_freed(kept.tensor)
        return kept.read()


class Saved(Ingredient, weakref.ref):
    """A tensor that an op saved. A subclass of weakref, to save an object for the garbage collector."""

    __slots__ = ()


class Copied(Ingredient):
    """A tensor that no op has saved, and that the recipe keeps."""

    __slots__ = ("kept",)

    def __init__(self, kept: Kept):
        self.kept = kept

    def __call__(self) -> Kept:
        return self.kept


class Absent(Ingredient):
    """In the place of an optional tensor that an op did not get."""

    __slots__ = ()

    def __call__(self) -> None:
        return None

    def gather(self, ingredients: list[Kept]) -> None:
        return None

    def tensor(self) -> None:  # type: ignore[override]
        return None


ABSENT = Absent()


def _refuse_freed(parameter: Tensor) -> None:
    raise RuntimeError(
        f"recompute_scope: a tensor is to be rebuilt from a parameter {list(parameter.shape)} that is "
        "sharded now; shard whole blocks"
    )


class Price(NamedTuple):
    """What a recipe costs."""

    depth: int  # rebuilt tensors on the way
    ops: int
    moved: int  # estimated bytes that it reads and writes, from tensors that ops have saved
    flops: int  # of its matrix products


class Value:
    """The result of one op.

    Defaults are class attributes, because a value is made for about every second saved tensor.
    """

    keeper: weakref.ref[Kept] | None = None
    function: Callable[..., Tensor] | None = None
    arguments: tuple[Argument, ...] = ()
    nbytes = 0  # of the result, where an op has saved it
    size = 0  # bytes of the result
    flops = 0  # of the op, a matrix product
    dtype: torch.dtype | None = None  # of the result; an op in place may have had wider operands
    name = ""  # of the autograd node
    is_ingredient = True  # where it is kept
    is_rebuilt: bool | None = None  # None before an op has saved it
    site: Site = ("", "", 0)  # where it was saved first
    geometry: tuple | None = None  # size, stride and offset of the whole tensor
    sharer: weakref.ref[Source] | None = None
    waiting: list[weakref.ref] | None = None  # recipes
    memory: Tensor | None = None  # of the tensor, where it was written to without a new version
    unknown = ""  # why it is not rebuilt, where its price is not the reason
    lasts = True  # the reason, in each forward that saves the same tensors
    _price: Price | None = None

    def kept(self) -> Kept | None:
        return None if self.keeper is None else self.keeper()

    def source(self) -> Source | None:
        return None if self.sharer is None else self.sharer()

    def price(self) -> Price:
        if self._price is None:
            depth, ops, moved, flops = 0, 1, self.size, self.flops
            for argument in self.arguments:
                value = argument.value if type(argument) is View else argument
                if type(value) is not Value:
                    kept = value()
                    if kept is not None:
                        tensor = kept.tensor
                        moved += min(tensor.numel() * tensor.element_size(), 2 * self.size)
                    continue
                moved += min(value.size, 2 * self.size)
                if value.function is not None and value.kept() is None:
                    price = value.price()
                    depth, ops = max(depth, price.depth + (value.nbytes > 0)), ops + price.ops
                    if not value.nbytes:  # else another op has saved it, and it is rebuilt for that op anyway
                        moved += price.moved
                        flops += price.flops
            self._price = Price(depth, ops, moved, flops)
        return self._price

    def against(self) -> str:
        """Why it is never rebuilt; empty where it is."""
        if self.unknown:
            return self.unknown
        if self.function is None:
            return f"there is no recipe for {self.name}"
        if self.nbytes < SMALLEST:
            return f"it has less than {SMALLEST} bytes"
        price = self.price()
        if price.depth >= _DEEPEST:
            return f"its recipe goes through more than {_DEEPEST} rebuilt tensors"
        if price.ops > MOST_OPS:
            return f"its recipe has more than {MOST_OPS} ops"
        return ""

    def gather(self, ingredients: list[Kept]) -> Value | Ingredient | None:
        """Collects the kept tensors from which this is rebuilt, or returns the first that is not kept."""
        reference = self.keeper
        if reference is not None and (kept := reference()) is not None and kept.is_intact():
            if not kept.is_there():  # a sharded parameter, which may be freed when the recipe is followed
                return self
            ingredients.append(kept)
            return None
        if self.function is None or len(ingredients) > MOST_OPS:  # so that no walk over a recipe is longer
            return self
        for argument in self.arguments:
            missing = argument.gather(ingredients)
            if missing is not None:
                return missing
        return None

    def shared(self, ingredients: list[Kept]) -> Source:
        """The source, one for all recipes of this value."""
        source = self.source()
        if source is None:
            source = Source(ingredients)
            self.sharer = weakref.ref(source)
        return source

    def lies_in(self, base: Tensor) -> tuple:
        """Size, stride and offset of `base`, the whole tensor."""
        if self.geometry is None:
            self.geometry = (base.size(), base.stride(), base.storage_offset())
        return self.geometry

    def tensor(self) -> Tensor:
        """The whole tensor: the kept one, one rebuilt for another reader, or rebuilt."""
        kept = self.kept()
        if kept is not None and (self.function is None or kept.before is not None or kept.is_intact()):
            tensor = kept.read()
            if kept.is_freed():
                _refuse_freed(tensor)
            return tensor if self.geometry is None else torch.as_strided(tensor, *self.geometry)
        source = self.source()
        if source is not None and source.rebuilt is not None and source.stream == stream_of(source.rebuilt):
            return source.rebuilt
        tensor = self.function(*[argument.tensor() for argument in self.arguments])
        if tensor.dtype is not self.dtype and self.dtype is not None:
            tensor = tensor.to(self.dtype)
        if self.geometry is not None and tensor.stride() != self.geometry[1]:
            tensor = torch.empty_strided(*self.geometry[:2], dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        if source is not None and source.unread():
            source.rebuilt, source.stream = tensor, stream_of(tensor)
        return tensor


def unknown(reason: str) -> Value:
    """A value that is never rebuilt, nor another from it: an op before may have read something else."""
    value = Value()
    value.unknown, value.is_ingredient, value.lasts = reason, False, False
    return value


class Source:
    """The ingredients of a value, shared by its recipes, and the rebuilt tensor while recipes wait for it.

    Readers on another stream rebuild the tensor themselves: to wait would take longer.
    """

    __slots__ = ("__weakref__", "ingredients", "readers", "reads", "rebuilt", "stream")

    def __init__(self, ingredients: list[Kept]):
        self.ingredients = ingredients
        self.readers = self.reads = 0
        self.rebuilt: Tensor | None = None
        self.stream = 0  # on which it was rebuilt

    def unread(self) -> bool:
        return self.reads < self.readers

    def read(self, value: Value) -> Tensor:
        self.reads += 1
        tensor = value.tensor() if value.memory is None else value.memory
        if not self.unread():  # starts again, for a second backward with retain_graph
            self.rebuilt, self.reads = None, 0
        return tensor


Argument = Value | Ingredient | View  # a tensor that goes into an op
Rebuild = tuple[Callable[..., Tensor], tuple[Argument, ...]]  # an op and what goes into it


class Unknown(Exception):
    """A node lacks an argument of its op.

    Attributes:
        lasts: whether it is so in each forward that saves the same tensors.
    """

    def __init__(self, reason: str = "", lasts: bool = False):
        super().__init__(reason)
        self.lasts = lasts


def plainly(work: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`work(*arguments)` without gradients and autocast, whatever mode the backward runs in."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return plainly(work, *arguments)
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return work(*arguments)
    return work(*arguments)
