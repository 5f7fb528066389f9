"""A `Scope` owns the saved-tensor hooks and the call observer of one recompute scope.

The pack hook returns a `PackedTensor` for every saved tensor and adds it to the pending list. The hook plans
nothing. At the end of a block, or after MAX_PENDING tensors, a plan of all pending tensors (planner.py)
chooses which are kept, recomputed or replaced by a mask. The plan waits for all that the block saves, because
queries and keys are saved before the values with which they share memory.

Operands of recipes are taken when the op runs: the pack hook pins small tensors, and the call observer pins
those that the op does not save. No tensor is kept only for a recipe, except pinned copies and masks. Pending
tensors are referred to weakly: a scope holds no tensors.

The method is that of Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
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
from .node_reader import LEAF_NODE
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
from .views import VIEW_RULES, reaches_through_views, skip_unsafe_view
from .weak_list import WeakList

_REASON_NO_PRODUCER = (
    "it is not the output of an autograd node (an input, a constant, indices, or compiled code)"
)
_autograd = torch._C._autograd
_peek_functorch_transform = torch._C._functorch.peek_interpreter_stack
_WeakTensorRef = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_count_function_modes = torch._C._len_torch_function_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled
MAX_PENDING = 512  # pending tensors at which a plan is made, although the block has not ended

Hooks = tuple[Callable, Callable]  # pack hook and unpack hook


def current_saved_tensor_hooks() -> Hooks | None:
    """Returns the saved-tensor hooks that autograd calls now; None if there are none."""
    return _autograd._top_saved_tensors_default_hooks(True)


class Scope:
    """Owns the saved-tensor hooks and the call observer from `enter` to `leave`."""

    policy: Policy
    block: str  # the block whose forward runs

    def __init__(
        self, saved_tensor_observer: SavedTensorObserver | None, close_dead_scopes: Callable[[], None]
    ):
        self._close_dead_scopes = close_dead_scopes
        self._is_open = True
        self._pinned: WeakList[PackedTensor] = WeakList()
        self._call_observer = CallObserver(self)
        self._write_tracker = self._call_observer.tracker
        self._num_outputs = 0  # outputs of nodes that were packed so far
        self._outer_hooks: Hooks | None = None  # hooks around this scope; they pack what this scope keeps
        self._pending: WeakList[PackedTensor] = WeakList()
        self._site_counts: dict[str, dict[str, int]] = defaultdict(dict)  # op calls by block, node name
        self._saved_tensor_observer = saved_tensor_observer

    def enter(self) -> None:
        """Installs the saved-tensor hooks and the call observer."""
        self._outer_hooks = current_saved_tensor_hooks()
        _autograd._push_saved_tensors_default_hooks(self.pack, unpack_hook)
        self._call_observer.push_below()

    def remove_observer(self) -> bool:
        """Removes the call observer. Returns False inside an observed call: the caller must try again."""
        return self._call_observer.remove()

    def leave(self) -> None:
        """Removes the scope's hooks, wherever they lie: an exception may have left other hooks above them.

        Removes the hooks around the scope if their owner has popped the scope's hooks in place of them.
        """
        self._is_open = False
        for packed in self._pinned:  # recipes hold the pins that they read
            packed.pin, packed.is_excluded = None, True
        self._pinned.clear()
        self._call_observer.drop_pins()
        with torch._C.DisableTorchFunction():
            self._write_tracker.close()
        stack = []
        while (hooks := current_saved_tensor_hooks()) is not None:
            stack.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        stale = next((hooks for hooks in stack if hooks[0] == self.pack), self._outer_hooks)
        if stale in stack:
            stack.remove(stale)
        for hooks in reversed(stack):
            _autograd._push_saved_tensors_default_hooks(*hooks)

    def check_open(self) -> None:
        """Closes dead scopes if this scope's hooks are not on top: a dead scope may be the cause."""
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
        """Sets the policy, and the block whose forward runs, and counts the op calls of the block anew."""
        self.policy, self.block = policy, block
        self._site_counts[block].clear()

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
        """Packs a tensor that an op saves; autograd's pack hook."""
        if _count_function_modes() or type(tensor) is not Tensor:
            # Modes and subclasses would intercept every attribute access below.
            with torch._C.DisableTorchFunction():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> PackedTensor | PackedShape:
        node, shape_only_size = tensor.grad_fn, self._call_observer.shape_only_size
        if node is None:
            packed = self._pack_leaf(tensor)
        else:
            if shape_only_size is not None and shape_only_size == tensor.size():
                return PackedShape(tensor)
            self._num_outputs += 1
            if not self._num_outputs % 4:  # The search takes time, so only every fourth tensor starts one.
                self._close_dead_scopes()  # A dead scope would pack what other models save.
            packed = self._pack_output(tensor, node)
            packed.environment = current_environment(tensor.is_cuda)
        if self._write_tracker.write_counts and (writes := self._write_tracker.count_writes(tensor)):
            packed.writes = writes
        if self._outer_hooks is not None and type(packed.state) is Kept:
            packed.pack_by_outer_hooks(*self._outer_hooks)
        if self._saved_tensor_observer is not None:
            self._saved_tensor_observer.add(packed, tensor)
        return packed

    def _pack_leaf(self, tensor: Tensor) -> PackedTensor:
        """Packs a tensor without a node, and pins it for recipes if it is small."""
        call_observer, kept_tensor = self._call_observer, tensor if tensor.is_leaf else tensor.detach()
        packed = PackedTensor(Kept(kept_tensor, tensor._version), _REASON_NO_PRODUCER)
        p = call_observer.running_dropout_p
        if p is not None and type(tensor) is Tensor and self._may_pack_dropout_mask(packed, tensor):
            # The mask is packed instead of drawn again: to draw random numbers takes ten times as long.
            packed.replace_tensor(masks.dropout_bit_mask(tensor, p))
        elif (biases := call_observer.biases) and (bias := biases.pop(storage_id(tensor), None)) is not None:
            packed.bias = bias
        elif is_small(tensor):
            if call_observer.pinned_operand is ... or call_observer.pinned_operand is tensor:
                packed.pin = PinnedTensor(tensor, copies=True)
                self._pinned.append(packed)
        else:  # An op whose result depends on torch's settings saves a large tensor.
            packed.environment = current_environment(tensor.is_cuda)
        return packed

    def _may_pack_dropout_mask(self, packed: PackedTensor, tensor: Tensor) -> bool:
        packed.mask_site = OpSite(self.block, "Dropout", self._next_number(self.block, "Dropout"))
        return tensor.nbytes >= MIN_RECOMPUTE_BYTES and not self.policy.reason_to_keep(packed.mask_site)

    def _pack_output(self, tensor: Tensor, node: Any) -> PackedTensor:
        """Packs an output of a node, or a view of an output; pending if the planner may recompute it."""
        if len(self._pending) >= MAX_PENDING:
            self.plan_pending()
        base = tensor._base
        producer: Any = node if base is None else base.grad_fn
        version = tensor._version
        if producer is None:  # a view of a leaf, such as a transposed weight
            kept_tensor = tensor if node.name() in VIEW_RULES else tensor.detach()
            return PackedTensor(Kept(kept_tensor, version), _REASON_NO_PRODUCER)
        # An op's output refers to its node, and the node to what is packed. A detached tensor makes no cycle.
        kept_tensor = tensor.detach()
        if not self._is_open:
            return PackedTensor(Kept(kept_tensor, version))
        output = tensor if base is None else base
        if reason := self._reason_to_keep(tensor, node, output, producer):
            packed = PackedTensor(Kept(kept_tensor, version), reason)
            packed.is_excluded = version > 0
            return packed
        is_half_precision = output.element_size() == 2 or _is_autocast_enabled()
        pending = Pending(kept_tensor, version, producer, self.block, is_half_precision)
        pending.base = None if base is None else AsStridedArgs.of_tensor(base)
        return self._add_pending(pending, tensor)

    def _add_pending(self, pending: Pending, tensor: Tensor) -> PackedTensor:
        """Adds a tensor to the pending list, and pins what its recipe may need later."""
        packed, producer = PackedTensor(pending), pending.producer
        packed.source_address, packed.source_reference = tensor._cdata, _WeakTensorRef(tensor)
        if self.policy.weight_casts and producer.name() == "ToCopyBackward0":
            self._pin_weight(producer)
        self._pending.append(packed)
        copies = self._call_observer.in_place_copies
        if copies is not None and producer.name() == "CloneBackward0":
            copies.append(packed)
        return packed

    def _reason_to_keep(self, tensor: Tensor, node: Any, base: Tensor, producer: Any) -> str:
        """Returns why an output is kept without a plan; empty if the planner may look for a recipe."""
        if tensor.is_nested or base.is_nested:
            return "it is nested"
        # The graph shows neither which output of an op a tensor is, nor that a view has another dtype.
        is_known = not base.output_nr and base.dtype is tensor.dtype and tensor.layout is torch.strided
        if is_known and tensor._version:
            is_known = self._has_only_tracked_writes(base, producer)
        is_known = is_known and reaches_through_views(node, tensor.output_nr, producer)
        if is_known and _peek_functorch_transform() is None:
            return ""
        op = display_op_name(skip_unsafe_view(producer).name())
        return f"one of several outputs of {op}, or written to before it was saved"

    def _has_only_tracked_writes(self, base: Tensor, node: Any) -> bool:
        """Returns whether the graph shows all writes to `base`, as ops in place, the last one `node`."""
        info, expected_write = OutputInfo.of_node(node), self._call_observer.expected_write
        if expected_write is not None:  # the op saves its output before its call returns
            target, version_after = expected_write
            if target is base and version_after == base._version:
                info.expected_version = version_after
        version = info.expected_version
        if version is None:
            version = getattr(node, "fastvit_expected_version", None)
        return version == base._version

    def _pin_weight(self, cast: Any) -> None:
        """Pins the weight that autocast has cast, when an op saves the cast for the first time."""
        weight, info = cast.next_functions[0][0], OutputInfo.of_node(cast)
        if info.call_args is None and weight is not None and weight.name() == LEAF_NODE:
            pinned = self._call_observer.pin(weight.variable)
            self._call_observer.store_call_args(cast, CallArgs(leaves=(pinned,)))

    def plan_pending(self) -> None:
        """Plans all pending tensors. Keeps those without a plan if the planner raises."""
        pending, self._pending = list(self._pending), WeakList()
        if not pending:
            return
        with torch._C.DisableTorchFunction():  # modes would intercept every attribute access
            try:
                self._plan(pending)
            finally:
                _keep_unplanned(pending)

    def prepare_write(self, tensor: Tensor, is_shown: bool) -> None:
        """Called before a write to `tensor`: recipes that read the memory get a copy.

        Args:
            is_shown: whether autograd's graph or the version counter shows the write. If neither does, the
                backward without a scope would read what is written.
        """
        if self._outer_hooks is not None:  # These hooks may copy, so they pack before the write.
            self.plan_pending()
        self._write_tracker.save_pre_write_copies(tensor)
        for packed in () if is_shown else self._write_tracker.restore_dropped(tensor):
            if self._outer_hooks is not None:
                packed.pack_by_outer_hooks(*self._outer_hooks)

    def has_outer_hooks(self) -> bool:
        """Returns whether there are saved-tensor hooks around the scope."""
        return self._outer_hooks is not None

    def abandon(self) -> None:
        """Keeps all pending tensors, without a plan."""
        pending, self._pending = list(self._pending), WeakList()
        _keep_unplanned(pending)

    def _plan(self, pending: list[PackedTensor]) -> None:
        self._find_output_infos(pending)
        masked = [packed for packed in pending if packed.make_mask is not None]
        for packed in masked:
            if self._reason_to_refuse_mask(packed):
                packed.make_mask = None
        unheld_outputs = self._write_tracker.check_lent_memory(pending)
        keeps_bases, observer = self._outer_hooks is None, self._saved_tensor_observer
        unused_recipes = None if observer is None else observer.unused_recipes
        RecomputePlanner(
            self.policy, RECOMPUTE_RULES, pending, self._write_tracker, keeps_bases, unused_recipes
        ).plan()
        if observer is not None:
            observer.add_plan()
        for info in unheld_outputs:  # a later plan may read them, if it holds their memory
            info.is_content_known = True
        for packed in masked:
            if packed.make_mask is not None:
                self._replace_by_mask_if_possible(packed)
        for packed in () if self._outer_hooks is None else pending:
            if type(packed.state) is Kept and packed.state.is_unwritten():
                packed.pack_by_outer_hooks(*self._outer_hooks)  # type: ignore[misc]

    def _find_output_infos(self, pending: list[PackedTensor]) -> None:
        for packed in pending:
            state = packed.state
            assert type(state) is Pending
            packed.info = info = OutputInfo.of_node(state.producer)
            if state.tensor._version != state.version:
                info.is_content_known = False
            self._number_site(info, state.block)

    def _number_site(self, info: OutputInfo, block: str) -> None:
        if not info.site_number:
            info.block, info.site_number = block, self._next_number(block, info.node_name)

    def _next_number(self, block: str, node_name: str) -> int:
        counts = self._site_counts[block]
        counts[node_name] = number = counts.get(node_name, 0) + 1
        return number

    def _reason_to_refuse_mask(self, packed: PackedTensor) -> str:
        """Returns why the policy refuses a mask in place of a tensor; empty if the policy allows the mask."""
        info = OutputInfo.of_node(packed.mask_node)
        self._number_site(info, self.block)
        packed.mask_site = site = info.site
        return self.policy.reason_to_keep(site)

    def replace_by_mask(self, packed: PackedTensor) -> None:
        """Replaces a planned tensor by its mask, if no recipe and no other op reads the tensor."""
        if type(packed.state) is not Pending:
            if packed.make_mask is not None and not self._reason_to_refuse_mask(packed):
                self._replace_by_mask_if_possible(packed)
            packed.make_mask = packed.mask_node = None

    def _replace_by_mask_if_possible(self, packed: PackedTensor) -> None:
        make_mask, packed.make_mask = packed.make_mask, None
        assert make_mask is not None
        if packed.is_maskable() and self._write_tracker.count_writes(packed.state.tensor) == packed.writes:  # type: ignore
            if (mask := make_mask(packed.state.tensor)) is not None:  # type: ignore[union-attr]
                packed.replace_tensor(mask)
                packed.is_excluded = True


def _keep_unplanned(tensors: list[PackedTensor]) -> None:
    """Keeps the tensors without a plan. Drops references to nodes, which hold the packed tensors."""
    for packed in tensors:
        if type(state := packed.state) is Pending:
            packed.state = Kept(state.tensor, state.version)
        if packed.mask_node is not None:
            packed.make_mask = packed.mask_node = None
