"""A `Scope` owns the saved-tensor hooks and the call observer of one recompute scope.

The pack hook returns a `PackedTensor` for every saved tensor and adds it to the pending list. It plans
nothing. At the end of a block, or after so many pending tensors, one plan over them (planner.py) chooses what
is kept, recomputed or replaced by a mask. By then all that the block saves is known: queries and keys are
saved before the values with which they share memory.

What a recipe reads is taken when the op runs: the pack hook pins small tensors, and the call observer those
that the op does not save. No tensor is kept only for a recipe, except pinned copies and masks. Pending
tensors are referred to weakly: a scope holds no tensors.

After Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import masks
from .call_observer import CallObserver
from .environment import current_environment
from .node_reader import LEAF
from .observer import SavedTensorObserver
from .packed_tensor import (
    MIN_RECOMPUTE_BYTES,
    AsStridedArgs,
    Kept,
    PackedShape,
    PackedTensor,
    Pending,
    unpack_hook,
)
from .pins import PinnedTensor, is_small
from .planner import RecomputePlanner
from .policy import OpSite, Policy, RecomputeLevel, display_op_name
from .recipe import CallArgs, OutputInfo
from .recompute_rules import RECOMPUTE_RULES
from .storage import storage_id, view_base
from .views import VIEWS, reaches_through_views, skip_unsafe_view
from .weak_list import WeakList

_NO_OP = "it is not the output of an autograd node (an input, a constant, indices, or compiled code)"
_autograd = torch._C._autograd
_peek_transform = torch._C._functorch.peek_interpreter_stack
_WeakTensorRef = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_len_modes = torch._C._len_torch_function_stack
_is_autocast_on = torch._C._is_any_autocast_enabled
MAX_PENDING = 512  # tensors without a plan

Hooks = tuple[Callable, Callable]


def current_saved_tensor_hooks() -> Hooks | None:
    """Returns the saved-tensor hooks that autograd calls now."""
    return _autograd._top_saved_tensors_default_hooks(True)


class Scope:
    """One open scope."""

    policy: Policy
    block: str  # whose forward runs

    def __init__(
        self, saved_tensor_observer: SavedTensorObserver | None, close_dead_scopes: Callable[[], None]
    ):
        self._close_dead_scopes = close_dead_scopes
        self._is_open = True
        self._pinned: WeakList[PackedTensor] = WeakList()
        self._calls = CallObserver(self)
        self._tracker = self._calls.tracker
        self._num_outputs = 0  # that were packed
        self._outer: Hooks | None = None  # hooks around this scope, through which kept tensors go
        self._pending: WeakList[PackedTensor] = WeakList()
        self._num_sites: dict[str, dict[str, int]] = defaultdict(dict)  # of a block, by the name of a node
        self._saved_tensor_observer = saved_tensor_observer

    def enter(self) -> None:
        self._outer = current_saved_tensor_hooks()
        _autograd._push_saved_tensors_default_hooks(self.pack, unpack_hook)
        self._calls.push_below()

    def remove_observer(self) -> bool:
        """Takes the call observer off. Returns False inside of a call: try again after it."""
        return self._calls.remove()

    def leave(self) -> None:
        """Removes the hooks, wherever they lie: an exception may have left others above them.

        Where something has popped the scope's hooks in place of its own, those are removed.
        """
        self._is_open = False
        for packed in self._pinned:  # recipes hold the pins that they read
            packed.pin, packed.is_excluded = None, True
        self._pinned.clear()
        self._calls.drop_pins()
        with torch._C.DisableTorchFunction():
            self._tracker.close()
        every = []
        while (hooks := current_saved_tensor_hooks()) is not None:
            every.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        stale = next((one for one in every if one[0] == self.pack), self._outer)
        if stale in every:
            every.remove(stale)
        for hooks in reversed(every):
            _autograd._push_saved_tensors_default_hooks(*hooks)

    def check_open(self) -> None:
        """Closes the scope if it is dead, and something has popped its hooks in place of its own."""
        hooks = current_saved_tensor_hooks()
        if hooks is None or hooks[0] != self.pack:
            self._close_dead_scopes()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Removes the scope's hooks inside the `with` statement."""
        _autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            _autograd._push_saved_tensors_default_hooks(self.pack, unpack_hook)

    def enter_block(self, policy: Policy, block: str) -> None:
        self.policy, self.block = policy, block
        self._num_sites[block].clear()

    def mark_block_io(self, tensors: Iterable[object]) -> None:
        """Marks the inputs or outputs of a block."""
        if self.policy.level == RecomputeLevel.EVERY_OP:
            with torch._C.DisableTorchFunction():
                for tensor in tensors:
                    if isinstance(tensor, Tensor):
                        node = view_base(tensor).grad_fn
                        if node is not None:
                            OutputInfo.of_node(node).is_block_io = True

    def pack(self, tensor: Tensor) -> PackedTensor | PackedShape:
        """The pack hook."""
        if _len_modes() or type(tensor) is not Tensor:  # they would intercept every attribute access below
            with torch._C.DisableTorchFunction():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> PackedTensor | PackedShape:
        node, calls = tensor.grad_fn, self._calls
        if node is None:
            packed = self._pack_leaf(tensor)
        else:
            if calls.shape_only_size is not None and calls.shape_only_size == tensor.size():
                return PackedShape(tensor)
            self._num_outputs += 1
            if not self._num_outputs % 4:  # the search takes time, so it is not for each tensor
                self._close_dead_scopes()  # a dead scope would pack what other models save
            packed = self._pack_output(tensor, node)
            packed.environment = current_environment(tensor.is_cuda)
        if self._tracker.counts and (writes := self._tracker.count_of(tensor)):
            packed.writes = writes
        if self._outer is not None and type(packed.state) is Kept:
            packed.pack_by_outer_hooks(*self._outer)
        if self._saved_tensor_observer is not None:
            self._saved_tensor_observer.add(packed, tensor)
        return packed

    def _pack_leaf(self, tensor: Tensor) -> PackedTensor:
        """Packs a tensor without a node, and pins it for recipes if it is small."""
        packed = PackedTensor(Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version), _NO_OP)
        p = self._calls.running_dropout_p
        if p is not None and type(tensor) is Tensor and self._may_pack_dropout_mask(packed, tensor):
            # The mask is packed instead of drawn again: drawing random numbers takes ten times as long.
            packed.replace_tensor(masks.dropout_bit_mask(tensor, p))
        elif self._calls.biases and (bias := self._calls.biases.pop(storage_id(tensor), None)) is not None:
            packed.bias = bias
        elif is_small(tensor):
            needed = self._calls.pinned_operand
            if needed is ... or needed is tensor:
                packed.pin = PinnedTensor(tensor, copies=True)
                self._pinned.append(packed)
        else:  # every op whose settings matter saves a larger tensor too
            packed.environment = current_environment(tensor.is_cuda)
        return packed

    def _may_pack_dropout_mask(self, packed: PackedTensor, tensor: Tensor) -> bool:
        packed.mask_site = OpSite(self.block, "Dropout", self._next_number(self.block, "Dropout"))
        return tensor.nbytes >= MIN_RECOMPUTE_BYTES and not self.policy.reason_to_keep(packed.mask_site)

    def _pack_output(self, tensor: Tensor, node: Any) -> PackedTensor:
        """Packs an output of a node, or a view of one. Without a plan where it is kept for certain."""
        if len(self._pending) >= MAX_PENDING:
            self.plan_pending()
        base = tensor._base
        producer: Any = node if base is None else base.grad_fn
        version = tensor._version
        if producer is None:  # a view of a leaf, such as a transposed weight
            held = tensor if node.name() in VIEWS else tensor.detach()
            return PackedTensor(Kept(held, version), _NO_OP)
        # An op's output refers to its node, and that to what is packed: only detached it makes no cycle.
        held = tensor.detach()
        if not self._is_open:
            return PackedTensor(Kept(held, version))
        output = tensor if base is None else base
        if reason := self._reason_to_keep(tensor, node, output, producer):
            packed = PackedTensor(Kept(held, version), reason)
            packed.is_excluded = version > 0
            return packed
        is_half_precision = output.element_size() == 2 or _is_autocast_on()
        pending = Pending(held, version, producer, self.block, is_half_precision)
        pending.base = None if base is None else AsStridedArgs.of(base)
        packed = PackedTensor(pending)
        packed.source_address, packed.source_reference = tensor._cdata, _WeakTensorRef(tensor)
        if self.policy.weight_casts and producer.name() == "ToCopyBackward0":
            self._pin_weight(producer)
        self._pending.append(packed)
        if self._calls.in_place_copies is not None and producer.name() == "CloneBackward0":
            self._calls.in_place_copies.append(packed)
        return packed

    def _reason_to_keep(self, tensor: Tensor, node: Any, base: Tensor, producer: Any) -> str:
        """Returns why an output is kept for certain; empty where the planner is to look."""
        if tensor.is_nested or base.is_nested:
            return "it is nested"
        # The graph shows neither which of several outputs this is, nor a cast of the memory.
        is_known = not base.output_nr and base.dtype is tensor.dtype and tensor.layout is torch.strided
        if is_known and tensor._version:
            is_known = self._has_only_tracked_writes(base, producer)
        if is_known and reaches_through_views(node, tensor.output_nr, producer) and _peek_transform() is None:
            return ""
        op = display_op_name(skip_unsafe_view(producer).name())
        return f"one of several outputs of {op}, or written to before it was saved"

    def _has_only_tracked_writes(self, base: Tensor, node: Any) -> bool:
        """Returns whether all writes to `base` are ops in place that the graph shows, the last one `node`."""
        info, expected = OutputInfo.of_node(node), self._calls.expected_write
        if expected is not None and expected[0] is base and expected[1] == base._version:
            info.expected_version = base._version  # the op saves its output before its call returns
        version = info.expected_version
        if version is None:
            version = getattr(node, "fastvit_expected_version", None)
        return version == base._version

    def _pin_weight(self, cast: Any) -> None:
        """Pins the weight that autocast has cast, when the cast is saved first."""
        weight, info = cast.next_functions[0][0], OutputInfo.of_node(cast)
        if info.call is None and weight is not None and weight.name() == LEAF:
            self._calls.store_call_args(cast, CallArgs(leaves=(self._calls.pin(weight.variable),)))

    def plan_pending(self) -> None:
        """Plans all that is pending. Whatever raises, what is pending is kept."""
        pending, self._pending = list(self._pending), WeakList()
        if not pending:
            return
        with torch._C.DisableTorchFunction():  # modes would intercept every attribute access
            try:
                self._plan(pending)
            finally:
                _keep(pending)

    def prepare_write(self, tensor: Tensor, is_shown: bool) -> None:
        """Called before a write to `tensor`: recipes that read the memory get a copy.

        Args:
            is_shown: whether autograd's graph or the version shows the write. If neither does, autograd reads
                what is written.
        """
        if self._outer is not None:  # hooks around the scope may copy what they pack
            self.plan_pending()
        self._tracker.save_pre_write_copies(tensor)
        for packed in () if is_shown else self._tracker.restore_dropped(tensor):
            if self._outer is not None:
                packed.pack_by_outer_hooks(*self._outer)

    def has_outer_hooks(self) -> bool:
        """Returns whether there are saved-tensor hooks around the scope."""
        return self._outer is not None

    def abandon(self) -> None:
        """Keeps all that is pending, without a plan."""
        pending, self._pending = list(self._pending), WeakList()
        _keep(pending)

    def _plan(self, pending: list[PackedTensor]) -> None:
        for packed in pending:
            state = packed.state
            assert type(state) is Pending
            packed.info = info = OutputInfo.of_node(state.producer)
            if state.tensor._version != state.version:
                info.is_content_known = False
            self._number_site(info, state.block)
        masked = [packed for packed in pending if packed.make_mask is not None]
        for packed in masked:
            if self._reason_against_mask(packed):
                packed.make_mask = None
        unsettled = self._tracker.settle_lent(pending)
        keeps_bases, observer = self._outer is None, self._saved_tensor_observer
        unused = None if observer is None else observer.unused_recipes
        RecomputePlanner(self.policy, RECOMPUTE_RULES, pending, self._tracker, keeps_bases, unused).plan()
        if observer is not None:
            observer.add_plan()
        for info in unsettled:
            info.is_content_known = True
        for packed in masked:
            if packed.make_mask is not None:
                self._replace_by_mask(packed)
        for packed in () if self._outer is None else pending:
            if type(packed.state) is Kept and packed.state.is_unwritten():
                packed.pack_by_outer_hooks(*self._outer)  # type: ignore[misc]

    def _number_site(self, info: OutputInfo, block: str) -> None:
        if not info.site_number:
            info.block, info.site_number = block, self._next_number(block, info.node_name)

    def _next_number(self, block: str, node_name: str) -> int:
        counts = self._num_sites[block]
        counts[node_name] = number = counts.get(node_name, 0) + 1
        return number

    def _reason_against_mask(self, packed: PackedTensor) -> str:
        """Returns why the policy is against the mask that an activation makes of what it has saved."""
        info = OutputInfo.of_node(packed.mask_node)
        self._number_site(info, self.block)
        packed.mask_site = site = info.site
        return self.policy.reason_to_keep(site)

    def replace_by_mask(self, packed: PackedTensor) -> None:
        """Replaces a tensor that is planned already by a mask, if nothing else reads it."""
        if type(packed.state) is not Pending:
            if packed.make_mask is not None and not self._reason_against_mask(packed):
                self._replace_by_mask(packed)
            packed.make_mask = packed.mask_node = None

    def _replace_by_mask(self, packed: PackedTensor) -> None:
        make_mask, packed.make_mask = packed.make_mask, None
        assert make_mask is not None
        if packed.is_maskable() and self._tracker.count_of(packed.state.tensor) == packed.writes:  # type: ignore
            if (mask := make_mask(packed.state.tensor)) is not None:  # type: ignore[union-attr]
                packed.replace_tensor(mask)
                packed.is_excluded = True


def _keep(planned: list[PackedTensor]) -> None:
    """Keeps what has no plan, and drops the nodes, which hold the packed tensors."""
    for packed in planned:
        if type(state := packed.state) is Pending:
            packed.state = Kept(state.tensor, state.version)
        if packed.mask_node is not None:
            packed.make_mask = packed.mask_node = None
