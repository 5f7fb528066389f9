"""Reads from autograd's graph the op that made a tensor, and its inputs.

A node has the op's name, the tensors that the op saved, and edges to the nodes that made its inputs. With the
same op on the same memory layout the result has the same bits. rules.py lists the ops that are repeated.
Views are followed to their base.

The graph lacks the value of padding, and inputs without gradient that the op did not save. A tensor that
depends on one of these is not rebuilt. calls.py notes the eps of a normalisation and a number that is added.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .policy import Policy, plain
from .record import SMALLEST, Recipe, Record, Source, Unread, Value, View, whole
from .views import VIEWS, of_unsafe_view, of_views, signed

# Keys of what a scope notes in a node's metadata.
CALL = "fastvit.call"  # the eps or the number of the call, and its bias without gradient
VERSION = "fastvit.version"  # the version of the tensor that the node made
VALUE = "fastvit.value"  # its Value
BOUNDARY = "fastvit.boundary"  # that it goes into a block, or comes out of one

LEAF = "torch::autograd::AccumulateGrad"
SHARDED = "a parameter that FSDP has sharded again when the block ends"
Rebuild = tuple[Callable[..., Tensor], tuple[Source, ...]]  # an op and what goes into it
Rule = Callable[["Node"], Rebuild]
Waiting = dict[Value, tuple[Any, list[Record]]]  # a node's value, the node, and what has been saved of it
RULES: dict[str, Rule] = {}  # by the names of nodes; rules.py fills it
PRODUCTS: dict[str, Rule] = {}  # likewise, with products=True
DEEP: dict[str, Rule] = {}  # likewise, where a budget asks for it
_LONGEST, _LONGEST_DEEP = 12, 40  # consecutive ops whose results no op has saved


class Unknown(Exception):
    """A node lacks an argument of its op, or the argument is not kept."""


def rule_of(name: str, policy: Policy) -> Rule | None:
    rule = RULES.get(name)
    if rule is None and policy.products:
        rule = PRODUCTS.get(name) or (DEEP.get(name) if policy.deep else None)
    return rule


def why_kept(record: Record) -> str:
    """Why a record keeps its tensor."""
    value = record.value
    if value is None:
        return record.reason
    if value.reason:
        return value.reason
    op = plain(value.name)
    if value.name in PRODUCTS:
        return f"the result of {op}: rebuilt with products=True, where it is no narrower than its input"
    return (
        f"an input of {op} is not kept"
        if value.name in RULES
        else f"the result of {op}, which is not repeated"
    )


class Pass:
    """One pass over what has been saved, in the order of the graph: finds the recipes."""

    count = 0

    def __init__(self, policy: Policy, waiting: Waiting, decide: Callable[..., None]):
        Pass.count += 1
        self.number, self.policy, self.waiting, self.decide = Pass.count, policy, waiting, decide
        self.longest = _LONGEST_DEEP if policy.deep else _LONGEST
        self.found: list[Recipe] = []  # so that none is looked for twice

    def run(self) -> None:
        # autograd numbers the nodes of a thread: what a node takes has a lower number. But an op in place
        # that saves a copy of its input makes the copy's node second.
        for value in sorted(self.waiting, key=lambda value: self.waiting[value][0]._sequence_nr()):
            self.settle(value)

    def settle(self, value: Value) -> None:
        """Decides on `value`, where that is not done."""
        if (found := self.waiting.pop(value, None)) is not None:
            self.decide(self, value, *found)

    def source(self, node, level: int) -> Source:
        """The result of `node`: what holds it, or a recipe.

        Raises:
            Unknown: there is neither.
        """
        metadata = node.metadata
        value = metadata.get(VALUE)
        if value is None:
            value = metadata[VALUE] = Value()
        if not value.is_known:
            raise Unknown("it was written to in ways that the graph does not show")
        if value.records and (record := value.kept()) is not None:
            if record.base is None:
                return record
            return View(record, ((torch.as_strided, *record.base),))
        if (recipe := self.found_before(value)) is not None:
            return recipe
        if level >= self.longest or value.failed == self.number:
            raise Unknown
        return self.recipe(node, value, level)

    def found_before(self, value: Value) -> Recipe | None:
        """The recipe of `value` that another reader has."""
        recipe = None if value.recipe is None else value.recipe()
        return None if recipe is None else self.at_hand(recipe)

    def at_hand(self, recipe: Recipe) -> Recipe:
        """`recipe`, which may be of another block.

        Raises:
            Unknown: FSDP has sharded a parameter that it reads, and gathers it too late for a reader outside
                of that block.
        """
        if recipe.checked != self.number:
            if any(record.is_freed() for one in recipe.all() for record in one.records()):
                raise Unknown(SHARDED)
            recipe.checked = self.number
        return recipe

    def recipe(self, node, value: Value, level: int = 0) -> Recipe:
        """A new recipe for the result of `node`.

        Raises:
            Unknown: there is none; in this pass it is not looked for again.
        """
        rule = rule_of(name := node.name(), self.policy)
        value.name = name if name != "UnsafeViewBackward0" else of_unsafe_view(node).name()
        try:
            if rule is None:
                raise Unknown
            made = node._input_metadata[0]
            if made.is_cpp_nested_tensor:  # it has no shape
                raise Unknown("it is nested")
            read = Node(node, self, value, level)
            recipe = Recipe(value, *rule(read))
            recipe.checked = self.number
        except Unknown:
            value.failed = self.number
            raise
        recipe.dtype = dtype = made.dtype
        recipe.size = size = math.prod(made.shape) * dtype.itemsize
        moved, flops = size, read.flops * (size // dtype.itemsize)
        for source in recipe.sources:
            one = whole(source)
            if isinstance(one, Recipe):
                moved += min(one.size, 2 * size)
                recipe.ops += one.ops
                if one.value.nbytes:  # another op has saved it, and it is rebuilt for that op anyway
                    recipe.depth = max(recipe.depth, one.depth + 1)
                else:
                    recipe.depth = max(recipe.depth, one.depth)
                    moved += one.moved
                    flops += one.flops
            elif one is not None:
                moved += min(one.nbytes(), 2 * size)
        recipe.moved, recipe.flops = moved, flops
        value.recipe = weakref.ref(recipe)
        self.found.append(recipe)
        return recipe


class Node:
    """An autograd node, with the accessors that rules use."""

    __slots__ = ("flops", "level", "node", "search", "value")

    def __init__(self, node, search: Pass, value: Value | None, level: int):
        self.node, self.search, self.value, self.level = node, search, value, level
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

    def saved(self, name: str) -> Source:
        """An input that the op saved; None where the op did not get it."""
        return self.packed(getattr(self.node, f"_raw_saved_{name}").data)

    def packed(self, packed: object) -> Source:
        """What an op of this scope has packed."""
        if packed is None:
            return None
        if type(packed) is not Record:
            if isinstance(packed, Tensor) and packed.numel() == 1 and packed.grad_fn is None:
                return Record.of(packed)
            raise Unknown("saved outside of the scope")
        if packed.made is not None and packed.value is not None:
            self.search.settle(packed.value)
        if packed.recipe is not None:
            recipe = self.search.at_hand(packed.recipe)
            return (
                recipe if packed.geometry is None else View(recipe, ((torch.as_strided, *packed.geometry),))
            )
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

    def edge(self, index: int) -> Source:
        """An input that requires a gradient."""
        node, number = self.edges[index]
        views: tuple = ()
        while node is not None and (view := VIEWS.get(name := node.name())) is not None:
            views = (view(node, number), *views)
            node, number = node.next_functions[0]
        if node is None or number:
            raise Unknown
        source = self.leaf(node.variable) if name == LEAF else self.search.source(node, self.level + 1)
        if not views or source is None:
            return source
        return View(source.source, source.views + views) if isinstance(source, View) else View(source, views)

    def leaf(self, tensor: Tensor) -> Record:
        """A copy of a leaf, which may be written to before the backward, since the op has not saved it."""
        is_small = tensor.nbytes <= SMALLEST // 2 or tensor.numel() * 64 <= math.prod(self.metadata().shape)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_small:
            raise Unknown
        if Record.of(tensor).is_freed():
            raise Unknown(SHARDED)
        return Record.of(tensor.detach().clone())

    def input(self, name: str, index: int) -> Source:
        return self.saved(name) if self.has(name) else self.edge(index)

    def noted(self) -> tuple[Any, Tensor | None]:
        """The eps or the number of the call, and its bias where that has no gradient."""
        noted = self.node.metadata.get(CALL)
        if noted is None:
            raise Unknown("the call was not seen")
        return noted

    def bias(self, index: int) -> Source:
        if self.edges[index][0] is not None:
            return self.edge(index)
        bias = self.noted()[1]
        return None if bias is None else Record.of(bias)

    def behind(self, node) -> Node:
        return Node(node, self.search, None, self.level)

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
        if node is None or of_unsafe_view(node).name() not in PRODUCTS:
            return False
        value = node.metadata.get(VALUE)
        return value is None or value.kept() is None
