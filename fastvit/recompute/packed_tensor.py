"""What autograd holds for a saved tensor, and how a tensor that was dropped is made again.

A `Record` is what the pack hook returns. Its states:

    filed      the tensor is held, and the decision is to come (`producer` made it, or its base)
    kept       the tensor is held until the backward
    stood for  the tensor is gone, and `stand_in` has what is left of it: a mask, or what hooks around hold
    rebuilt    the tensor is gone, and `recipe` makes it again

A `Recipe` is one op and its operands: records that are kept, other recipes, copies of small leaves. So
recipes and the records that they need hold each other as long as the graph holds one of them, and no longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .masks import Mask
from .views import of_unsafe_view, part

VALUE = "fastvit.value"  # of the result of a node, in its metadata
SMALLEST = 4096  # fewest bytes of a tensor that are worth a recipe or a mask
Geometry = tuple[torch.Size, tuple[int, ...], Any]  # size, stride, offset

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # none in a torch for the CPU


def stream_of(tensor: Tensor) -> int:
    """The current stream of the tensor's device; 0 on the CPU."""
    return _raw_stream(tensor.get_device()) if tensor.is_cuda and _raw_stream else 0


def used_here(tensor: Tensor) -> None:
    """Tells the allocator that the current stream reads memory of another."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Record:
    """Stands for one saved tensor. Defaults are class attributes: one is made for every saved tensor."""

    tensor: Tensor
    version: int
    producer: Any = None  # the node that made the tensor or its base, until the decision
    base: Geometry | None = None  # of a view: its base
    block = ""  # whose forward saved it
    in_half = False  # in half precision, or under autocast
    value: Value | None = None  # what it is, or is a view of
    recipe: Recipe | None = None
    geometry: Geometry | None = None  # of a rebuilt view, from the start of its base
    stand_in: HandedOn | Mask | None = None
    mask_of: Callable[[Tensor], Mask | None] | None = None  # where its op needs no more of it than a mask
    before: Tensor | None = None  # a copy for recipes, where the tensor was written to
    is_read = False  # by a recipe
    is_unfit = False  # for a recipe: written to in ways that the graph does not show
    stream = 0  # of the op that saved it
    reason = ""  # for the decision

    @classmethod
    def of(cls, tensor: Tensor) -> Record:
        """For a tensor that no op has saved, and that a recipe keeps."""
        record = cls()
        record.tensor, record.version, record.stream = tensor, tensor._version, stream_of(tensor)
        return record

    def is_intact(self) -> bool:
        """Whether a recipe may take the tensor."""
        return (
            self.recipe is None
            and self.tensor._version == self.version
            and self.before is None
            and self.mask_of is None
            and not self.is_unfit
        )

    def is_freed(self) -> bool:
        """Whether it is a parameter, or a view of one, whose memory is freed for now, as FSDP does."""
        tensor = self.tensor
        if type(tensor) is not Parameter and tensor.grad_fn is None:
            return False
        return not tensor.untyped_storage().nbytes() and tensor.numel() > 0

    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def read(self) -> Tensor:
        """The tensor as it was saved, for a recipe."""
        tensor = self.unpack() if self.before is None else self.before
        if self.is_freed():
            raise RuntimeError(
                f"recompute_scope: a tensor is to be rebuilt from a parameter {list(tensor.shape)} that is "
                "sharded now; shard whole blocks"
            )
        if stream_of(tensor) != self.stream:
            used_here(self.stand_in.packed if type(self.stand_in) is Mask else tensor)
        return tensor

    def unpack(self) -> Tensor:
        if self.recipe is not None:
            return plainly(self._rebuilt)
        if self.stand_in is not None:
            return self.stand_in.unpack()
        tensor = self.tensor
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {self.version} instead."
            )
        return tensor

    def _rebuilt(self) -> Tensor:
        recipe = self.recipe
        assert recipe is not None
        tensor = recipe.read() if recipe.memory is None else recipe.memory
        return tensor if self.geometry is None else part(tensor, *self.geometry)

    def copy_for_recipes(self) -> None:
        """Before a write to the tensor, for the recipes that read it."""
        if self.is_read and self.before is None and self.recipe is None and self.stand_in is None:
            tensor = self.tensor  # of a view, recipes may read the rest of the base too
            memory = tensor.new_empty(0).set_(tensor.untyped_storage().clone())
            self.before = memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def stand_by(self, stand_in: HandedOn | Mask) -> None:
        self.stand_in = stand_in
        self.tensor, self.version = torch.empty_like(self.tensor, device="meta"), 0

    def reduce_to_mask(self) -> None:
        """Drops all but a mask, where nothing but the op that saved the tensor reads it."""
        # A recipe may take it from here on, if it stays. mask_of refers to the node that holds this record.
        mask_of, self.mask_of = self.mask_of, None
        if mask_of is None or self.is_read or self.stand_in is not None or not self.is_intact():
            return
        if self.value is not None and any(one is not self for one in self.value.live_records()):
            return
        tensor = self.tensor
        if tensor.nbytes < SMALLEST or (tensor.is_leaf and tensor.requires_grad):
            return
        if (mask := mask_of(tensor)) is not None:
            self.is_unfit = True
            self.stand_by(mask)


class Value:
    """The result of one op, of which views are parts. The op's node holds it; it holds no tensor."""

    recipe: weakref.ref[Recipe] | None = None
    site: tuple[str, str, int] | None = None  # where it was saved first
    geometry: Any = None  # a Geometry, where an op has saved it
    reason = ""  # why it is kept
    is_known = True  # what is in its memory
    version: int | None = None  # that its op left, where that is not 0
    is_boundary = False  # goes into a block, or comes out of one
    call: tuple[Any, Tensor | None] | None = None  # the eps or the number of it, its bias without gradient

    def __init__(self, name: str) -> None:
        self.name = name  # of the op's node
        self.records: list[weakref.ref[Record]] = []

    @classmethod
    def of(cls, node) -> Value:
        """Of the result of `node`."""
        value = node.metadata.get(VALUE)
        return cls.replaced(node) if value is None else value

    @classmethod
    def replaced(cls, node) -> Value:
        """A new one for `node`."""
        value = node.metadata[VALUE] = cls(of_unsafe_view(node).name())
        return value

    def live_records(self) -> list[Record]:
        """What stands for it now, as a whole or in parts."""
        return alive(self.records)

    def kept(self) -> Record | None:
        """A record that holds its memory."""
        return next((one for one in self.live_records() if one.is_intact() and not one.is_freed()), None)


def alive(references: Iterable[weakref.ref[Record]]) -> list[Record]:
    return [record for reference in references if (record := reference()) is not None]


class Recipe:
    """An op and its operands: makes one tensor, once for all that read it."""

    memory: Tensor | None = None  # of the tensor, where it was written to without a new version
    result: Tensor | None = None  # while a reader waits for it
    stream = 0  # on which it was made
    readers = 0  # records and recipes
    reads = 0

    def __init__(self, value: Value, function: Callable[..., Tensor], operands: tuple[Operand, ...]):
        self.value, self.function, self.operands = value, function, operands
        self.dtype: torch.dtype | None = None
        self.inner = [one for operand in operands if type(one := whole(operand)) is Recipe]
        self.depth = 0  # rebuilt tensors on the way to those that are kept
        self.ops = 1
        self.size = 0  # bytes of the result
        self.moved = 0  # bytes that it reads and writes, from tensors that ops have saved
        self.flops = 0  # of its matrix products

    def adopt(self) -> None:
        """Counts it as a reader of its operands: something is going to be rebuilt by it."""
        if self.readers == 0:
            for operand in self.operands:
                one = whole(operand)
                if type(one) is Record:
                    one.is_read = True
                elif type(one) is Recipe:
                    one.adopt()
        self.readers += 1

    def is_made(self) -> bool:
        return self.result is not None and self.stream == stream_of(self.result)

    def read(self) -> Tensor:
        """The tensor, for one of the readers. What it is made of is made first, in order."""
        if not self.is_made():
            for recipe in self.all(Recipe.is_made):
                recipe._make()
        result = self.result
        assert result is not None
        self.reads += 1
        if self.reads >= self.readers:  # starts again, for a second backward with retain_graph
            self.result, self.reads = None, 0
        return result

    def _make(self) -> None:
        tensor = self.function(*[None if operand is None else operand.read() for operand in self.operands])
        if tensor.dtype is not self.dtype and self.dtype is not None:
            tensor = tensor.to(self.dtype)
        geometry = self.value.geometry
        if geometry is not None and tensor.stride() != geometry[1]:
            laid = torch.empty_strided(*geometry[:2], dtype=tensor.dtype, device=tensor.device)
            tensor = laid.copy_(tensor)
        self.result, self.stream = tensor, stream_of(tensor)

    def all(self, but: Callable[[Recipe], bool] = lambda _: False) -> list[Recipe]:
        """The recipes that it needs, each after those that it takes, and itself; none that is `but`."""
        found: dict[Recipe, None] = {}
        waiting = [self]
        while waiting:
            missing = [one for one in waiting[-1].inner if one not in found and not but(one)]
            if missing:
                waiting += missing
            else:
                found[waiting.pop()] = None
        return list(found)

    def records(self) -> list[Record]:
        """The tensors that it reads itself."""
        return [one for one in map(whole, self.operands) if isinstance(one, Record)]

    def forget(self) -> None:
        """Drops the results that wait for readers."""
        for one in self.all():
            one.result, one.reads = None, 0


class View:
    """A view of a tensor, by functions and their other arguments."""

    __slots__ = ("base", "views")

    def __init__(self, base: Record | Recipe, views: tuple[tuple, ...]):
        self.base, self.views = base, views

    def read(self) -> Tensor:
        tensor = self.base.read()
        for function, *arguments in self.views:
            tensor = function(tensor, *arguments)
        return tensor


Operand = Record | Recipe | View | None


def whole(operand: Operand) -> Record | Recipe | None:
    return operand.base if type(operand) is View else operand  # type: ignore[return-value]


class Unread:
    """Stands for an input of which the backward of its op reads the sizes and strides alone."""

    __slots__ = ("__weakref__", "device", "dtype", "size", "stride")

    def __init__(self, tensor: Tensor):
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device

    def unpack(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class HandedOn:
    """A tensor that hooks around the scope hold, such as those of save_on_cpu."""

    __slots__ = ("geometry", "packed", "tensor", "unpack_hook")

    def __init__(self, tensor: Tensor, pack_hook: Callable, unpack_hook: Callable):
        self.geometry = tensor.size(), tensor.stride()
        self.packed = pack_hook(tensor)
        self.unpack_hook = unpack_hook
        self.tensor: Tensor | None = None

    def unpack(self) -> Tensor:
        """The tensor in its own layout. Unpacked once, since a hook may drop what it has returned."""
        if self.tensor is None:
            tensor = self.unpack_hook(self.packed)
            if tensor.stride() != self.geometry[1]:
                laid = torch.empty_strided(*self.geometry, dtype=tensor.dtype, device=tensor.device)
                tensor = laid.copy_(tensor)
            self.tensor, self.packed = tensor, None
        return self.tensor


def unpack(packed: Record | Unread) -> Tensor:
    """The unpack hook."""
    return packed.unpack()


def plainly(work: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`work(*arguments)` without gradients and autocast, whatever mode the backward runs in."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return plainly(work, *arguments)
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return work(*arguments)
    return work(*arguments)
