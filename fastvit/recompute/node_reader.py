"""`NodeReader` reads a node of autograd's graph for a rule: the options and the operands of its op."""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

from torch import Tensor

from .environment import Environment
from .packed_tensor import PackedShape, PackedTensor, Pending, Recomputed
from .pins import PinnedTensor
from .policy import Policy
from .recipe import CallArgs, Operand, OutputInfo, Recipe, View
from .views import PASS_THROUGH_NODES, VIEW_RULES, as_signed, as_strided_in, as_strided_of_write
from .write_tracker import WriteTracker

LEAF_NODE = "torch::autograd::AccumulateGrad"
_REASON_UNSEEN_CALL = "the call was not seen"
REASON_SHARDED = "a parameter that FSDP has sharded again when the block ends"


def is_leaf_cast(node) -> bool:
    """Returns whether a node is the cast of a leaf, such as a weight under autocast."""
    producer = node.next_functions[0][0] if node.name() == "ToCopyBackward0" else None
    return producer is not None and producer.name() == LEAF_NODE


@functools.cache  # attribute look-ups are faster with interned names
def _saved_name(name: str) -> str:
    return sys.intern(f"_saved_{name}")


@functools.cache
def _raw_saved_name(name: str) -> str:
    return sys.intern(f"_raw_saved_{name}")


class NotRecomputable(Exception):
    """Raised when a tensor cannot be recomputed. The message, if there is one, is a reason in reports."""


class Planner(Protocol):
    """The methods of the planner that a reader calls."""

    policy: Policy
    tracker: WriteTracker

    def plan_output(self, info: OutputInfo) -> None: ...

    def find_operand(self, node: Any, num_ops_from_target: int) -> Operand: ...

    def find_rule(self, node_name: str) -> Any: ...

    def level_of(self, node_name: str) -> Any: ...

    def is_excluded(self, node_name: str) -> bool: ...

    def is_unsaved_matmul(self, node: Any) -> bool: ...

    def require_intact(self, operand: PackedTensor | PinnedTensor) -> PackedTensor | PinnedTensor: ...

    def require_unsharded(self, recipe: Recipe) -> Recipe: ...


class NodeReader:
    """Reads one node for a rule.

    Attributes:
        num_ops_from_target: number of ops between the node and the tensor that is to be recomputed.
        metadata: metadata of the node's output. Stored, because each read from the node makes a new object.
        flops: operations of a matmul for each element of the output; set by the rule.
        environment: environment in which the op ran; None if the op has saved no tensor.
    """

    __slots__ = ("environment", "flops", "info", "metadata", "node", "num_ops_from_target", "planner")

    def __init__(
        self, node, planner: Planner, info: OutputInfo | None, num_ops_from_target: int, metadata: Any
    ):
        self.node, self.planner, self.info, self.metadata = node, planner, info, metadata
        self.num_ops_from_target = num_ops_from_target
        self.flops = 0
        self.environment: Environment | None = None

    @property
    def policy(self) -> Policy:
        return self.planner.policy

    @property
    def edges(self):
        return self.node.next_functions

    def attribute(self, name: str):
        """Returns an option of the op, a value or a tuple."""
        return as_signed(getattr(self.node, _saved_name(name)))

    def saved_operand(self, name: str) -> Operand:
        """Returns an input that the op saved; None if the call had no such input."""
        return self.packed_operand(getattr(self.node, _raw_saved_name(name)).data)

    def packed_operand(self, packed: object, is_private: bool = False) -> Operand:
        """Returns the operand for what the pack hook returned for a tensor.

        Args:
            is_private: whether only the op knows the tensor, so that nobody writes to it.
        """
        if packed is None:
            return None
        if type(packed) is not PackedTensor:
            if isinstance(packed, Tensor) and packed.numel() == 1 and packed.grad_fn is None:
                return PinnedTensor(packed)  # a number, which autograd saves without hooks
            raise NotRecomputable("saved outside of the scope")
        if packed.environment is not None:
            self.environment = packed.environment
        if packed.pin is not None and not is_private:
            return packed.pin
        if type(packed.state) is Pending and packed.info is not None:
            self.planner.plan_output(packed.info)
        state = packed.state
        if type(state) is Recomputed:
            recipe = self.planner.require_unsharded(state.recipe)
            view = state.as_strided_in_base
            return recipe if view is None else View(recipe, ((as_strided_in, *view),))
        return self.planner.require_intact(packed)

    def size_of(self, name: str) -> tuple[int, ...]:
        """Returns the size of an input that the op saved."""
        packed = getattr(self.node, _raw_saved_name(name)).data
        if type(packed) is not PackedTensor:
            raise NotRecomputable
        return packed.size()

    def graph_operand(self, index: int) -> Operand:
        """Returns an input that requires a gradient, by the number of the edge to its node."""
        node, number = self.edges[index]
        views: tuple = ()
        while node is not None:
            if (view := VIEW_RULES.get(name := node.name())) is not None:
                views = (view(node, number), *views)
                node, number = node.next_functions[0]
            elif (write_view := as_strided_of_write(node)) is not None:
                views = (write_view, *views)
                node, number = node.next_functions[0]
            elif name in PASS_THROUGH_NODES:
                node, number = node.next_functions[number]
            else:
                break
        if node is None or number:
            raise NotRecomputable
        if name == LEAF_NODE:
            operand: Operand = self.pinned_leaf(node.variable)
        else:
            operand = self.planner.find_operand(node, self.num_ops_from_target + 1)
        if not views or operand is None:
            return operand
        if isinstance(operand, View):
            return View(operand.base, operand.views + views)
        return View(operand, views)

    def require_rules(self) -> None:
        """Raises NotRecomputable early for an input that no op saved, and whose rule has a higher level.

        Most residual sums have such a term, and the recipe of their other term may be long.
        """
        for node, _ in self.edges:
            while node is not None and node.name() in VIEW_RULES:
                node = node.next_functions[0][0]
            if node is not None and OutputInfo.find(node) is None and self.planner.is_excluded(node.name()):
                raise NotRecomputable

    def pinned_leaf(self, leaf: Tensor) -> Operand:
        """Returns the pin of a leaf that the op did not save, from the time when the op ran."""
        call = OutputInfo.of_node(self.node).call_args
        leaves = self.planner.tracker.find_pins(self.node) if call is None else call.leaves
        pinned = next((one for one in leaves if one.source is leaf), None)
        if pinned is None:
            raise NotRecomputable(_REASON_UNSEEN_CALL)
        return self.planner.require_intact(pinned)

    def operand(self, name: str, index: int) -> Operand:
        """Returns an input: that which the op saved as `name`, or else the input of the edge `index`."""
        packed = getattr(self.node, _raw_saved_name(name)).data
        if packed is None or type(packed) is PackedShape:  # the op has not saved the values
            return self.graph_operand(index)
        return self.packed_operand(packed)

    def call_args(self) -> CallArgs:
        """Returns the call observer's facts of the op's call."""
        call = OutputInfo.of_node(self.node).call_args
        if call is None:
            raise NotRecomputable(_REASON_UNSEEN_CALL)
        return call

    def bias(self, index: int) -> Operand:
        """Returns a bias, which the op has not saved: a leaf as it was when the op ran, or an op's output."""
        call: Any = OutputInfo.of_node(self.node).call_args
        if call is not None and call.bias is not None:
            return self.planner.require_intact(call.bias)
        if self.edges[index][0] is not None:
            return self.graph_operand(index)
        if call is None:
            raise NotRecomputable(_REASON_UNSEEN_CALL)
        return None

    def reader_of(self, node) -> NodeReader:
        """Returns a reader for another node of the same op call."""
        return NodeReader(node, self.planner, None, self.num_ops_from_target, node._input_metadata[0])
