"""`record_step` returns a record of one training forward, from which the memory of the step is computed.

Time counts the nodes of autograd's graph in the order in which the forward made them. The backward runs the
node with the highest number first, so the times of the backward continue in the reverse order: node n of
a forward of N nodes runs in the backward at time 2 N - 1 - n.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
    """Memory that ops of a forward have saved, or the output of an op that a recipe recomputes.

    Attributes:
        nbytes: bytes of the memory.
        created: time at which the forward made the value.
        name: name of the op that made the value.
        site: the op call by which a policy recomputes the value; None if no policy has the choice.
        uses: times at which ops saved the value, in order. Empty if only recipes read the value.
        operands: values that the op of this value reads, and that may be recomputed.
        pinned_bytes: bytes that a recipe holds and no op has saved, such as a mask of attention.
        mask_bytes: bytes of the bit mask that stays in place of the value; 0 if the value is recomputed.
        bytes_moved: bytes that the op reads and writes.
        flops: operations of a matmul, in `dtype`.
        level: the lowest level that recomputes the op.
        owner: the observer's annotation of the first saved tensor.
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
        """Whether a policy can keep the value or recompute it."""
        return self.site is not None and bool(self.uses)


class Gradient(NamedTuple):
    """The bytes of a gradient, and the first and last time at which the backward holds the gradient."""

    nbytes: int
    first: int
    last: int


@dataclass
class StepRecord:
    """A record of what a training forward made for its backward.

    Attributes:
        values: all values, in the order in which the forward made them.
        length: number of nodes of the forward.
        plans: the time of the last node before each plan of a scope. The plan drops what is recomputed.
        gradients: gradients of activations, and of parameters while their nodes run.
        weight_gradients: gradients of parameters, from their creation to the end of the step.
        result_bytes: bytes that the forward returned and no op has saved.
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
        observer: the observer of the forward, which ran with a policy that recomputes all that can be.
        results: the tensors that the forward returned.
        exclude: tensors whose memory does not count, such as parameters.
    """
    results, first_number = list(results), observer.first_time
    length = max(observer.next_time() - first_number, 1)
    builder = _ValueBuilder(first_number, {0, *map(storage_id, exclude)})
    saved_tensors = observer.seen_tensors()
    for recipe in (
        *observer.unused_recipes,
        *(one.packed.state.recipe for one in saved_tensors if isinstance(one.packed.state, Recomputed)),
    ):
        builder.add_recipe(recipe)
    observer.drop_recipes()
    for one in saved_tensors:
        builder.add_saved(one)
    values = sorted(builder.finish(), key=lambda value: value.created)
    plans = [time - first_number - 1 for time in observer.plan_times]
    saved = builder.saved_storages()
    sizes = {storage_id(one): _nbytes_of_storage(one) for one in results if storage_id(one) not in saved}
    return StepRecord(
        values, length, plans, *_find_gradients(results, first_number, length), sum(sizes.values())
    )


def _nbytes_of_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if storage_id(tensor) and not tensor.is_nested else 0


class _ValueBuilder:
    """Makes values of recipes and of packed tensors.

    Args:
        first_number: the sequence number of the forward's first node.
        excluded_storages: ids of storages that do not count.
    """

    def __init__(self, first_number: int, excluded_storages: set[int]):
        self._first_number, self._excluded_storages = first_number, excluded_storages
        self._value_of_info: dict[OutputInfo, Value] = {}
        self._value_of_memory: dict[int, Value] = {}  # by the id of the storage or of the packed tensor
        self._operand_infos: list[tuple[Value, list[OutputInfo]]] = []

    def add_recipe(self, recipe: Recipe) -> None:
        """Makes values of a recipe and of the recipes of its operands."""
        if recipe.info not in self._value_of_info:
            for one in recipe.in_topological_order(skip=lambda one: one.info in self._value_of_info):
                self._add_op(one)

    def _add_op(self, recipe: Recipe) -> None:
        info, bytes_moved, flops = recipe.info, recipe.bytes_moved, recipe.flops
        for operand_recipe in recipe.operand_recipes:
            if operand_recipe.info.as_strided_args is None:  # `add_operand_costs` has added its costs
                bytes_moved -= operand_recipe.bytes_moved
                flops -= operand_recipe.flops
        bases = [base_of(operand) for operand in recipe.operands]
        pins = [base.tensor for base in bases if isinstance(base, PinnedTensor) and not base.is_copy]
        level = RECOMPUTE_RULES.get(info.node_name, (RecomputeLevel.EVERY_OP, None))[0]
        value = Value(
            recipe.nbytes,
            recipe.sequence_nr - self._first_number,
            display_op_name(info.node_name),
            info.site,
            pinned_bytes=sum(
                one.nbytes
                for one in pins
                if one is not None and storage_id(one) not in self._excluded_storages
            ),
            bytes_moved=max(bytes_moved, 0),
            flops=max(flops, 0),
            dtype=recipe.dtype,
            level=RecomputeLevel.EVERY_OP if pins else level,
        )
        read = [base for base in bases if isinstance(base, (Recipe, PackedTensor))]
        self._operand_infos.append((value, [base.info for base in read if base.info is not None]))
        self._value_of_info[info] = value

    def add_saved(self, saved: SeenTensor) -> None:
        """Adds a saved tensor to its value. Makes a value if the tensor has no recipe."""
        packed, state = saved.packed, saved.packed.state
        value = self._value_of_info.get(packed.info) if packed.info is not None else None
        if value is None and isinstance(state, Kept):
            if (key := storage_id(state.tensor)) in self._excluded_storages:
                return
            value = self._value_of_memory.get(key)
            if value is None:
                has_node = packed.info is not None
                name = (
                    display_op_name(packed.info.node_name) if has_node else "tensors without an autograd node"
                )
                value = Value(_nbytes_of_storage(state.tensor), saved.created - self._first_number, name)
                self._value_of_memory[key] = value
        elif value is None:
            assert not isinstance(state, (Kept, Recomputed))
            value = Value(
                state.storage_nbytes, saved.created - self._first_number, "packed by hooks around the scope"
            )
            if isinstance(state.replacement, BitMask):
                value.mask_bytes, value.name = state.replacement.packed.nbytes, state.replacement.reason
                value.site, value.bytes_moved = packed.mask_site, value.nbytes
            self._value_of_memory[id(packed)] = value
        if not value.uses:
            value.owner = saved.annotation
        value.created = min(value.created, saved.created - self._first_number)
        value.uses.append(saved.time - self._first_number)

    def saved_storages(self) -> set[int]:
        """Returns the ids of the storages of saved tensors that have no recipe."""
        return {*self._value_of_memory}

    def finish(self) -> list[Value]:
        """Connects the values with their operands, and returns all values."""
        for value, infos in self._operand_infos:
            value.operands = [self._value_of_info[info] for info in infos if info in self._value_of_info]
        values = [*self._value_of_info.values(), *self._value_of_memory.values()]
        for value in values:
            value.created = max(value.created, 0)  # an input of the model is older than the forward
            value.uses.sort()
        return values


_ALIAS_OPS = "View ReshapeAlias Alias Permute Transpose T Unsqueeze Squeeze UnsafeView Clone Add"
# Nodes that return the gradient that they get, or a view of it.
_ALIAS_NODES = {*(f"{name}Backward0" for name in _ALIAS_OPS.split()), "SqueezeBackward1", *PASS_THROUGH_NODES}


def _find_gradients(
    results: list[Tensor], first_number: int, length: int
) -> tuple[list[Gradient], list[Gradient]]:
    """Returns the gradients that the backward holds, of activations and of weights, by the graph's shapes."""
    times = _find_node_times(results, first_number, length)
    backward = _BackwardReplay(times, length)
    for result in results:
        if result.grad_fn in times:
            backward.add_result(result)
    for node, _ in sorted(times.items(), key=lambda item: -item[1]):
        backward.run_node(node)
    gradients = [Gradient(one.nbytes, one.first, one.last) for one in backward.spans]
    return gradients, list(backward.weight_gradients.values())


def _find_node_times(results: list[Tensor], first_number: int, length: int) -> dict[Any, int]:
    """Returns the times of the forward's nodes on which the `results` depend."""
    times: dict[Any, int] = {}
    stack = [result.grad_fn for result in results if result.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in times and 0 <= (time := node._sequence_nr() - first_number) < length:
            times[node] = time
            stack += [producer for producer, _ in node.next_functions if producer is not None]
    return times


@dataclass
class _Span:
    """A `Gradient` whose last time is not known yet."""

    nbytes: int
    first: int
    last: int

    def extend(self, last: int) -> None:
        self.last = max(self.last, last)


class _BackwardReplay:
    """Follows gradients through autograd's graph, in the order in which the backward runs the nodes."""

    def __init__(self, times: dict[Any, int], length: int):
        self._times, self._length, self._end = times, length, 2 * length - 1
        # Node -> the gradients of its output, until the node runs.
        self._gradients_of: dict[Any, list[_Span]] = defaultdict(list)
        self.spans: list[_Span] = []
        self.weight_gradients: dict[Parameter, Gradient] = {}

    def _add(self, nbytes: int, first: int, last: int) -> _Span:
        self.spans.append(_Span(nbytes, first, last))
        return self.spans[-1]

    def add_result(self, result: Tensor) -> None:
        """Adds the gradient of a result, with which the backward begins."""
        node = result.grad_fn
        span = self._add(_nbytes_of_storage(result), self._length, self._end - self._times[node])
        self._gradients_of[node].append(span)

    def run_node(self, node: Any) -> None:
        """Adds the gradients that a node returns, and drops those that the node gets."""
        time, gradients = self._end - self._times[node], self._gradients_of.pop(node, [])
        is_convolution = node.name() == "ConvolutionBackward0"
        alias = gradients[0] if node.name() in _ALIAS_NODES and len(gradients) == 1 else None
        for producer, number in node.next_functions:
            if producer is None:
                continue
            nbytes, is_cpu = _describe_gradient(producer._input_metadata[number])
            if is_convolution and is_cpu:
                # oneDNN computes a gradient in another layout and copies it, that of an input twice.
                self._add(2 * nbytes if producer in self._times else nbytes, time, time)
            if producer in self._times:
                self._pass_gradient(producer, nbytes, time, alias)
                continue
            if isinstance(weight := getattr(producer, "variable", None), Parameter):
                self.weight_gradients.setdefault(weight, Gradient(weight.nbytes, time, self._end))
            if alias is None:
                self._add(nbytes, time, time)

    def _pass_gradient(self, producer: Any, nbytes: int, time: int, alias: _Span | None) -> None:
        """Passes a gradient to the node `producer`.

        Args:
            alias: the gradient of which the passed one is a view; None if it has memory of its own.
        """
        last, gradients = self._end - self._times[producer], self._gradients_of[producer]
        accumulated = next((one for one in gradients if one.nbytes == nbytes), None)
        if accumulated is not None:  # autograd adds in place to the gradient that came first
            accumulated.extend(last)
            if alias is None:
                self._add(nbytes, time, time)
        elif alias is not None and alias.nbytes == nbytes:
            alias.extend(last)
            gradients.append(alias)
        else:
            gradients.append(self._add(nbytes, time, last))


def _describe_gradient(metadata: Any) -> tuple[int, bool]:
    """Returns the bytes of the gradient of a node's output, and whether it lies on the CPU."""
    if metadata.is_cpp_nested_tensor or not all(type(size) is int for size in metadata.shape):
        return 0, False  # the size of a nested tensor, or a symbol, is not known
    return math.prod(metadata.shape) * metadata.dtype.itemsize, metadata.device.type == "cpu"
