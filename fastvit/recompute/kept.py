"""What a pack hook returns to autograd for a tensor that is not rebuilt."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from .masks import Gate

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # none in a torch for the CPU


def stream_of(tensor: Tensor) -> int:
    """The current stream of the tensor's device; 0 on the CPU."""
    return _raw_stream(tensor.get_device()) if tensor.is_cuda and _raw_stream else 0


def used_here(tensor: Tensor) -> None:
    """Tells the allocator that the current stream reads memory of another."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


SMALLEST = 4096  # fewest bytes of a tensor that are worth a recipe or a mask


class Kept:
    """A saved tensor that stays in memory, with the version check that autograd skips under hooks."""

    __slots__ = (
        "__weakref__", "before", "is_read", "is_shared", "is_unfit", "outer", "stream", "tensor", "version",
        "views",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, is_input: bool = False):
        # An op's own output refers to its node, and the node to this object: a cycle, if not detached.
        self.tensor = tensor if is_input or tensor.is_leaf else tensor.detach()
        self.version = tensor._version
        self.stream = stream_of(tensor)  # of the op that saved it
        self.outer: HandedOn | Gate | None = None  # has the tensor in place of this object
        self.is_read = False  # by a recipe
        self.is_shared = False  # by several ops that have saved it
        self.is_unfit = False  # as an ingredient: overwritten without a new version, or a gate alone is left
        self.before: Tensor | None = None  # a copy for recipes, where the tensor was written to
        self.views: list[weakref.ref[Kept]] = []  # of the same memory

    def again(self, tensor: Tensor) -> Kept:
        """For another save of the same memory."""
        mine = self.tensor
        if tensor.size() == mine.size() and tensor.stride() == mine.stride() and self.outer is None:
            if tensor.storage_offset() == mine.storage_offset():
                self.is_shared = True
                return self
        kept = Kept(tensor)
        self.views.append(weakref.ref(kept))
        return kept

    def same_memory(self) -> list[Kept]:
        return [self, *[kept for view in self.views if (kept := view()) is not None]]

    def copy_for_recipes(self) -> None:
        """Before a write to the tensor, for the recipes that read it."""
        if self.is_read and self.before is None and self.outer is None:
            self.before = self.tensor.clone()

    def hand_on(self, hooks: tuple[Callable, Callable]) -> None:
        """Passes the tensor to the pack hook around the scope, and drops it."""
        if self.outer is None:
            self._replace(HandedOn(self.tensor, *hooks))

    def reduce_to_gate(self, gate_of: Callable[[Tensor], Gate | None]) -> None:
        """Drops all but a gate, where the op that saved the tensor alone reads it."""
        if self.is_shared or self.is_read or self.views or self.outer is not None or not self.is_intact():
            return
        tensor = self.tensor
        if tensor.nbytes < SMALLEST or (tensor.is_leaf and tensor.requires_grad):
            return
        if (gate := gate_of(tensor)) is not None:
            self.is_unfit = True
            self._replace(gate)

    def restore(self, tensor: Tensor) -> None:
        """Takes the tensor again where a gate was left of it, now that another op saves it."""
        mine = self.tensor
        if type(self.outer) is Gate and tensor.size() == mine.size() and tensor.stride() == mine.stride():
            self.tensor, self.version = tensor.detach(), tensor._version
            self.outer, self.is_unfit = None, False

    def _replace(self, outer: HandedOn | Gate) -> None:
        self.outer = outer
        self.tensor, self.version = torch.empty_like(self.tensor, device="meta"), 0

    def is_intact(self) -> bool:
        return self.tensor._version == self.version and self.before is None and not self.is_unfit

    def is_freed(self) -> bool:
        """Whether it is a parameter, or a view of one, whose memory is freed for now, as FSDP does."""
        tensor = self.tensor
        if self.outer is not None or (type(tensor) is not Parameter and tensor.grad_fn is None):
            return False
        return not tensor.untyped_storage().nbytes() and tensor.numel() > 0

    def is_there(self) -> bool:
        return self.is_intact() and not self.is_freed()

    def read(self) -> Tensor:
        """The tensor as it was saved, for a recipe."""
        tensor = self.unpack() if self.before is None else self.before
        if stream_of(tensor) != self.stream:
            used_here(tensor)
        return tensor

    def unpack(self) -> Tensor:
        if self.outer is not None:
            return self.outer.unpack()
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


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
