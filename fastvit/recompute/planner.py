"""One pass over what a block has saved, in the order of the graph: keep, or rebuild by a recipe.

Recipes are found by walking autograd's graph from a tensor to its inputs, and shared by all that read the
same result. A node has the op's name, the tensors that the op saved, and edges to the nodes that made its
inputs. With the same op on the same memory layout the result has the same bits. rules.py lists the ops that
are repeated. Views are followed to their base.

The graph lacks the value of padding, and inputs without gradient that the op did not save. A tensor that
depends on one of these is not rebuilt. calls.py notes the eps of a normalisation and a number that is added.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .packed_tensor import SMALLEST, Operand, Recipe, Record, Unread, Value, View, whole
from .policy import Policy, RecomputeLevel
from .views import VIEWS, of_unsafe_view, of_views, part, signed

LEAF = "torch::autograd::AccumulateGrad"
SHARDED = "a parameter that FSDP has sharded again when the block ends"
Rebuild = tuple[Callable[..., Tensor], tuple[Operand, ...]]  # an op and what goes into it
Rule = Callable[["Node"], Rebuild]
RULES: dict[str, tuple[int, Rule]] = {}  # and the least level, by the names of nodes; rules.py fills it


class Unknown(Exception):
    """A node lacks an argument of its op, or the argument is not kept."""


def rule_of(name: str, policy: Policy) -> Rule | None:
    level, rule = RULES.get(name, (RecomputeLevel.ACROSS_BLOCKS + 1, None))
    return rule if level <= policy.level else None


# Most bytes that a recipe moves for each byte of the tensor. In half precision and under autocast matrix
# products are so fast that long recipes show in a step's time: a LayerNorm and a cast move 7, a LayerScale, a
# residual sum and a cast 11, a rotary embedding and a cast 26. In float32 residual sums of BatchNorms, each
# made of the one before, move 5 more each.
_MOST_MOVED, _MOST_MOVED_IN_HALF = 24, 10
# Most rebuilt tensors on the way to one that is kept. Across blocks the sites of a policy cut the way.
_DEEPEST = {
    RecomputeLevel.CHEAP: 4,
    RecomputeLevel.MATMULS: 4,
    RecomputeLevel.EVERY_OP: 32,
    RecomputeLevel.ACROSS_BLOCKS: 1000,
}
_MOST_OPS = 40  # in one recipe
_LONGEST = 40  # consecutive ops whose results no op has saved


class Pass:
    """The decisions on `records`.

    Args:
        keeps_bases: a kept view holds its base, of which recipes may take the rest.
    """

    def __init__(self, policy: Policy, records: Iterable[Record], keeps_bases: bool):
        self.policy, self.keeps_bases = policy, keeps_bases
        self._waiting: dict[Value, list[Record]] = {}
        for record in records:
            assert record.value is not None
            self._waiting.setdefault(record.value, []).append(record)
        self._failed: set[Value] = set()  # to have a recipe
        self._at_hand: set[Recipe] = set()  # those whose parameters FSDP has not sharded again
        self._found: list[Recipe] = []  # so that none is looked for twice

    def run(self) -> None:
        # autograd numbers the nodes of a thread: what a node takes has a lower number. But an op in place
        # that saves a copy of its input makes the copy's node second.
        for value in sorted(self._waiting, key=lambda value: self._waiting[value][0].producer._sequence_nr()):
            self.settle(value)

    def settle(self, value: Value) -> None:
        """Decides on `value`, where that is not done."""
        if (records := self._waiting.pop(value, None)) is None:
            return
        first = records[0]
        if value.geometry is None:
            tensor = first.tensor
            value.geometry = first.base or (tensor.size(), tensor.stride(), tensor.storage_offset())
        recipe = None
        try:
            recipe = self._chosen(value, first)
        except Unknown as reason:
            value.reason = str(reason)
        for record in records:
            tensor, record.producer = record.tensor, None
            record.is_unfit |= not value.is_known
            # The values of a conjugate or negative view differ from those in memory.
            is_plain = record.base is None or not (tensor.is_neg() or tensor.is_conj())
            if recipe is not None and is_plain:
                recipe.adopt()
                if record.base is not None:
                    offset = tensor.storage_offset() - value.geometry[2]
                    geometry = tensor.size(), tensor.stride(), offset
                    record.geometry = None if geometry == (*value.geometry[:2], 0) else geometry
                record.recipe = recipe
                del record.tensor
            elif value.is_known and is_plain and (record.base is None or self.keeps_bases):
                value.records.append(weakref.ref(record))

    def _chosen(self, value: Value, first: Record) -> Recipe | None:
        """The recipe by which `value` is rebuilt; None where it is kept.

        Raises:
            Unknown: it is kept for this reason.
        """
        if not value.is_known:
            return None
        if math.prod(value.geometry[0]) * first.tensor.element_size() < SMALLEST:
            raise Unknown(f"it has less than {SMALLEST} bytes")
        if value.is_boundary and self.policy.level == RecomputeLevel.EVERY_OP:
            raise Unknown("it goes into a block, or comes out of one")
        if value.kept() is not None or rule_of(first.producer.name(), self.policy) is None:
            return None
        recipe = self._found_before(value) or self._recipe(first.producer, value, 0)
        self._refuse(value, recipe, first.in_half)
        return recipe

    def _refuse(self, value: Value, recipe: Recipe, in_half: bool) -> None:
        """Raises Unknown where the recipe costs too much, or the policy is against it."""
        policy, deepest = self.policy, _DEEPEST[self.policy.level]
        if recipe.depth >= deepest:
            raise Unknown(f"its recipe goes through more than {deepest} rebuilt tensors")
        if recipe.ops > _MOST_OPS and policy.level < RecomputeLevel.EVERY_OP:
            raise Unknown(f"its recipe has more than {_MOST_OPS} ops")
        share = recipe.moved / (recipe.size or 1)
        if (
            share > (_MOST_MOVED_IN_HALF if in_half else _MOST_MOVED)
            and policy.level < RecomputeLevel.MATMULS
        ):
            raise Unknown(f"its recipe moves {share:.0f} bytes for each that it frees")
        if against := policy.against(value.site):
            raise Unknown(against)

    def operand(self, node, distance: int) -> Operand:
        """The result of `node`, so many ops before the tensor that is rebuilt: what holds it, or a recipe.

        Raises:
            Unknown: there is neither.
        """
        value = Value.of(node)
        if not value.is_known:
            raise Unknown("it was written to in ways that the graph does not show")
        if value.records and (record := value.kept()) is not None:
            if record.base is None:
                return record
            return View(record, ((torch.as_strided, *record.base),))
        if (recipe := self._found_before(value)) is not None:
            return recipe
        if distance >= _LONGEST or value in self._failed:
            raise Unknown
        return self._recipe(node, value, distance)

    def _found_before(self, value: Value) -> Recipe | None:
        """The recipe of `value` that another reader has."""
        recipe = None if value.recipe is None else value.recipe()
        return None if recipe is None else self.at_hand(recipe)

    def at_hand(self, recipe: Recipe) -> Recipe:
        """`recipe`, which may be of another block.

        Raises:
            Unknown: FSDP has sharded a parameter that it reads, and gathers it too late for a reader outside
                of that block.
        """
        if recipe not in self._at_hand:
            if any(record.is_freed() for one in recipe.all() for record in one.records()):
                raise Unknown(SHARDED)
            self._at_hand.add(recipe)
        return recipe

    def _recipe(self, node, value: Value, distance: int) -> Recipe:
        """A new recipe for the result of `node`.

        Raises:
            Unknown: there is none; in this pass it is not looked for again.
        """
        rule = rule_of(node.name(), self.policy)
        try:
            if rule is None:
                raise Unknown
            output = node._input_metadata[0]
            if output.is_cpp_nested_tensor:  # it has no shape
                raise Unknown("it is nested")
            read = Node(node, self, value, distance)
            recipe = Recipe(value, *rule(read))
        except Unknown:
            self._failed.add(value)
            raise
        recipe.dtype = dtype = output.dtype
        recipe.size = size = math.prod(output.shape) * dtype.itemsize
        moved, flops = size, read.flops * (size // dtype.itemsize)
        for operand in recipe.operands:
            one = whole(operand)
            if isinstance(one, Recipe):
                moved += min(one.size, 2 * size)
                recipe.ops += one.ops
                if one.value.geometry is not None:  # rebuilt anyway, for another op that has saved it
                    recipe.depth = max(recipe.depth, one.depth + 1)
                else:
                    recipe.depth = max(recipe.depth, one.depth)
                    moved += one.moved
                    flops += one.flops
            elif one is not None:
                moved += min(one.nbytes(), 2 * size)
        recipe.moved, recipe.flops = moved, flops
        value.recipe = weakref.ref(recipe)
        self._at_hand.add(recipe)
        self._found.append(recipe)
        return recipe


class Node:
    """An autograd node, with the accessors that rules use."""

    __slots__ = ("distance", "flops", "node", "search", "value")

    def __init__(self, node, search: Pass, value: Value | None, distance: int):
        self.node, self.search, self.value, self.distance = node, search, value, distance
        self.flops = 0  # per element of the result, of a matrix product

    @property
    def policy(self) -> Policy:
        return self.search.policy

    @property
    def edges(self):
        return self.node.next_functions

    def metadata(self):
        return self.node._input_metadata[0]

    def number(self, name: str):
        """An option of the op, or several."""
        return signed(getattr(self.node, f"_saved_{name}"))

    def has(self, name: str) -> bool:
        """Whether the op has saved this input."""
        packed = getattr(self.node, f"_raw_saved_{name}").data
        return packed is not None and type(packed) is not Unread

    def saved(self, name: str) -> Operand:
        """An input that the op saved; None where the op did not get it."""
        return self.packed(getattr(self.node, f"_raw_saved_{name}").data)

    def packed(self, packed: object) -> Operand:
        """What an op of this scope has packed."""
        if packed is None:
            return None
        if type(packed) is not Record:
            if isinstance(packed, Tensor) and packed.numel() == 1 and packed.grad_fn is None:
                return Record.of(packed)
            raise Unknown("saved outside of the scope")
        if packed.producer is not None and packed.value is not None:
            self.search.settle(packed.value)
        if packed.recipe is not None:
            recipe = self.search.at_hand(packed.recipe)
            return recipe if packed.geometry is None else View(recipe, ((part, *packed.geometry),))
        if not packed.is_intact():
            raise Unknown("an input was written to")
        if packed.is_freed():
            raise Unknown(SHARDED)
        return packed

    def size_of(self, name: str) -> torch.Size:
        """The size of an input that the op saved."""
        packed = getattr(self.node, f"_raw_saved_{name}").data
        if type(packed) is not Record:
            raise Unknown
        if packed.recipe is None:
            return packed.tensor.shape
        geometry = packed.geometry or packed.recipe.value.geometry
        return geometry[0]

    def edge(self, index: int) -> Operand:
        """An input that requires a gradient."""
        node, number = self.edges[index]
        views: tuple = ()
        while node is not None and (view := VIEWS.get(name := node.name())) is not None:
            views = (view(node, number), *views)
            node, number = node.next_functions[0]
        if node is None or number:
            raise Unknown
        operand = self.leaf(node.variable) if name == LEAF else self.search.operand(node, self.distance + 1)
        if not views or operand is None:
            return operand
        return (
            View(operand.base, operand.views + views) if isinstance(operand, View) else View(operand, views)
        )

    def leaf(self, tensor: Tensor) -> Record:
        """A copy of a leaf, which may be written to before the backward, since the op has not saved it."""
        is_small = tensor.nbytes <= SMALLEST // 2 or tensor.numel() * 64 <= math.prod(self.metadata().shape)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_small:
            raise Unknown
        if Record.of(tensor).is_freed():
            raise Unknown(SHARDED)
        return Record.of(tensor.detach().clone())

    def input(self, name: str, index: int) -> Operand:
        return self.saved(name) if self.has(name) else self.edge(index)

    def noted(self) -> tuple[Any, Tensor | None]:
        """The eps or the number of the call, and its bias where that has no gradient."""
        call = Value.of(self.node).call
        if call is None:
            raise Unknown("the call was not seen")
        return call

    def bias(self, index: int) -> Operand:
        if self.edges[index][0] is not None:
            return self.edge(index)
        bias = self.noted()[1]
        return None if bias is None else Record.of(bias)

    def behind(self, node) -> Node:
        return Node(node, self.search, None, self.distance)

    def is_residual(self) -> bool:
        """Whether this sum has two terms of its shape, one a matrix product that is not kept."""
        shape = self.metadata().shape
        terms = [node for node, _ in self.edges]
        if any(node is None or node._input_metadata[0].shape != shape for node in terms):
            return False
        return any(map(self._is_unsaved_product, terms))

    @staticmethod
    def _is_unsaved_product(node) -> bool:
        node = of_views(node)
        if (
            node is None
            or RULES.get(of_unsafe_view(node).name(), (RecomputeLevel.CHEAP, None))[0]
            != RecomputeLevel.MATMULS
        ):
            return False
        return Value.of(node).kept() is None
