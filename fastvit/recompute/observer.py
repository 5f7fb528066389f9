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

_next_sequence_nr = torch._C._autograd._get_sequence_nr  # of the next node of this thread


@dataclass(frozen=True)
class SavedMemory:
    """One storage, or one recipe, and the saved tensors that use it.

    Attributes:
        saved: for each of them, its annotation, and the function that unpacks it.
        reason: why it is kept, or the ops that recompute it.
        kept: bytes that stay in memory, of which other decisions do not count any.
        freed: bytes that do not.
        site: whose output is recomputed, or that makes the mask; None where it is kept.
        forget: drops what unpacking has made.
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
    """A saved tensor: when an op saved it and when an op made it, as numbers of nodes."""

    packed: PackedTensor
    annotation: Any
    time: int
    created: int


class SavedTensorObserver:
    """Sees what ops save. Holds neither the tensors nor what is packed, but until `drop_recipes` is called
    the operands of unused recipes.

    Args:
        annotate: returns what is to be remembered of a tensor.
    """

    def __init__(self, annotate: Callable[[Tensor], Any]):
        self._annotate = annotate
        self._seen: list[tuple[weakref.ref[PackedTensor], Any, int, int]] = []
        self.first_time = _next_sequence_nr()
        self.plan_times: list[int] = []  # the number of the next node, at each plan of a scope
        self.unused_recipes: list[Recipe] = []  # of tensors that are kept all the same

    def add(self, packed: PackedTensor, tensor: Tensor) -> None:
        time = _next_sequence_nr() - 1  # an op's node exists when the op saves
        node = view_base(tensor).grad_fn
        created = time if node is None else node._sequence_nr()
        self._seen.append((weakref.ref(packed), self._annotate(tensor), time, created))

    def add_plan(self) -> None:
        """Called after each plan of a scope."""
        self.plan_times.append(_next_sequence_nr())

    def next_time(self) -> int:
        """Returns the number that the next node gets."""
        return _next_sequence_nr()

    def drop_recipes(self) -> None:
        """Drops unused recipes, which hold tensors. The scope holds the observer."""
        self.unused_recipes.clear()

    def seen_tensors(self) -> list[SeenTensor]:
        """Returns those that are alive."""
        every = ((reference(), *rest) for reference, *rest in self._seen)
        return [SeenTensor(packed, *rest) for packed, *rest in every if packed is not None]

    def saved_memory(self, exclude: Iterable[Tensor] = ()) -> list[SavedMemory]:
        """Returns an entry for each storage or recipe of the saved tensors that are alive.

        Storages of the tensors `exclude` are left out.
        """
        excluded_storages = {0, *map(storage_id, exclude)}
        groups = self._group_by_memory(excluded_storages)
        kept = {key for key in groups if isinstance(key, int)}
        counted, found = kept | excluded_storages, []
        for key, readers in groups.items():
            saved = [(annotation, packed.unpack) for annotation, packed in readers]
            if isinstance(key, Recipe):
                found.append(_recomputed_memory(key, saved, kept, counted))
            else:
                found.append(_kept_memory(readers[0][1], saved))
        return found

    def _group_by_memory(
        self, excluded_storages: set[int]
    ) -> dict[Recipe | int, list[tuple[Any, PackedTensor]]]:
        """Returns the packed tensors that are alive by their recipe, or by the storage that they keep."""
        groups: dict[Recipe | int, list[tuple[Any, PackedTensor]]] = defaultdict(list)
        for packed, annotation, *_ in self.seen_tensors():
            state, key = packed.state, id(packed)
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
    every = recipe.in_topological_order()
    tensors = [
        tensor for one in every for tensor in map(_tensor_of, one.kept_operands()) if tensor is not None
    ]
    sizes = {storage_id(tensor): tensor.nbytes for tensor in tensors}
    inputs = sum(key in kept and size >= MIN_RECOMPUTE_BYTES for key, size in sizes.items())
    new_kept_bytes = sum(size for key, size in sizes.items() if key not in counted)
    counted.update(sizes)
    ops = list(dict.fromkeys(display_op_name(one.info.node_name) for one in every))
    reason = f"{'its' if len(ops) == 1 else 'the'} saved input{'s' if inputs > 1 else ''}"
    reason = f"recomputed by {', '.join(ops)} from {reason}"
    return SavedMemory(
        saved, reason, new_kept_bytes, recipe.nbytes, recipe.info.site, recipe.clear_cached_outputs
    )


def _tensor_of(operand: Any) -> Tensor | None:
    return operand.held_tensor() if isinstance(operand, PackedTensor) else operand.tensor


def _kept_memory(packed: PackedTensor, saved: list[tuple[Any, Callable[[], Tensor]]]) -> SavedMemory:
    """Returns the entry of a packed tensor that is kept, or replaced."""
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
        saved, packed.reason if info is None else info.reason or _reason_of(info.node_name), nbytes, 0
    )


def _reason_of(node_name: str) -> str:
    op, level = display_op_name(node_name), RECOMPUTE_RULES.get(node_name, (RecomputeLevel.EVERY_OP, None))[0]
    if level == RecomputeLevel.CHEAP:
        return f"an input of {op} is not kept"
    if level == RecomputeLevel.MATMULS:
        return f"the result of {op}: recomputed with matmuls=True, where it is no narrower than its input"
    return f"the result of {op}, which is not recomputed"
