"""What a scope knows of writes that autograd's graph or the version counter does not show.

Memory is known by its storage. Writes to it are counted beside autograd's version counter: a recipe reads an
operand only if neither number has changed since the op ran.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .packed_tensor import PackedTensor
from .pins import PinnedTensor
from .recipe import OutputInfo, Recipe
from .storage import has_storage, storage_id, view_base
from .weak_list import WeakList

_MIN_OWNERS = 256


class _Owner(NamedTuple):
    """The op output that has a storage. While the reference is held, no other storage has this one's id."""

    storage: StorageWeakRef
    info: weakref.ref[OutputInfo]


class WriteTracker:
    """Counts untracked writes to memory, as long as a scope is open."""

    def __init__(self) -> None:
        self.write_counts: dict[int, int] = defaultdict(int)  # untracked writes, by storage
        self._owners: dict[int, _Owner] = {}  # of storages that have an alias without a graph
        self._max_owners = _MIN_OWNERS  # the number at which dead ones are removed
        self._recipes: WeakList[Recipe] = WeakList()  # whose operands are not in `_operands` yet
        self._operands: dict[int, WeakList[PackedTensor | PinnedTensor]] = defaultdict(WeakList)
        self._lent_memory: list[_LentMemory] = []
        # The leaves that composite functions read, and the numbers of the nodes that these have made.
        self.pins_of_calls: list[tuple[range, tuple[PinnedTensor, ...]]] = []

    def count_writes(self, tensor: Tensor) -> int:
        """Returns how many untracked writes to the memory of `tensor` there have been."""
        return self.write_counts.get(storage_id(tensor), 0) if self.write_counts else 0

    def add_alias(self, alias: Tensor, node: Any) -> None:
        """`alias` has the memory of the output of `node`, and not its graph."""
        if len(self._owners) >= self._max_owners:
            self._owners = {key: owner for key, owner in self._owners.items() if owner.info() is not None}
            self._max_owners = max(_MIN_OWNERS, 2 * len(self._owners))
        storage = StorageWeakRef(alias.untyped_storage())
        self._owners[storage_id(alias)] = _Owner(storage, weakref.ref(OutputInfo.of_node(node)))

    def add_recipe(self, recipe: Recipe) -> None:
        """Lets the operands of a recipe take a copy before a write to their memory."""
        self._recipes.append(recipe)

    def _find_operands(self) -> None:
        for recipe in self._recipes:
            for one in recipe.in_topological_order(skip=lambda one: one.is_tracked):
                one.is_tracked = True
                for operand in one.kept_operands():
                    if (tensor := operand.held_tensor()) is not None and has_storage(tensor):
                        self._operands[storage_id(tensor)].append(operand)
        self._recipes.clear()

    def is_unshared_number(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` is a number with memory of its own, and a leaf: recipes have copies."""
        is_number = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        return is_number and self.find_owner(tensor) is None

    def find_owner(self, tensor: Tensor) -> OutputInfo | None:
        """Returns the op output that has the memory of `tensor`, as far as it is known."""
        node = view_base(tensor).grad_fn
        if node is not None:
            return OutputInfo.of_node(node)
        owner = self._owners.get(storage_id(tensor)) if self._owners else None
        return None if owner is None else owner.info()

    def save_pre_write_copies(self, tensor: Tensor) -> None:
        """Called before a write to `tensor`: recipes that read its memory get a copy."""
        self._find_operands()
        for operand in self._operands.pop(storage_id(tensor), ()):
            operand.save_pre_write_copy()

    def add_write(self, tensor: Tensor) -> None:
        """Called after a write to `tensor`, of which the graph shows nothing."""
        self.write_counts[storage_id(tensor)] += 1
        if (info := self.find_owner(tensor)) is not None:
            info.is_content_known = False

    def restore_dropped(self, tensor: Tensor) -> list[PackedTensor]:
        """Lets the packed tensors of dropped memory hold it again, and returns them.

        Called before a write to `tensor`, which has the memory: autograd reads what is written.
        """
        info = self.find_owner(tensor)
        if info is None or not info.is_content_known:  # it has been written to already
            return []
        return self._restore(info, tensor)

    def _restore(self, info: OutputInfo, tensor: Tensor) -> list[PackedTensor]:
        restored = []
        for packed in info.packed_tensors:
            dropped = packed.find_dropped_memory()
            if dropped is not None:
                dtype, (size, stride, offset) = dropped
                memory = torch.empty(0, dtype=dtype, device=tensor.device)
                packed.keep(memory.set_(tensor.untyped_storage(), offset, size, stride))
                restored.append(packed)
        return restored

    def find_pins(self, node: Any) -> tuple[PinnedTensor, ...]:
        """Returns the leaves that the composite function pinned in which `node` was made."""
        number = node._sequence_nr()
        return next((pins for numbers, pins in self.pins_of_calls if number in numbers), ())

    def lend(self, tensor: Tensor) -> None:
        """Called before `tensor` gives its memory away, to NumPy for example, which may read or write it."""
        info = self.find_owner(tensor)
        if info is None:  # a leaf: who reads it from here on, reads what may be written
            self.save_pre_write_copies(tensor)
            self.write_counts[storage_id(tensor)] += 1
        elif tensor.device.type == "cpu" and info.is_content_known:
            self._lent_memory.append(_LentMemory(info, tensor, self._is_dropped_or_read(info, tensor)))
        else:
            info.is_content_known = False

    def _is_dropped_or_read(self, info: OutputInfo, tensor: Tensor) -> bool:
        """Returns whether a packed tensor has dropped the memory of `tensor`, or a recipe reads it."""
        self._find_operands()
        is_dropped = any(packed.find_dropped_memory() is not None for packed in info.packed_tensors)
        return is_dropped or storage_id(tensor) in self._operands

    def check_lent_memory(self, pending: list[PackedTensor]) -> list[OutputInfo]:
        """Finds out which of the memory that was lent has been written to. Called before a plan.

        Returns the outputs that the plan must not read, because none of `pending` holds their memory.
        """
        if not self._lent_memory:
            return []
        memory = {storage_id(one.state.tensor): one.state.tensor for one in pending}  # type: ignore[union-attr]
        waiting, unseen = [], []
        for lent in self._lent_memory:
            tensor = memory.get(lent.storage)
            held = lent.held if tensor is None else tensor
            is_written = held is not None and lent.is_written(held)
            lent.info.is_content_known = tensor is not None and not (
                is_written or lent.may_still_be_written()
            )
            if is_written and lent.held is not None:
                self._restore(lent.info, lent.held)
                for operand in self._operands.pop(lent.storage, ()):
                    if isinstance(operand, PackedTensor):
                        operand.is_overwritten = True
                self.write_counts[lent.storage] += 1
            elif tensor is None:
                unseen.append(lent.info)
                waiting.append(lent)
            elif lent.held is not None and lent.may_still_be_written():
                waiting.append(lent)
        self._lent_memory = waiting
        return unseen

    def close(self) -> None:
        """Called at the end of the scope."""
        self.check_lent_memory([])
        self._lent_memory.clear()
        self.pins_of_calls.clear()
        self._recipes.clear()
        self._operands.clear()


class _LentMemory:
    """Memory that was given away, and a checksum of it."""

    def __init__(self, info: OutputInfo, tensor: Tensor, is_dropped_or_read: bool):
        self.info, self.storage = info, storage_id(tensor)
        self.held = tensor.detach() if is_dropped_or_read else None  # what is written must reach backward
        self._alias = TensorWeakRef(tensor)  # which an array holds
        self._checksum = _checksum(tensor)

    def may_still_be_written(self) -> bool:
        """Returns whether somebody may still write to the memory."""
        alias = self._alias()
        return alias is not None and alias.grad_fn is None

    def is_written(self, tensor: Tensor) -> bool:
        return _checksum(tensor) != self._checksum


def _checksum(tensor: Tensor) -> int:
    """Returns a checksum of the whole storage."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return zlib.crc32(storage.numpy().data)
