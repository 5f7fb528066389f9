"""Reads from autograd's graph the op that made a tensor, and its inputs.

A node has the op's name, the tensors that the op saved, and edges to the nodes that made its inputs. With the
same op on the same memory layout the result has the same bits. rules.py lists the ops that are repeated,
those with little arithmetic; the results of other ops are never rebuilt. Views are followed to their base.

The graph lacks a number that was added, the value of padding, and inputs without gradient that the op did not
save. A tensor that depends on one of these is not rebuilt. calls.py notes the eps of a normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .kept import SMALLEST, Kept, Unread
from .policy import Policy
from .saved import Recipe
from .values import ABSENT, CALL, VALUE, Argument, Copied, Ingredient, Rebuild, Saved, Unknown, Value, View
from .views import VIEWS, of_unsafe_view, of_views, signed

LEAF = "torch::autograd::AccumulateGrad"
Rule = Callable[["Node"], Rebuild]
RULES: dict[str, Rule] = {}  # by the names of nodes; rules.py fills it
PRODUCTS: dict[str, Rule] = {}  # likewise, with products=True
ATTENTION: dict[str, Rule] = {}  # likewise, where a budget asks for it
_LONGEST = 12  # consecutive ops whose results no op has saved


def rule_of(name: str, policy: Policy) -> Rule | None:
    rule = RULES.get(name)
    if rule is None and policy.products:
        rule = PRODUCTS.get(name) or (ATTENTION.get(name) if policy.attention else None)
    return rule


def value_of(node, policy: Policy, like: Tensor | None = None, level: int = 0) -> Value:
    """The value that `node` made. `like` is the whole tensor, where it is available."""
    metadata = node.metadata
    value = metadata.get(VALUE)
    if value is None:
        value = metadata[VALUE] = Value()
        value.name = of_unsafe_view(node).name()
        if like is not None:
            value.dtype, value.size = like.dtype, like.nbytes
        else:
            made = node._input_metadata[0]
            if made.is_cpp_nested_tensor:  # it has no shape
                return value
            value.dtype = made.dtype
            value.size = math.prod(made.shape) * value.dtype.itemsize
        rule = rule_of(node.name(), policy)
        if rule is not None and level < _LONGEST:
            try:
                read = Node(node, policy, like, level)
                value.function, value.arguments = rule(read)
                if read.flops:
                    value.flops = read.flops * (value.size // value.dtype.itemsize)
            except Unknown as reason:
                value.unknown, value.lasts = str(reason), reason.lasts
    return value


def is_lost(node, policy: Policy) -> bool:
    """Whether `node` made a result without a rule, or a view of one, that no op has saved so far."""
    node = of_views(node)
    if node is None or (name := of_unsafe_view(node).name()) == LEAF or rule_of(name, policy) is not None:
        return False
    value = node.metadata.get(VALUE)
    return value is None or (value.function is None and value.kept() is None)


class Node:
    """An autograd node, with the accessors that rules use."""

    __slots__ = ("flops", "level", "like", "node", "policy")

    def __init__(self, node, policy: Policy, like: Tensor | None, level: int):
        self.node = node
        self.policy = policy
        self.flops = 0  # per element of the result, of a matrix product
        self.like = like
        self.level = level

    @property
    def edges(self):
        return self.node.next_functions

    def number(self, name: str):
        """An option of the op, or several."""
        return signed(getattr(self.node, f"_saved_{name}"))

    def saved(self, name: str) -> Argument | None:
        """An input that the op saved; None where it saved nothing, or only the size is left."""
        packed = getattr(self.node, f"_raw_saved_{name}").data
        return None if packed is None or type(packed) is Unread else self.packed(packed)

    def size_of(self, name: str) -> torch.Size:
        """The size of an input that the op saved."""
        packed = getattr(self.node, f"_raw_saved_{name}").data
        if type(packed) not in (Kept, Recipe):
            raise Unknown
        return packed.tensor.shape if type(packed) is Kept else packed.geometry[0]

    def packed(self, packed: object) -> Argument:
        """What an op of this scope has packed."""
        if type(packed) is Kept:
            return Saved(packed)
        if type(packed) is Recipe:
            return View(packed.value, ((torch.as_strided, *packed.geometry),))
        if packed is None:
            return ABSENT
        if isinstance(packed, Tensor) and packed.numel() == 1 and packed.grad_fn is None:
            return Copied(Kept(packed))
        raise Unknown("saved outside of the scope")

    def is_residual(self) -> bool:
        """Whether this sum has two terms of its shape, one a matrix product that no op has saved so far."""
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

    def edge(self, index: int) -> Argument:
        """An input that requires a gradient."""
        node, number = self.edges[index]
        views: tuple = ()
        while node is not None and (view := VIEWS.get(name := node.name())) is not None:
            views = (view(node, number), *views)
            node, number = node.next_functions[0]
        if node is None or number:
            raise Unknown
        if name == LEAF:
            value: Value | Ingredient = self.leaf(node.variable)
        else:
            value = node.metadata.get(VALUE) or value_of(node, self.policy, None, self.level + 1)
        return View(value, views) if views else value

    def leaf(self, tensor: Tensor) -> Copied:
        """A copy of a leaf, which may be written to before the backward, since the op has not saved it."""
        is_small = tensor.nbytes <= SMALLEST // 2 or tensor.numel() * 64 <= math.prod(self.metadata().shape)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_small:
            raise Unknown
        if Kept(tensor).is_freed():
            raise Unknown("a parameter that is sharded now")
        return Copied(Kept(tensor.detach().clone()))

    def noted(self) -> tuple[float | None, Tensor | None]:
        """The eps of the call, and its bias where that has no gradient."""
        noted = self.node.metadata.get(CALL)
        if noted is None:
            raise Unknown("the call was not seen")
        return noted

    def bias(self, index: int) -> Argument:
        if self.edges[index][0] is not None:
            return self.edge(index)
        bias = self.noted()[1]
        return ABSENT if bias is None else Copied(Kept(bias))

    def input(self, name: str, index: int) -> Argument:
        return self.saved(name) or self.edge(index)

    def behind(self, node) -> Node:
        return Node(node, self.policy, None, self.level)

    def metadata(self):
        return self.node._input_metadata[0]
