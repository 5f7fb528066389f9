"""`StepRecord`: the values that one training forward made for its backward, by which a step is replayed on paper.

Time counts the nodes of autograd's graph in the order in which the forward made them. The backward runs them
in the opposite order: autograd takes the node with the highest number that is ready.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .observer import SavedTensorObserver
from .packed_tensor import Kept, PackedTensor, Recomputed, Replaced
from .masks import BitMask
from .policy import OpSite, RecomputeLevel
from .recipe import OutputInfo, Recipe, base_of
from .recompute_rules import RECOMPUTE_RULES
from .storage import storage_id
from .views import PASS_THROUGH_NODES, VIEWS


@dataclass(eq=False)
class Value:
    """Memory that ops of the forward have saved, or the result of an op that a recipe repeats.

    Attributes:
        nbytes: of it.
        created: when the forward made it.
        site: by which a policy chooses it; None where it is always kept, or never.
        uses: when ops saved it. Empty where only recipes read it.
        operands: what its op reads, of those values that may be gone.
        kept_bytes: what stays where it is dropped, such as a bit mask.
        moved: bytes that its op reads and writes.
        flops: of its matrix product.
        level: the lowest one that repeats its op.
        owner: whose forward saved it first.
    """

    nbytes: int
    created: int
    site: OpSite | None = None
    uses: list[int] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    kept_bytes: int = 0
    moved: int = 0
    flops: int = 0
    level: RecomputeLevel = RecomputeLevel.CHEAP
    owner: Any = None
    name: str = ""


@dataclass
class StepRecord:
    """
    Attributes:
        values: in the order of their creation.
        length: of the forward, in nodes.
        plans: when blocks ended.
        gradients: of activations: for each its bytes, and the times between which the backward holds it.
        result_bytes: of what the forward returned.
    """

    values: list[Value]
    length: int
    plans: list[int]
    gradients: list[tuple[int, int, int]]
    result_bytes: int


def record_step(
    observer: SavedTensorObserver, results: Iterable[Tensor], besides: Iterable[Tensor] = ()
) -> StepRecord:
    results = list(results)
    first = observer.first_time
    builder = _Builder(first, {0, *map(storage_id, besides)})
    for recipe in observer.unused_recipes:
        builder.value_of_recipe(recipe)
    saved = observer.alive()
    for packed, *_ in saved:
        if isinstance(packed.state, Recomputed):
            builder.value_of_recipe(packed.state.recipe)
    builder.resolve_operands()
    for packed, annotation, time, created in saved:
        builder.add_saved(packed, annotation, time - first, created - first)
    length = observer.last_time() - first + 1
    return StepRecord(
        sorted(builder.values.values(), key=lambda value: value.created),
        length,
        [time - first for time in observer.plan_times],
        _find_gradients(results, first, length),
        sum({storage_id(one): one.untyped_storage().nbytes() for one in results}.values()),
    )


class _Builder:
    def __init__(self, first: int, others: set[int]):
        self.first, self.others = first, others
        self.values: dict[Any, Value] = {}

    def value_of_recipe(self, recipe: Recipe) -> Value:
        if recipe.info not in self.values:
            for one in recipe.in_topological_order(skip=lambda one: one.info in self.values):
                self._add_recipe(one)
        return self.values[recipe.info]

    def _add_recipe(self, recipe: Recipe) -> None:
        moved, flops, operands = recipe.bytes_moved, recipe.flops, []
        level = (
            RECOMPUTE_RULES[recipe.info.node_name][0]
            if recipe.info.node_name in RECOMPUTE_RULES
            else RecomputeLevel.EVERY_OP
        )
        for base in map(base_of, recipe.operands):
            if isinstance(base, Recipe):
                operands.append(self.values[base.info])
                if base.info.as_strided_args is None:
                    moved, flops = moved - base.bytes_moved, flops - base.flops
            elif isinstance(base, PackedTensor):
                operands += [base]
        self.values[recipe.info] = Value(
            recipe.size,
            recipe.created - self.first,
            recipe.info.site,
            [],
            operands,
            0,
            moved,
            flops,
            level,
            name=recipe.info.node_name,
        )

    def resolve_operands(self) -> None:
        for value in self.values.values():
            value.operands = [
                found
                for one in value.operands
                if (found := one if isinstance(one, Value) else self.values.get(one.info or 0)) is not None
            ]

    def add_saved(self, packed: PackedTensor, annotation: Any, time: int, created: int) -> None:
        state = packed.state
        if isinstance(state, Recomputed):
            value = self.values[state.recipe.info]
        elif packed.info is not None and packed.info in self.values:
            value = self.values[packed.info]
        elif isinstance(state, Kept):
            key = storage_id(state.tensor)
            if key in self.others:
                return
            value = self.values.get(key)
            if value is None:
                value = self.values[key] = Value(state.tensor.untyped_storage().nbytes(), created)
        else:
            value = self.values[id(packed)] = Value(state.storage_nbytes, created)
            if isinstance(state.replacement, BitMask):
                value.kept_bytes = state.replacement.packed.nbytes
                value.site, value.moved = packed.mask_site, value.nbytes
        if value.owner is None:
            value.owner = annotation
            value.created = min(value.created, created)
        value.uses.append(time)


_ALIASES = {
    *(
        f"{name}Backward0"
        for name in (
            "View",
            "ReshapeAlias",
            "Alias",
            "Permute",
            "Transpose",
            "T",
            "Unsqueeze",
            "Squeeze",
            "Add",
            "Clone",
            "UnsafeView",
        )
    ),
    "SqueezeBackward1",
    *PASS_THROUGH_NODES,
}


def _find_gradients(results: list[Tensor], first: int, length: int) -> list[tuple[int, int, int]]:
    """Returns the gradients of activations: bytes, and the first and last time at which the backward holds them."""
    times: dict[Any, int] = {}
    waiting = [one.grad_fn for one in results if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in times and 0 <= (time := node._sequence_nr() - first) < length:
            times[node] = time
            waiting += [after for after, _ in node.next_functions if after is not None]
    end = 2 * length - 1
    found: list[list[int]] = []  # bytes, first, last
    held: dict[Any, list[list[int]]] = {}  # of the output of a node, until it runs
    for one in results:
        if one.grad_fn in times:
            found.append([one.nbytes, length, end - times[one.grad_fn]])
            held.setdefault(one.grad_fn, []).append(found[-1])
    for node, time in sorted(times.items(), key=lambda item: -item[1]):
        now, own = end - time, held.pop(node, [])
        is_alias = node.name() in _ALIASES and len(own) == 1
        for after, number in node.next_functions:
            if after is None:
                continue
            shape = after._input_metadata[number]
            nbytes = 0 if shape.is_cpp_nested_tensor else math.prod(shape.shape) * shape.dtype.itemsize
            if node.name() == "ConvolutionBackward0" and shape.device.type == "cpu":
                found.append([nbytes, now, now])  # oneDNN computes it in a layout of its own, and copies it
            if after not in times:
                if not is_alias:
                    found.append([nbytes, now, now])
                continue
            until, others = end - times[after], held.setdefault(after, [])
            same = [one for one in others if one[0] == nbytes]
            if same:  # the sum is in one of them
                same[0][2] = max(same[0][2], until)
                if not is_alias:
                    found.append([nbytes, now, now])
            elif is_alias and own[0][0] == nbytes:
                own[0][2] = max(own[0][2], until)
                others.append(own[0])
            else:
                found.append([nbytes, now, until])
                others.append(found[-1])
    return [(nbytes, first, last) for nbytes, first, last in found]
