"""One recompute scope: the saved-tensor hooks, and the decisions at the end of a block.

The pack hook files a record of every tensor that autograd saves, and nothing else. At the end of a block, or
after so many records, one pass over them (decide.py) decides what is kept, rebuilt or dropped to a mask. By
then all that the block saves is known: queries and keys are saved before the values with which they share
memory. The op and the inputs of a tensor come from autograd's graph, and what the graph lacks from the ops'
calls (calls.py).

No tensor is kept only for a recipe, except copies of small leaves and masks. Records are referred to weakly:
a scope holds no tensors.

After Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import masks, recompute_rules  # noqa: F401  # rules fills the tables of graph
from .call_observer import Calls
from .observer import SavedTensorObserver
from .packed_tensor import SMALLEST, HandedOn, Record, Unread, Value, alive, stream_of, unpack
from .planner import Pass
from .policy import Policy, RecomputeLevel, plain
from .views import VIEWS, leads_to, of_unsafe_view

_NO_OP = "no op of the graph made it: an input, a constant, indices, compiled code"
_autograd = torch._C._autograd
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_function_stack
_autocast = torch._C._is_any_autocast_enabled
MOST_FILED = 512  # records without a decision

Hooks = tuple[Callable, Callable]


def top_hooks() -> Hooks | None:
    """The saved-tensor hooks that autograd calls now."""
    return _autograd._top_saved_tensors_default_hooks(True)


class Scope(Calls):
    """One open scope."""

    policy: Policy
    block: str  # whose forward runs

    def __init__(self, watcher: SavedTensorObserver | None = None):
        super().__init__()
        self._outer: Hooks | None = None  # hooks around this scope, to which kept tensors are handed on
        self._filed: list[weakref.ref[Record]] = []
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)  # of a block's sites, by the op's name
        self._watcher = watcher

    def enter(self) -> None:
        self._outer = top_hooks()
        _autograd._push_saved_tensors_default_hooks(self.pack, unpack)
        self.__enter__()

    def leave(self) -> None:
        self.__exit__(None, None, None)
        _autograd._pop_saved_tensors_default_hooks()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Without the hooks for a while."""
        _autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            _autograd._push_saved_tensors_default_hooks(self.pack, unpack)

    def begin(self, policy: Policy, block: str) -> None:
        """The forward of `block` begins."""
        self.policy, self.block = policy, block
        self._counts[block].clear()

    def mark(self, tensors: Iterable[object]) -> None:
        """These go into a block, or come out of one."""
        if self.policy.level == RecomputeLevel.EVERY_OP:
            with torch._C.DisableTorchFunction():
                for tensor in tensors:
                    if type(tensor) is Tensor and (tensor._base is None or tensor._base.grad_fn is not None):
                        node: Any = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
                        if node is not None:
                            Value.of(node).is_boundary = True

    def pack(self, tensor: Tensor) -> Record | Unread:
        if _modes():  # they would see each attribute that is read here
            with torch._C.DisableTorchFunction():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Record | Unread:
        node = tensor.grad_fn
        if self.unread is not None and node is not None and self.unread == tensor.size():
            return Unread(tensor)
        record = Record()
        record.version = tensor._version
        if tensor.is_cuda:
            record.stream = stream_of(tensor)
        if node is None:
            record.tensor, record.reason = tensor if tensor.is_leaf else tensor.detach(), _NO_OP
            if self.dropout is not None and tensor.nbytes >= SMALLEST and type(tensor) is Tensor:
                record.stand_by(masks.of_dropout(tensor, self.dropout))  # drawing takes ten times as long
        else:
            self._file(record, tensor, node)
        if self._outer is not None and record.producer is None and record.stand_in is None:
            record.stand_by(HandedOn(record.tensor, *self._outer))
        if self._watcher is not None:
            self._watcher.add(record, tensor)
        return record

    def _file(self, record: Record, tensor: Tensor, node) -> None:
        """Notes what the decision needs, unless the tensor is kept for certain."""
        if len(self._filed) >= MOST_FILED:
            self.decide()
        base = tensor._base
        if tensor.is_nested or (base is not None and base.is_nested):  # it has no size
            record.tensor = tensor.detach()
            return
        if base is None:
            producer, base = node, tensor
        else:
            producer = base.grad_fn
            if producer is None:  # a view of a leaf, such as a transposed weight
                record.tensor = tensor if node.name() in VIEWS else tensor.detach()
                record.reason = _NO_OP
                return
            record.base = base.size(), base.stride(), base.storage_offset()
        record.tensor = tensor.detach()  # an op's own output refers to its node, and the node to this record
        record.block, record.producer = self.block, producer
        record.in_half = base.element_size() == 2 or _autocast()
        # The graph shows neither which of several results this is, nor a cast of the memory.
        is_known = not base.output_nr and base.dtype is tensor.dtype and type(tensor) is Tensor
        if is_known and record.version and not self._is_written_once(base, producer):
            is_known, record.is_unfit = False, True  # it may be written to so again
        is_known = is_known and leads_to(node, tensor.output_nr, producer)
        if not is_known or tensor.layout is not torch.strided or _transforms() is not None:
            record.producer = record.base = None
            op = plain(of_unsafe_view(producer).name())
            record.reason = f"one of several results of {op}, or written to before it was saved"
            return
        self._filed.append(weakref.ref(record))

    def _is_written_once(self, base: Tensor, node) -> bool:
        """Whether all writes to `base` are ops in place that the graph shows, the last one being `node`."""
        value, written = Value.of(node), self.written
        if written is not None and written[0] is base and written[1] == base._version:
            value.version = base._version  # the op saves its result before its call returns
        version = getattr(node, "fastvit_written", None) if value.version is None else value.version
        return version == base._version

    def is_filed(self, node) -> bool:
        return any(record.producer is node for record in alive(self._filed))

    def decide(self) -> None:
        filed, self._filed = self._filed, []
        if filed:
            with torch._C.DisableTorchFunction():  # modes would see each attribute that is read here
                self._decide(alive(filed))

    def _decide(self, records: list[Record]) -> None:
        for record in records:
            record.value = value = Value.of(record.producer)
            if value.site is None:
                counts = self._counts[record.block]
                counts[value.name] += 1
                value.site = record.block, value.name, counts[value.name]
        Pass(self.policy, records, self._outer is None).run()
        for record in records:
            if record.mask_of is not None:
                record.reduce_to_mask()
            if record.recipe is None and self._outer is not None and record.stand_in is None:
                record.stand_by(HandedOn(record.tensor, *self._outer))
