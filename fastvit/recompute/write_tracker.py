"""`WriteTracker` counts writes that autograd's graph or the version counter does not show.

The tracker counts the writes to each storage. A recipe reads an operand only if neither this count nor
autograd's version counter has changed since the op ran.
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

_MIN_OWNERS = 256  # number of owners at which dead owners are removed for the first time


class _Owner(NamedTuple):
    """The op output that has a storage. The reference to the storage reserves the id of the storage."""

    storage: StorageWeakRef
    info: weakref.ref[OutputInfo]


class WriteTracker:
    """Counts untracked writes to memory, as long as a scope is open."""

    def __init__(self) -> None:
        self.write_counts: dict[int, int] = defaultdict(int)  # untracked writes, by the id of the storage
        self._owners: dict[int, _Owner] = {}  # owners of storages that have an alias without a graph
        self._max_owners = _MIN_OWNERS  # dead owners are removed at this number
        self._recipes: WeakList[Recipe] = WeakList()  # recipes whose operands are not in `_operands` yet
        self._operands: dict[int, WeakList[PackedTensor | PinnedTensor]] = defaultdict(WeakList)
        self._lent_memory: list[_LentMemory] = []
        # The leaves that composite functions read, and the sequence numbers of the functions' nodes.
        self.pins_of_calls: list[tuple[range, tuple[PinnedTensor, ...]]] = []

    def count_writes(self, tensor: Tensor) -> int:
        """Returns the number of untracked writes to the memory of `tensor`."""
        return self.write_counts.get(storage_id(tensor), 0) if self.write_counts else 0

    def add_alias(self, alias: Tensor, node: Any) -> None:
        """Adds `alias`, which has the memory of the output of `node`, but no node in the graph."""
        if len(self._owners) >= self._max_owners:
            self._owners = {key: owner for key, owner in self._owners.items() if owner.info() is not None}
            self._max_owners = max(_MIN_OWNERS, 2 * len(self._owners))
        storage = StorageWeakRef(alias.untyped_storage())
        self._owners[storage_id(alias)] = _Owner(storage, weakref.ref(OutputInfo.of_node(node)))

    def add_recipe(self, recipe: Recipe) -> None:
        """Adds a recipe, whose operands take a copy before a write to their memory."""
        self._recipes.append(recipe)

    def _index_operands(self) -> None:
        for recipe in self._recipes:
            for untracked in recipe.in_topological_order(skip=lambda one: one.is_tracked):
                untracked.is_tracked = True
                for operand in untracked.kept_operands():
                    if (tensor := operand.held_tensor()) is not None and has_storage(tensor):
                        self._operands[storage_id(tensor)].append(operand)
        self._recipes.clear()

    def is_unshared_number(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` is a leaf of one element that shares no memory; recipes have copies."""
        is_number = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        return is_number and self.find_owner(tensor) is None

    def find_owner(self, tensor: Tensor) -> OutputInfo | None:
        """Returns the op output that has the memory of `tensor`; None if the output is not known."""
        node = view_base(tensor).grad_fn
        if node is not None:
            return OutputInfo.of_node(node)
        owner = self._owners.get(storage_id(tensor)) if self._owners else None
        return None if owner is None else owner.info()

    def save_pre_write_copies(self, tensor: Tensor) -> None:
        """Copies the memory of `tensor` before a write to it, for the recipes that read the memory."""
        self._index_operands()
        for operand in self._operands.pop(storage_id(tensor), ()):
            operand.save_pre_write_copy()

    def add_write(self, tensor: Tensor) -> None:
        """Counts a write to `tensor` that the graph does not show, after the write."""
        self.write_counts[storage_id(tensor)] += 1
        if (info := self.find_owner(tensor)) is not None:
            info.is_content_known = False

    def restore_dropped(self, tensor: Tensor) -> list[PackedTensor]:
        """Lets the packed tensors that have dropped the memory of `tensor` hold it again, and returns them.

        Called before a write to `tensor`, because the backward without a scope would read what is written.
        """
        info = self.find_owner(tensor)
        if info is None or not info.is_content_known:  # the memory has been written to already
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
        """Returns the pinned leaves of the composite function that made `node`."""
        number = node._sequence_nr()
        return next((pins for numbers, pins in self.pins_of_calls if number in numbers), ())

    def lend(self, tensor: Tensor) -> None:
        """Called before `tensor` lends its memory to a borrower, such as NumPy, which may write to it."""
        info = self.find_owner(tensor)
        if info is None:  # a leaf: ops may read a borrower's writes from now on
            self.save_pre_write_copies(tensor)
            self.write_counts[storage_id(tensor)] += 1
        elif tensor.device.type == "cpu" and info.is_content_known:
            self._lent_memory.append(_LentMemory(info, tensor, self._is_dropped_or_read(info, tensor)))
        else:
            info.is_content_known = False

    def _is_dropped_or_read(self, info: OutputInfo, tensor: Tensor) -> bool:
        """Returns whether a packed tensor has dropped the memory of `tensor`, or a recipe reads it."""
        self._index_operands()
        is_dropped = any(packed.find_dropped_memory() is not None for packed in info.packed_tensors)
        return is_dropped or storage_id(tensor) in self._operands

    def check_lent_memory(self, pending: list[PackedTensor]) -> list[OutputInfo]:
        """Marks the outputs whose lent memory has been written to. Called before a plan.

        Returns the outputs that the plan must not read, because none of `pending` holds their memory.
        """
        if not self._lent_memory:
            return []
        pending_tensors = {storage_id(one.state.tensor): one.state.tensor for one in pending}  # type: ignore[union-attr]
        still_lent, unheld = [], []
        for lent in self._lent_memory:
            tensor = pending_tensors.get(lent.storage)
            holder = lent.alias if tensor is None else tensor
            is_written = holder is not None and lent.is_written(holder)
            lent.info.is_content_known = tensor is not None and not (
                is_written or lent.may_still_be_written()
            )
            if is_written and lent.alias is not None:
                self._restore(lent.info, lent.alias)
                for operand in self._operands.pop(lent.storage, ()):
                    if isinstance(operand, PackedTensor):
                        operand.is_overwritten = True
                self.write_counts[lent.storage] += 1
            elif tensor is None:
                unheld.append(lent.info)
                still_lent.append(lent)
            elif lent.alias is not None and lent.may_still_be_written():
                still_lent.append(lent)
        self._lent_memory = still_lent
        return unheld

    def close(self) -> None:
        """Checks lent memory for the last time, and drops all references, at the end of the scope."""
        self.check_lent_memory([])
        self._lent_memory.clear()
        self.pins_of_calls.clear()
        self._recipes.clear()
        self._operands.clear()


class _LentMemory:
    """Memory that was lent to NumPy or others, and a checksum of it."""

    def __init__(self, info: OutputInfo, tensor: Tensor, is_dropped_or_read: bool):
        self.info, self.storage = info, storage_id(tensor)
        # An alias keeps the memory if a packed tensor may be restored, or a recipe reads it.
        self.alias = tensor.detach() if is_dropped_or_read else None
        self._lender = TensorWeakRef(tensor)  # lives as long as a borrower, which holds the tensor
        self._checksum = _checksum(tensor)

    def may_still_be_written(self) -> bool:
        """Returns whether a borrower may still write to the memory."""
        lender = self._lender()
        return lender is not None and lender.grad_fn is None

    def is_written(self, tensor: Tensor) -> bool:
        """Returns whether the memory of `tensor` differs from the memory that was lent."""
        return _checksum(tensor) != self._checksum


def _checksum(tensor: Tensor) -> int:
    """Returns a checksum of the whole storage of `tensor`."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return zlib.crc32(storage.numpy().data)
