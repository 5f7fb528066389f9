"""`record_step`: what one training forward made for its backward, by which a step is replayed on paper.

Time counts the nodes of autograd's graph in the order in which the forward made them. The backward runs the
node with the highest number first, so its times go on from the last node of the forward to the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .masks import BitMask
from .observer import SavedTensorObserver, SeenTensor
from .packed_tensor import Kept, PackedTensor, Recomputed
from .pins import PinnedTensor
from .policy import OpSite, RecomputeLevel, display_op_name
from .recipe import OutputInfo, Recipe, base_of
from .recompute_rules import RECOMPUTE_RULES
from .storage import storage_id
from .views import PASS_THROUGH_NODES


@dataclass(eq=False)
class Value:
    """Memory that ops of a forward have saved, or the output of an op that a recipe repeats.

    Attributes:
        nbytes: of the memory.
        created: when the forward made it.
        name: of the op that made it.
        site: by which a policy chooses to recompute it; None where it is kept in any case, or never kept.
        uses: when ops saved it, in order. Empty where only recipes read it.
        operands: what its op reads, of the values that may be recomputed.
        pinned_bytes: of tensors that a recipe holds and no op has saved, such as a mask of attention.
        mask_bytes: of the bit mask that stays in place of it; 0 where it is recomputed.
        bytes_moved: bytes that its op reads and writes.
        flops: of its matrix product, in `dtype`.
        level: the lowest one that repeats its op.
        owner: what the observer annotated when it was saved first.
    """

    nbytes: int
    created: int
    name: str = ""
    site: OpSite | None = None
    uses: list[int] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    pinned_bytes: int = 0
    mask_bytes: int = 0
    bytes_moved: int = 0
    flops: int = 0
    dtype: torch.dtype | None = None
    level: RecomputeLevel = RecomputeLevel.CHEAP
    owner: Any = None

    @property
    def is_choice(self) -> bool:
        """Whether a policy can keep it or recompute it."""
        return self.site is not None and bool(self.uses)


class Gradient(NamedTuple):
    """The bytes of a gradient, and when the backward holds it first and last."""

    nbytes: int
    first: int
    last: int


@dataclass
class StepRecord:
    """What a training forward made for its backward.

    Attributes:
        values: in the order in which the forward made them.
        length: nodes of the forward.
        plans: the last node before each plan of a scope, by which it dropped what is recomputed.
        gradients: of activations, and of parameters while their nodes run.
        weight_gradients: of parameters, from the time that makes them to the end of the step.
        result_bytes: of what the forward returned, and no op has saved.
    """

    values: list[Value]
    length: int
    plans: list[int]
    gradients: list[Gradient]
    weight_gradients: list[Gradient]
    result_bytes: int


def record_step(
    observer: SavedTensorObserver, results: Iterable[Tensor], exclude: Iterable[Tensor] = ()
) -> StepRecord:
    """Returns the record of a forward that has just ended, and whose graph is alive.

    Args:
        observer: of the forward, whose policy recomputes all that can be.
        results: of the forward.
        exclude: tensors whose memory does not count, such as parameters.
    """
    results, first = list(results), observer.first_time
    length = max(observer.next_time() - first, 1)
    builder = _ValueBuilder(first, {0, *map(storage_id, exclude)})
    seen = observer.seen_tensors()
    for recipe in (
        *observer.unused_recipes,
        *(one.packed.state.recipe for one in seen if isinstance(one.packed.state, Recomputed)),
    ):
        builder.add_recipe(recipe)
    observer.drop_recipes()
    for one in seen:
        builder.add_saved(one)
    values = sorted(builder.finish(), key=lambda value: value.created)
    plans = [time - first - 1 for time in observer.plan_times]
    saved = builder.saved_storages()
    sizes = {storage_id(one): _nbytes_of_storage(one) for one in results if storage_id(one) not in saved}
    return StepRecord(values, length, plans, *_find_gradients(results, first, length), sum(sizes.values()))


def _nbytes_of_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if storage_id(tensor) and not tensor.is_nested else 0


class _ValueBuilder:
    """Makes values of recipes and of packed tensors.

    Args:
        first: the number of the first node.
        others: storages that do not count.
    """

    def __init__(self, first: int, others: set[int]):
        self._first, self._excluded_storages = first, others
        self._value_of_info: dict[OutputInfo, Value] = {}
        self._value_of_memory: dict[int, Value] = {}  # by the storage, or the packed tensor
        self._operand_infos: list[tuple[Value, list[OutputInfo]]] = []

    def add_recipe(self, recipe: Recipe) -> None:
        if recipe.info not in self._value_of_info:
            for one in recipe.in_topological_order(skip=lambda one: one.info in self._value_of_info):
                self._add_op(one)

    def _add_op(self, recipe: Recipe) -> None:
        info, moved, flops = recipe.info, recipe.bytes_moved, recipe.flops
        for inner in recipe.operand_recipes:
            if inner.info.as_strided_args is None:  # whose costs the recipe's have
                moved, flops = moved - inner.bytes_moved, flops - inner.flops
        bases = [base_of(operand) for operand in recipe.operands]
        pins = [base.tensor for base in bases if isinstance(base, PinnedTensor) and not base.is_copy]
        level = RECOMPUTE_RULES.get(info.node_name, (RecomputeLevel.EVERY_OP, None))[0]
        value = Value(
            recipe.nbytes,
            recipe.sequence_nr - self._first,
            display_op_name(info.node_name),
            info.site,
            pinned_bytes=sum(
                one.nbytes
                for one in pins
                if one is not None and storage_id(one) not in self._excluded_storages
            ),
            bytes_moved=max(moved, 0),
            flops=max(flops, 0),
            dtype=recipe.dtype,
            level=RecomputeLevel.EVERY_OP if pins else level,
        )
        read = [base for base in bases if isinstance(base, (Recipe, PackedTensor))]
        self._operand_infos.append((value, [base.info for base in read if base.info is not None]))
        self._value_of_info[info] = value

    def add_saved(self, one: SeenTensor) -> None:
        packed, state = one.packed, one.packed.state
        value = self._value_of_info.get(packed.info) if packed.info is not None else None
        if value is None and isinstance(state, Kept):
            if (key := storage_id(state.tensor)) in self._excluded_storages:
                return
            value = self._value_of_memory.get(key)
            if value is None:
                name = display_op_name(packed.info.node_name) if packed.info is not None else packed.reason
                value = Value(_nbytes_of_storage(state.tensor), one.created - self._first, name)
                self._value_of_memory[key] = value
        elif value is None:
            assert not isinstance(state, (Kept, Recomputed))
            value = Value(state.storage_nbytes, one.created - self._first, "packed by hooks around the scope")
            if isinstance(state.replacement, BitMask):
                value.mask_bytes, value.name = state.replacement.packed.nbytes, state.replacement.reason
                value.site, value.bytes_moved = packed.mask_site, value.nbytes
            self._value_of_memory[id(packed)] = value
        if not value.uses:
            value.owner = one.annotation
        value.created = min(value.created, one.created - self._first)
        value.uses.append(one.time - self._first)

    def saved_storages(self) -> set[int]:
        """Returns those of the saved tensors that have no recipe."""
        return {*self._value_of_memory}

    def finish(self) -> list[Value]:
        for value, infos in self._operand_infos:
            value.operands = [self._value_of_info[info] for info in infos if info in self._value_of_info]
        every = [*self._value_of_info.values(), *self._value_of_memory.values()]
        for value in every:
            value.created = max(value.created, 0)  # an input of the model
            value.uses.sort()
        return every


_RESHAPES = "View ReshapeAlias Alias Permute Transpose T Unsqueeze Squeeze UnsafeView Clone Add"
# Nodes that return the gradient that they get, or a view of it.
_ALIASES = {*(f"{name}Backward0" for name in _RESHAPES.split()), "SqueezeBackward1", *PASS_THROUGH_NODES}


def _find_gradients(results: list[Tensor], start: int, length: int) -> tuple[list[Gradient], list[Gradient]]:
    """Returns the gradients that the backward holds, by the shapes in autograd's graph; those of weights."""
    times: dict[Any, int] = {}
    waiting = [one.grad_fn for one in results if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in times and 0 <= (time := node._sequence_nr() - start) < length:
            times[node] = time
            waiting += [after for after, _ in node.next_functions if after is not None]
    end = 2 * length - 1
    found: list[list[int]] = []  # bytes, first and last
    of_weights: dict[Parameter, Gradient] = {}
    held: dict[Any, list[list[int]]] = {}  # gradients of the output of a node, until it runs

    def add(nbytes: int, first: int, last: int) -> list[int]:
        found.append([nbytes, first, last])
        return found[-1]

    for one in results:
        if one.grad_fn in times:
            gradient = add(_nbytes_of_storage(one), length, end - times[one.grad_fn])
            held.setdefault(one.grad_fn, []).append(gradient)
    for node, time in sorted(times.items(), key=lambda item: -item[1]):
        now, own, name = end - time, held.pop(node, []), node.name()
        is_alias = name in _ALIASES and len(own) == 1
        for after, number in node.next_functions:
            if after is None:
                continue
            nbytes, is_cpu = _describe_gradient(after._input_metadata[number])
            if name == "ConvolutionBackward0" and is_cpu:
                # oneDNN computes a gradient in a layout of its own, and copies it, that of an input twice.
                add(nbytes if after not in times else 2 * nbytes, now, now)
            if after not in times:  # a parameter
                if isinstance(weight := getattr(after, "variable", None), Parameter):
                    of_weights.setdefault(weight, Gradient(weight.nbytes, now, end))
                if not is_alias:
                    add(nbytes, now, now)
                continue
            last, others = end - times[after], held.setdefault(after, [])
            same = next((one for one in others if one[0] == nbytes), None)
            if same is not None:  # autograd adds to it in place
                same[2] = max(same[2], last)
                if not is_alias:
                    add(nbytes, now, now)
            elif is_alias and own[0][0] == nbytes:
                own[0][2] = max(own[0][2], last)
                others.append(own[0])
            else:
                others.append(add(nbytes, now, last))
    return [Gradient(*one) for one in found], list(of_weights.values())


def _describe_gradient(metadata: Any) -> tuple[int, bool]:
    """Returns the bytes of the gradient of a node's output, and whether it lies on the CPU."""
    if metadata.is_cpp_nested_tensor or not all(type(size) is int for size in metadata.shape):
        return 0, False  # nested tensors have no size that is known
    return math.prod(metadata.shape) * metadata.dtype.itemsize, metadata.device.type == "cpu"
