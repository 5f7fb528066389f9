"""`RecomputePlanner` goes once over the pending tensors of a scope, in the order of autograd's graph.

The planner chooses for each tensor: keep it, or recompute it by a recipe. To build a recipe, the planner
walks the graph from an output to the inputs of its op. All consumers of the output share the recipe. A node
has the op's name, the tensors that the op saved, and edges to the nodes that made its inputs. The same op on
the same memory layout gives the same bits. recompute_rules.py lists the ops that are recomputed. Views are
followed to their base.

The graph lacks the value of padding, and inputs without gradient that the op did not save. A tensor that
depends on one of these is kept, unless call_observer.py has stored it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .node_reader import REASON_SHARDED, NodeReader, NotRecomputable, is_leaf_cast
from .packed_tensor import (
    MIN_RECOMPUTE_BYTES,
    AsStridedArgs,
    Kept,
    PackedTensor,
    Pending,
    Recomputed,
    share_args,
)
from .pins import PinnedTensor
from .policy import Policy, RecomputeLevel
from .recipe import Operand, OutputInfo, Recipe, View
from .views import follow_views, skip_unsafe_view
from .write_tracker import WriteTracker

OpCall = tuple[Callable[..., Tensor], tuple[Operand, ...]]  # a function and its operands
Rule = Callable[[NodeReader], OpCall]
Rules = Mapping[str, tuple[RecomputeLevel, Rule]]  # the lowest level that uses a rule, by the name of a node

# The most bytes that a recipe moves for each byte of the tensor. In half precision and under autocast,
# matmuls are so fast that long recipes slow a step down. A LayerNorm and a cast move 7 bytes, a LayerScale, a
# residual sum and a cast 11, a rotary embedding and a cast 26. In float32, each sum in a chain of residual
# sums of BatchNorms adds 5.
_MAX_MOVED_PER_BYTE, _MAX_MOVED_PER_BYTE_IN_HALF = 24, 10
# The longest chain of recomputed tensors between an output and kept tensors. A budget limits chains
# by its choice of sites.
_MAX_RECOMPUTE_DEPTH = {
    RecomputeLevel.CHEAP: 4,
    RecomputeLevel.MATMULS: 4,
    RecomputeLevel.EVERY_OP: 32,
}
_REASON_BLOCK_IO = "it goes into a block, or comes out of one"
_MAX_RECIPE_OPS = 40  # ops of one recipe, with those of its operand recipes
_MAX_UNSAVED_OPS = 40  # consecutive ops whose outputs no op has saved


class RecomputePlanner:
    """Chooses for each pending tensor whether it is kept or recomputed.

    Args:
        keeps_bases: whether a kept view holds its whole base, so that recipes may read the rest of the base.
        unused_recipes: a list to which the plan adds the recipes of tensors that are kept all the same. None
            if there is no observer to read these recipes and the reasons why tensors are kept. Then no recipe
            is built for an output that the policy keeps.
    """

    def __init__(
        self,
        policy: Policy,
        rules: Rules,
        pending: Iterable[PackedTensor],
        tracker: WriteTracker,
        keeps_bases: bool,
        unused_recipes: list[Recipe] | None,
    ):
        self.policy, self.rules, self.tracker, self.keeps_bases = policy, rules, tracker, keeps_bases
        self._unused_recipes = unused_recipes
        self._has_selection = policy.only_sites is not None or bool(policy.skip)
        self._unplanned: dict[OutputInfo, list[PackedTensor]] = {}
        for packed in pending:
            assert packed.info is not None
            self._unplanned.setdefault(packed.info, []).append(packed)
        self._without_recipe: set[OutputInfo] = set()  # outputs for which no recipe was found
        # Recipes that read no parameter that FSDP has sharded again.
        self._unsharded_recipes: set[Recipe] = set()
        self._new_recipes: list[Recipe] = []  # keeps recipes alive, so that none is built twice

    def plan(self) -> None:
        """Plans all pending tensors."""
        # autograd numbers the nodes of a thread in the order of the calls, so the producers of a node's
        # inputs have lower numbers. An exception is an op in place that saves a copy of its input: it creates
        # the node of the copy afterwards.
        for info in sorted(
            self._unplanned, key=lambda info: _pending_state(self._unplanned[info]).producer._sequence_nr()
        ):
            self.plan_output(info)

    def plan_output(self, info: OutputInfo) -> None:
        """Plans the tensors of one output, unless they are planned already."""
        if (packed_tensors := self._unplanned.pop(info, None)) is None:
            return
        pending = _pending_state(packed_tensors)
        if info.as_strided_args is None:
            info.as_strided_args = pending.base or AsStridedArgs.of_tensor(pending.tensor)
        recipe = None
        try:
            recipe = self._choose_recipe(info, pending)
        except NotRecomputable as reason:
            info.reason = str(reason)
        for packed in packed_tensors:
            self._plan_tensor(packed, info, recipe)

    def _plan_tensor(self, packed: PackedTensor, info: OutputInfo, recipe: Recipe | None) -> None:
        state = packed.state
        assert type(state) is Pending and info.as_strided_args is not None
        tensor, base = state.tensor, info.as_strided_args
        packed.is_excluded |= not info.is_content_known
        info.packed_tensors.append(packed)
        # The values of a conjugate or negative view differ from those in memory.
        is_plain = state.base is None or not (tensor.is_neg() or tensor.is_conj())
        # Hooks around the scope, as of save_on_cpu, may change the layout of a tensor that is not contiguous.
        is_plain = is_plain and (self.keeps_bases or tensor.is_contiguous())
        if recipe is None or not is_plain or packed.is_excluded:
            packed.holds_base = state.base is None or (is_plain and self.keeps_bases)
            packed.state = Kept(tensor, state.version)
            return
        recipe.add_consumer()
        self.tracker.add_recipe(recipe)
        view = None
        if state.base is not None:
            offset = tensor.storage_offset() - base.storage_offset
            view = share_args(AsStridedArgs(tensor.size(), tensor.stride(), int(offset)))
            if view == (base.size, base.stride, 0):
                view = None
        packed.state = Recomputed(recipe, view)

    def _choose_recipe(self, info: OutputInfo, pending: Pending) -> Recipe | None:
        """Returns the recipe of an output; None if the output is kept.

        Raises:
            NotRecomputable: the output is kept, for this reason.
        """
        if not info.is_content_known:
            return None
        assert info.as_strided_args is not None
        if math.prod(info.as_strided_args.size) * pending.tensor.element_size() < MIN_RECOMPUTE_BYTES:
            raise NotRecomputable(f"it has less than {MIN_RECOMPUTE_BYTES} bytes")
        policy = self.policy
        keeps_block_io = policy.only_sites is None and policy.level == RecomputeLevel.EVERY_OP
        is_block_io = info.is_block_io and keeps_block_io
        if is_block_io and self._unused_recipes is None:
            raise NotRecomputable(_REASON_BLOCK_IO)
        if self._find_kept(info) is not None or self.find_rule(pending.producer.name()) is None:
            return None
        recipe = self._existing_recipe(info)
        if recipe is None:
            if self._unused_recipes is None and self._is_kept_by_policy(info, pending.producer):
                return None
            recipe = self._build_recipe(pending.producer, info, 0)
        try:
            if is_block_io:
                raise NotRecomputable(_REASON_BLOCK_IO)
            self._check_cost(info, recipe, pending.is_half_precision)
        except NotRecomputable:
            if self._unused_recipes is not None and not policy.skips(info.site):
                self._unused_recipes.append(recipe)
            raise
        return recipe

    def _is_kept_by_policy(self, info: OutputInfo, producer) -> bool:
        """Returns whether the policy keeps an output whatever its recipe.

        The check of casts of weights saves time: under autocast these casts are a third of the saved tensors.
        """
        if self._has_selection and self.policy.reason_to_keep(info.site):
            return True
        return not self.policy.weight_casts and is_leaf_cast(producer)

    def _check_cost(self, info: OutputInfo, recipe: Recipe, is_half_precision: bool) -> None:
        """Raises NotRecomputable if the recipe exceeds a cost limit, or the policy excludes its site."""
        policy, max_depth = self.policy, _MAX_RECOMPUTE_DEPTH[self.policy.level]
        if reason := policy.reason_to_keep(info.site):
            raise NotRecomputable(reason)
        if policy.only_sites is not None:
            return
        if recipe.depth >= max_depth:
            raise NotRecomputable(f"its recipe goes through more than {max_depth} recomputed tensors")
        if recipe.num_ops > _MAX_RECIPE_OPS and policy.level < RecomputeLevel.EVERY_OP:
            raise NotRecomputable(f"its recipe has more than {_MAX_RECIPE_OPS} ops")
        moved_per_byte = recipe.bytes_moved / (recipe.nbytes or 1)
        max_moved_per_byte = _MAX_MOVED_PER_BYTE_IN_HALF if is_half_precision else _MAX_MOVED_PER_BYTE
        if moved_per_byte > max_moved_per_byte and policy.level < RecomputeLevel.MATMULS:
            raise NotRecomputable(f"its recipe moves {moved_per_byte:.0f} bytes for each that it frees")

    def find_rule(self, node_name: str) -> Rule | None:
        """Returns the rule of a node; None if there is none at the policy's level."""
        level, rule = self.rules.get(node_name, (RecomputeLevel.EVERY_OP, None))
        return rule if level <= self.policy.level else None

    def level_of(self, node_name: str) -> RecomputeLevel | None:
        """Returns the lowest level that uses the rule of a node; None if there is no rule."""
        level, _ = self.rules.get(node_name, (None, None))
        return level

    def is_excluded(self, node_name: str) -> bool:
        """Returns whether only a higher level than the policy's uses the rule of a node."""
        level = self.level_of(node_name)
        return level is not None and level > self.policy.level

    def find_operand(self, node, num_ops_from_target: int) -> Operand:
        """Returns an operand for the output of `node`: the packed tensor that keeps it, or a recipe.

        Raises:
            NotRecomputable: the output is not kept, and has no recipe.
        """
        info = OutputInfo.find(node)
        if info is None:
            if self.find_rule(node.name()) is None:  # no op has saved the output, so it needs no OutputInfo
                raise NotRecomputable
            info = OutputInfo.of_node(node)
        if not info.is_content_known:
            raise NotRecomputable("it was written to in ways that the graph does not show")
        if info in self._unplanned:  # the plan of this output says whether it is kept
            self.plan_output(info)
        if (packed := self._find_kept(info)) is not None:
            state = packed.state
            assert info.as_strided_args is not None
            if not isinstance(state, Kept) or AsStridedArgs.of_tensor(state.tensor) == info.as_strided_args:
                return packed
            return View(packed, ((torch.as_strided, *info.as_strided_args),))
        if (recipe := self._existing_recipe(info)) is not None:
            return recipe
        if num_ops_from_target >= _MAX_UNSAVED_OPS or info in self._without_recipe:
            raise NotRecomputable
        return self._build_recipe(node, info, num_ops_from_target)

    def _find_kept(self, info: OutputInfo) -> PackedTensor | None:
        """Returns a packed tensor that holds the memory of an output, unwritten; None if there is none."""
        for packed in info.packed_tensors:
            if packed.holds_base and self._is_intact(packed) and not packed.is_sharded_now():
                return packed
        return None

    def _is_intact(self, operand: PackedTensor | PinnedTensor) -> bool:
        if not operand.is_valid_operand():
            return False
        tensor = operand.held_tensor() if self.tracker.write_counts else None
        return tensor is None or self.tracker.count_writes(tensor) == operand.writes

    def require_intact(self, operand: PackedTensor | PinnedTensor) -> PackedTensor | PinnedTensor:
        """Returns `operand` if it is as it was when an op saved or pinned it.

        Raises:
            NotRecomputable: the operand was written to, or FSDP has sharded it.
        """
        if not self._is_intact(operand):
            raise NotRecomputable("an input was written to")
        if operand.is_sharded_now():
            raise NotRecomputable(REASON_SHARDED)
        return operand

    def _existing_recipe(self, info: OutputInfo) -> Recipe | None:
        """Returns the recipe of an output that has another consumer; None if there is no recipe yet."""
        recipe = None if info.recipe is None else info.recipe()
        return None if recipe is None else self.require_unsharded(recipe)

    def require_unsharded(self, recipe: Recipe) -> Recipe:
        """Returns `recipe`, which may be of another block, if its operands are available.

        Raises:
            NotRecomputable: the recipe reads a parameter that FSDP has sharded, and that FSDP gathers too
                late for a consumer outside of that block.
        """
        if recipe not in self._unsharded_recipes:
            recipes = recipe.in_topological_order()
            if any(operand.is_sharded_now() for one in recipes for operand in one.kept_operands()):
                raise NotRecomputable(REASON_SHARDED)
            self._unsharded_recipes.add(recipe)
        return recipe

    def _build_recipe(self, node, info: OutputInfo, num_ops_from_target: int) -> Recipe:
        """Returns a new recipe for the output of `node`.

        Raises:
            NotRecomputable: there is no recipe. This plan does not look for a recipe of the output again.
        """
        rule = self.find_rule(node.name())
        try:
            if rule is None:
                raise NotRecomputable
            output = node._input_metadata[0]
            if output.is_cpp_nested_tensor:  # a nested tensor has no shape
                raise NotRecomputable("it is nested")
            reader = NodeReader(node, self, info, num_ops_from_target, output)
            recipe = Recipe(info, *rule(reader), reader.environment)
        except NotRecomputable:
            self._without_recipe.add(info)
            raise
        recipe.dtype, recipe.sequence_nr = output.dtype, node._sequence_nr()
        numel = math.prod(output.shape)
        recipe.add_operand_costs(numel * output.dtype.itemsize, reader.flops * numel)
        info.recipe = weakref.ref(recipe)
        self._unsharded_recipes.add(recipe)
        self._new_recipes.append(recipe)
        return recipe

    def is_unsaved_matmul(self, node) -> bool:
        """Returns whether the output of `node` is that of a matmul, or a view of it, and is not kept."""
        node = follow_views(node)
        if node is None or self.level_of(skip_unsafe_view(node).name()) is not RecomputeLevel.MATMULS:
            return False
        return self._find_kept(OutputInfo.of_node(node)) is None


def _pending_state(packed_tensors: list[PackedTensor]) -> Pending:
    state = packed_tensors[0].state
    assert type(state) is Pending
    return state
