"""Observes saved tensors for `report`, `verify` and budgets."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import BitMask
from .packed_tensor import (
    MIN_RECOMPUTE_BYTES,
    Kept,
    PackedTensor,
    Recomputed,
    Replaced,
)
from .policy import OpSite, RecomputeLevel, display_op_name
from .recipe import Recipe
from .recompute_rules import RECOMPUTE_RULES
from .storage import storage_id, view_base

_next_sequence_nr = torch._C._autograd._get_sequence_nr  # Returns the number of the next node of this thread.


@dataclass(frozen=True)
class SavedMemory:
    """One storage, or one recipe, and the saved tensors that use it.

    Attributes:
        saved: for each saved tensor its annotation, and the function that unpacks it.
        reason: why the memory is kept, or the ops that recompute it.
        kept_bytes: bytes that stay in memory, and that no other entry counts.
        freed_bytes: bytes that the scope has freed.
        site: the op call whose output is recomputed, or that makes the mask; None if the memory is kept.
        clear_cached_outputs: drops the tensors that unpacking has computed.
        is_mask: whether a bit mask is kept in place of a tensor.
    """

    saved: list[tuple[Any, Callable[[], Tensor]]]
    reason: str
    kept_bytes: int
    freed_bytes: int
    site: OpSite | None = None
    clear_cached_outputs: Callable[[], None] = lambda: None
    is_mask: bool = False


class SeenTensor(NamedTuple):
    """A saved tensor, and two times, which are sequence numbers of nodes."""

    packed: PackedTensor
    annotation: Any
    time: int  # number of the node whose op saved the tensor
    created: int  # number of the node whose op made the tensor


class SavedTensorObserver:
    """Observes the tensors that ops save, without holding them.

    The observer holds the operands of unused recipes, until `drop_recipes` is called.

    Args:
        annotate: returns an annotation of a saved tensor.
    """

    def __init__(self, annotate: Callable[[Tensor], Any]):
        self._annotate = annotate
        # Arguments of `SeenTensor`, the first one by a weak reference.
        self._references: list[tuple[weakref.ref[PackedTensor], Any, int, int]] = []
        self.first_time = _next_sequence_nr()  # number of the first node that the observer sees
        self.plan_times: list[int] = []  # the number of the next node at each plan of a scope
        self.unused_recipes: list[Recipe] = []  # recipes of tensors that are kept all the same

    def add(self, packed: PackedTensor, tensor: Tensor) -> None:
        """Adds a saved tensor."""
        time = _next_sequence_nr() - 1  # the op that saves has made the newest node
        node = view_base(tensor).grad_fn
        created = time if node is None else node._sequence_nr()
        self._references.append((weakref.ref(packed), self._annotate(tensor), time, created))

    def add_plan(self) -> None:
        """Adds the time of a plan of a scope, which has just ended."""
        self.plan_times.append(_next_sequence_nr())

    def next_time(self) -> int:
        """Returns the number that the next node gets."""
        return _next_sequence_nr()

    def drop_recipes(self) -> None:
        """Drops unused recipes, which hold tensors."""
        self.unused_recipes.clear()

    def seen_tensors(self) -> list[SeenTensor]:
        """Returns the saved tensors that are alive."""
        return [
            SeenTensor(packed, annotation, time, created)
            for reference, annotation, time, created in self._references
            if (packed := reference()) is not None
        ]

    def saved_memory(self, exclude: Iterable[Tensor] = ()) -> list[SavedMemory]:
        """Returns an entry for each storage or recipe of the saved tensors that are alive.

        Storages of the tensors `exclude` are left out.
        """
        excluded_storages = {0, *map(storage_id, exclude)}
        groups = self._group_by_memory(excluded_storages)
        kept = {key for key in groups if isinstance(key, int)}
        counted, entries = kept | excluded_storages, []
        for key, group in groups.items():
            saved = [(annotation, packed.unpack) for annotation, packed in group]
            if isinstance(key, Recipe):
                entries.append(_recomputed_memory(key, saved, kept, counted))
            else:
                entries.append(_kept_memory(group[0][1], saved))
        return entries

    def _group_by_memory(
        self, excluded_storages: set[int]
    ) -> dict[Recipe | int, list[tuple[Any, PackedTensor]]]:
        """Returns the living packed tensors with annotations, by recipe or by the id of the storage."""
        groups: dict[Recipe | int, list[tuple[Any, PackedTensor]]] = defaultdict(list)
        for packed, annotation, *_ in self.seen_tensors():
            state, key = packed.state, id(packed)  # the key of a replaced tensor, which has no storage
            if isinstance(state, Recomputed):
                groups[state.recipe].append((annotation, packed))
                continue
            if isinstance(state, Kept):
                key = storage_id(state.tensor)
            if key not in excluded_storages:
                groups[key].append((annotation, packed))
        return groups


def _recomputed_memory(
    recipe: Recipe, saved: list[tuple[Any, Callable[[], Tensor]]], kept: set[int], counted: set[int]
) -> SavedMemory:
    """Returns the entry of a recipe, and adds the storages of its operands to `counted`.

    Args:
        kept: storages that ops have saved; the reason of the entry speaks of these alone.
        counted: storages whose bytes are not counted again.
    """
    recipes = recipe.in_topological_order()
    tensors = [
        tensor for one in recipes for tensor in map(_held_tensor, one.kept_operands()) if tensor is not None
    ]
    sizes = {storage_id(tensor): tensor.nbytes for tensor in tensors}
    num_saved_inputs = sum(key in kept and size >= MIN_RECOMPUTE_BYTES for key, size in sizes.items())
    new_kept_bytes = sum(size for key, size in sizes.items() if key not in counted)
    counted.update(sizes)
    ops = list(dict.fromkeys(display_op_name(one.info.node_name) for one in recipes))
    inputs = f"{'its' if len(ops) == 1 else 'the'} saved input{'s' if num_saved_inputs > 1 else ''}"
    reason = f"recomputed by {', '.join(ops)} from {inputs}"
    return SavedMemory(
        saved, reason, new_kept_bytes, recipe.nbytes, recipe.info.site, recipe.clear_cached_outputs
    )


def _held_tensor(operand: Any) -> Tensor | None:
    return operand.held_tensor() if isinstance(operand, PackedTensor) else operand.tensor


def _kept_memory(packed: PackedTensor, saved: list[tuple[Any, Callable[[], Tensor]]]) -> SavedMemory:
    """Returns the entry of a packed tensor that is kept or replaced."""
    state, info = packed.state, packed.info
    if isinstance(state, Replaced):
        nbytes, mask = state.storage_nbytes, state.replacement
        if not isinstance(mask, BitMask):
            return SavedMemory(saved, "packed by the saved-tensor hooks around the scope", nbytes, 0)
        kept = mask.packed.nbytes
        return SavedMemory(saved, mask.reason, kept, nbytes - kept, packed.mask_site, is_mask=True)
    assert isinstance(state, Kept)
    nbytes = state.tensor.untyped_storage().nbytes()
    return SavedMemory(
        saved, packed.reason if info is None else info.reason or _reason_by_level(info.node_name), nbytes, 0
    )


def _reason_by_level(node_name: str) -> str:
    op, level = display_op_name(node_name), RECOMPUTE_RULES.get(node_name, (RecomputeLevel.EVERY_OP, None))[0]
    if level == RecomputeLevel.CHEAP:
        return f"an input of {op} is not kept"
    if level == RecomputeLevel.MATMULS:
        return f"the result of {op}: recomputed with matmuls=True, where it is no narrower than its input"
    return f"the result of {op}, which is not recomputed"
