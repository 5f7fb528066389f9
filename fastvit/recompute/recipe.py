"""A `Recipe` is an op call that recomputes one tensor, once for all consumers of the tensor.

The operands of a recipe are packed tensors, pinned tensors, other recipes, and views of these. The node of an
op in autograd's graph has an `OutputInfo`, by which the consumers of an output find its recipe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .environment import Environment, current_environment, use_environment
from .packed_tensor import AsStridedArgs, PackedTensor
from .pins import OperandChanged, PinnedTensor
from .policy import OpSite, display_op_name, skip_key
from .storage import current_stream_id
from .views import skip_unsafe_view
from .weak_list import WeakList

_OUTPUT_INFO_KEY = "fastvit.output_info"  # key in an autograd node's metadata


class InPlaceCall(NamedTuple):
    """An op in place on a view, for which the graph shows only that a part of the base was written to."""

    write: Callable[[Tensor], Any]
    view: AsStridedArgs
    base: AsStridedArgs
    copies: WeakList[PackedTensor]  # copies of the view that the op saved before it wrote


class CallArgs(NamedTuple):
    """Facts of an op's call that the op's node lacks, from the call observer."""

    scalar: Any = None  # eps, or an added number
    bias: PinnedTensor | None = None
    leaves: tuple[PinnedTensor, ...] = ()  # operands that are leaves, and that the op did not save
    in_place: InPlaceCall | None = None


class OutputInfo:
    """Facts on the output of one autograd node. Stored in the node's metadata; holds no tensor but pins.

    Attributes that few outputs have are in a dictionary; their defaults are class attributes.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "as_strided_args",
        "block",
        "call_args",
        "node_name",
        "packed_tensors",
        "reason",
        "recipe",
        "site_number",
    )
    is_content_known = True  # False after a write to the memory that the graph does not show
    is_layout_known = True  # False after a cast to a given memory format, which the graph does not show
    expected_version: int | None = None  # version counter after the op; None is 0
    is_block_io = False  # whether the output is an input or output of a block

    def __init__(self, node_name: str) -> None:
        self.node_name = node_name
        self.recipe: weakref.ref[Recipe] | None = None
        self.block, self.site_number = "", 0  # where the output was saved first; 0 if nowhere
        self.as_strided_args: AsStridedArgs | None = None  # layout of the output; None if no op has saved it
        self.reason = ""  # why the output is kept
        self.call_args: CallArgs | None = None
        self.packed_tensors: WeakList[PackedTensor] = WeakList()  # the output, and views of it

    @property
    def site(self) -> OpSite | None:
        """Returns the site at which the output was saved first; None if no op saved it."""
        return OpSite(self.block, self.node_name, self.site_number) if self.site_number else None

    @staticmethod
    def find(node) -> OutputInfo | None:
        """Returns the facts on the output of `node`, or None if nothing is stored."""
        return node.metadata.get(_OUTPUT_INFO_KEY)

    @classmethod
    def of_node(cls, node) -> OutputInfo:
        """Returns the facts on the output of `node`; creates an object if there is none."""
        info = node.metadata.get(_OUTPUT_INFO_KEY)
        if info is None:
            info = node.metadata[_OUTPUT_INFO_KEY] = cls(skip_unsafe_view(node).name())
        return info


class Recipe:
    """An op call that recomputes the output of a node."""

    __slots__ = (
        "__weakref__",
        "bytes_moved",
        "depth",
        "dtype",
        "environment",
        "flops",
        "function",
        "info",
        "is_tracked",
        "nbytes",
        "num_consumers",
        "num_ops",
        "num_served",
        "operand_recipes",
        "operands",
        "output",
        "sequence_nr",
        "stream",
        "version",
    )

    def __init__(
        self,
        info: OutputInfo,
        function: Callable[..., Tensor],
        operands: tuple[Operand, ...],
        environment: Environment | None,
    ):
        self.info, self.function, self.operands, self.environment = info, function, operands, environment
        self.dtype: torch.dtype | None = None
        self.operand_recipes = tuple([one for one in map(base_of, operands) if type(one) is Recipe])
        self.output: Tensor | None = None  # cached until the last consumer has it
        self.num_consumers = 0  # number of packed tensors and recipes that read the output
        self.num_served = 0  # number of consumers that got the cached output
        self.stream, self.version = 0, 0  # stream and version counter of the cached output
        self.sequence_nr = 0  # the sequence number of the node
        self.is_tracked = False  # whether the write tracker knows the operands
        self.depth = 0  # recomputed tensors on the longest path to kept tensors
        self.num_ops = 1  # number of ops, with those of operand recipes
        self.nbytes = 0  # bytes of the output
        self.bytes_moved = 0  # bytes read and written, from tensors that ops have saved to the output
        self.flops = 0  # floating-point operations of matmuls

    def add_operand_costs(self, nbytes: int, flops: int) -> None:
        """Adds the costs of operand recipes to those of the op, whose output has `nbytes`."""
        self.nbytes, self.bytes_moved, self.flops = nbytes, nbytes, flops
        for base in map(base_of, self.operands):
            if base is None:
                continue
            self.bytes_moved += min(base.nbytes, 2 * nbytes)
            if isinstance(base, Recipe):
                self.num_ops += base.num_ops
                # The cost of a saved operand is not counted, because it is recomputed anyway.
                is_saved = base.info.as_strided_args is not None
                self.depth = max(self.depth, base.depth + is_saved)
                if not is_saved:
                    self.bytes_moved += base.bytes_moved
                    self.flops += base.flops

    def add_consumer(self) -> None:
        """Counts a consumer of the output. The first consumer makes the recipe a consumer of its operands."""
        if self.num_consumers == 0:
            for base in map(base_of, self.operands):
                if type(base) is PackedTensor:
                    base.is_recipe_operand = True
                elif type(base) is Recipe:
                    base.add_consumer()
        self.num_consumers += 1

    def is_computed(self) -> bool:
        """Returns whether the output is cached, unwritten, and of the current stream."""
        output = self.output
        return (
            output is not None
            and output._version == self.version
            and self.stream == current_stream_id(output)
        )

    def get_tensor(self) -> Tensor:
        """Returns the output to one of its consumers. Recipes of operands are computed first.

        Raises:
            RuntimeError: an operand is no longer as the op read it.
        """
        if not self.is_computed():
            recipes = self.in_topological_order(skip=Recipe.is_computed) if self.operand_recipes else [self]
            for number, recipe in enumerate(recipes):
                try:
                    recipe._compute()
                except OperandChanged as changed:
                    raise RuntimeError(_explain(changed, recipe, recipes[number:])) from None
        output = self.output
        assert output is not None
        self.num_served += 1
        if self.num_served >= self.num_consumers:  # a second backward with retain_graph recomputes it
            self.output, self.num_served = None, 0
        return output

    def _compute(self) -> None:
        tensors = [None if operand is None else operand.get_tensor() for operand in self.operands]
        environment = self.environment
        if environment is None or environment == current_environment(environment[0]):
            output = self.function(*tensors)
        else:
            with use_environment(environment):
                output = self.function(*tensors)
        if output.dtype is not self.dtype and self.dtype is not None:
            output = output.to(self.dtype)
        args = self.info.as_strided_args
        if args is not None:
            if output.shape != args.size:  # A copy would broadcast it.
                op = display_op_name(self.info.node_name)
                raise RuntimeError(
                    f"fastvit: recomputing the output of {op} gave the shape {tuple(output.shape)}, and the "
                    f"op gave {tuple(args.size)}; this is an error of fastvit's rule for {op}"
                )
            if output.stride() != args.stride:
                memory = torch.empty_strided(args.size, args.stride, dtype=output.dtype, device=output.device)
                output = memory.copy_(output)
        self.output, self.stream, self.version = output, current_stream_id(output), output._version

    def in_topological_order(self, skip: Callable[[Recipe], bool] = lambda _: False) -> list[Recipe]:
        """Returns the recipes on which this recipe depends, this recipe last; none that `skip` selects."""
        ordered: dict[Recipe, None] = {}
        stack = [self]
        while stack:
            missing = [one for one in stack[-1].operand_recipes if one not in ordered and not skip(one)]
            if missing:
                stack += missing
            else:
                ordered[stack.pop()] = None
        return list(ordered)

    def kept_operands(self) -> list[PackedTensor | PinnedTensor]:
        """Returns the packed and pinned tensors that this recipe reads, without those of operand recipes."""
        return [
            base for base in map(base_of, self.operands) if isinstance(base, (PackedTensor, PinnedTensor))
        ]

    def clear_cached_outputs(self) -> None:
        """Drops cached outputs, of operand recipes too."""
        for one in self.in_topological_order():
            one.output, one.num_served = None, 0


def _explain(changed: OperandChanged, recipe: Recipe, unfinished_recipes: list[Recipe]) -> str:
    """Returns the error message for an op that cannot be recomputed, with the advice to keep its output."""
    op = display_op_name(recipe.info.node_name)
    site = next((one.info.site for one in unfinished_recipes if one.info.site is not None), None)
    if site is None:
        return f"fastvit: cannot recompute the output of {op}: {changed}"
    block, name = skip_key(site)
    return (
        f"fastvit: cannot recompute the output of {op} in {block or 'the model'}: {changed}; "
        f"convert(model, skip=[({block!r}, {name!r})]) keeps the tensor that depends on it"
    )


class View:
    """A view of an operand. Each entry of `views` is a function of a tensor and its other arguments."""

    __slots__ = ("base", "views")

    def __init__(self, base: PackedTensor | PinnedTensor | Recipe, views: tuple[tuple, ...]):
        self.base, self.views = base, views

    def get_tensor(self) -> Tensor:
        tensor = self.base.get_tensor()
        for function, *arguments in self.views:
            tensor = function(tensor, *arguments)
        return tensor


Operand = PackedTensor | PinnedTensor | Recipe | View | None


def base_of(operand: Operand) -> PackedTensor | PinnedTensor | Recipe | None:
    """Returns the operand of which `operand` is a view, or itself."""
    return operand.base if type(operand) is View else operand  # type: ignore[return-value]
