"""What scopes have decided, for those who measure and check it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .masks import Mask
from .packed_tensor import SMALLEST, Recipe, Record
from .planner import RULES
from .policy import OpSite, RecomputeLevel, plain


@dataclass(frozen=True)
class SavedMemory:
    """On tensors that ops have saved: those that one recipe makes, or that have one memory.

    Attributes:
        saved: for each of them, what was noted when it was saved, and the function that unpacks it.
        reason: why it is kept, or the ops that rebuild it.
        kept: bytes that stay in memory, of which other decisions do not count any.
        freed: bytes that do not.
        site: whose result is rebuilt; None where it is kept.
        moved: bytes that rebuilding reads and writes.
        flops: of its matrix products.
        forget: drops what unpacking has made.
    """

    saved: list[tuple[Any, Callable[[], Tensor]]]
    reason: str
    kept: int
    freed: int
    site: OpSite | None = None
    moved: int = 0
    flops: int = 0
    forget: Callable[[], None] = lambda: None


class SavedTensorObserver:
    """Sees what ops save. Holds neither the tensors nor their records.

    Args:
        note: returns what is to be noted of a tensor.
    """

    def __init__(self, note: Callable[[Tensor], Any]):
        self._note = note
        self._records: list[tuple[weakref.ref[Record], Any]] = []

    def add(self, record: Record, tensor: Tensor) -> None:
        self._records.append((weakref.ref(record), self._note(tensor)))

    def decisions(self, besides: Iterable[Tensor] = ()) -> list[SavedMemory]:
        """The decisions on what is still saved, but not on the memory of the tensors `besides`."""
        others = {0, *map(_address, besides)}
        records: dict[Recipe | int, list[tuple[Any, Record]]] = defaultdict(list)  # an int for kept memory
        for reference, note in self._records:
            if (record := reference()) is not None:
                key = record.recipe or _address(record.tensor)
                if key not in others:
                    records[key].append((note, record))
        kept = {key for key in records if isinstance(key, int)}
        counted, found = kept | others, []
        for recipe, readers in records.items():
            saved = [(note, record.unpack) for note, record in readers]
            if isinstance(recipe, int):
                found.append(SavedMemory(saved, *_kept(readers[0][1])))
                continue
            tensors = [record.tensor for one in recipe.all() for record in one.records()]
            sizes = {_address(tensor): tensor.nbytes for tensor in tensors}
            inputs = sum(address in kept and size >= SMALLEST for address, size in sizes.items())
            own = sum(size for address, size in sizes.items() if address not in counted)
            counted.update(sizes)
            ops = list(dict.fromkeys(plain(one.value.name) for one in recipe.all()))
            reason = f"{'its' if len(ops) == 1 else 'the'} saved input{'s' if inputs > 1 else ''}"
            reason, value = f"recomputed by {', '.join(ops)} from {reason}", recipe.value
            price = recipe.moved, recipe.flops
            found.append(SavedMemory(saved, reason, own, recipe.size, value.site, *price, recipe.forget))
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


def _kept(record: Record) -> tuple[str, int, int]:
    """Why a record keeps its tensor; kept bytes, and freed bytes."""
    nbytes, stand_in, value = record.tensor.untyped_storage().nbytes(), record.stand_in, record.value
    if isinstance(stand_in, Mask):
        return stand_in.reason, stand_in.packed.nbytes, nbytes - stand_in.packed.nbytes
    if stand_in is not None:
        return "handed on to the saved-tensor hooks around", nbytes, 0
    if value is None:
        return record.reason, nbytes, 0
    op, level = plain(value.name), RULES.get(value.name, (RecomputeLevel.EVERY_OP, None))[0]
    reason = f"the result of {op}, which is not repeated"
    if level == RecomputeLevel.CHEAP:
        reason = f"an input of {op} is not kept"
    elif level == RecomputeLevel.MATMULS:
        reason = f"the result of {op}: rebuilt with products=True, where it is no narrower than its input"
    return value.reason or reason, nbytes, 0
