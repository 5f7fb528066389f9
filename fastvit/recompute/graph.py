"""Reads from autograd's graph the op that made a tensor, and its inputs.

A node has the op's name, the tensors that the op saved, and edges to the nodes that made its inputs. With the
same op on the same memory layout the result has the same bits. rules.py lists the ops that are repeated.
Views are followed to their base.

The graph lacks the value of padding, and inputs without gradient that the op did not save. A tensor that
depends on one of these is not rebuilt. calls.py notes the eps of a normalisation and a number that is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .policy import ACROSS, CHEAP, PRODUCTS, Policy
from .record import SMALLEST, Recipe, Record, Source, Unread, Value, View
from .views import VIEWS, of_unsafe_view, of_views, part, signed

LEAF = "torch::autograd::AccumulateGrad"
SHARDED = "a parameter that FSDP has sharded again when the block ends"
Rebuild = tuple[Callable[..., Tensor], tuple[Source, ...]]  # an op and what goes into it
Rule = Callable[["Node"], Rebuild]
RULES: dict[str, tuple[int, Rule]] = {}  # and the least level, by the names of nodes; rules.py fills it


class Unknown(Exception):
    """A node lacks an argument of its op, or the argument is not kept."""


def rule_of(name: str, policy: Policy) -> Rule | None:
    level, rule = RULES.get(name, (ACROSS + 1, None))
    return rule if level <= policy.level else None


class Search(Protocol):
    """What a node asks of the pass that decides."""

    policy: Policy

    def settle(self, value: Value) -> None: ...
    def source(self, node: Any, level: int) -> Source: ...
    def at_hand(self, recipe: Recipe) -> Recipe: ...


class Node:
    """An autograd node, with the accessors that rules use."""

    __slots__ = ("flops", "level", "node", "search", "value")

    def __init__(self, node, search: Search, value: Value | None, level: int):
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
        call = Value.of(self.node).call
        if call is None:
            raise Unknown("the call was not seen")
        return call

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
        if node is None or RULES.get(of_unsafe_view(node).name(), (CHEAP, None))[0] != PRODUCTS:
            return False
        return Value.of(node).kept() is None
