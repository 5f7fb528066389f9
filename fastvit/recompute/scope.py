"""One recompute scope: the saved-tensor hooks, and the decisions at the end of a block.

The pack hook files a record of every tensor that autograd saves, and nothing else. At the end of a block, or
after so many records, one pass over them in the order of the graph decides what is kept, rebuilt or dropped
to a mask. By then all that the block saves is known: queries and keys are saved before the values with which
they share memory. The op and the inputs of a tensor come from autograd's graph (graph.py), and what the graph
lacks from the ops' calls (calls.py).

No tensor is kept only for a recipe, except copies of small leaves and masks. Records are referred to weakly:
a scope holds no tensors.

Source of the idea: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import rules  # noqa: F401  # fills the tables of graph
from .calls import Aliases, Calls
from .graph import BOUNDARY, VALUE, VERSION, Pass, Unknown, Waiting, rule_of
from .masks import Bits
from .policy import Policy, plain
from .record import SMALLEST, HandedOn, Recipe, Record, Unread, Value, stream_of, unpack
from .views import VIEWS, leads_to, of_unsafe_view

MASK = "dropout_mask, a bit an element"
_NO_OP = "no op of the graph made it: an input, a constant, indices, compiled code"
_autograd = torch._C._autograd
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_function_stack
_autocast = torch._C._is_any_autocast_enabled
# Most bytes that a recipe moves for each byte of the tensor. In half precision and under autocast matrix
# products are so fast that long recipes show in a step's time: a LayerNorm and a cast move 7, a LayerScale, a
# residual sum and a cast 11, a rotary embedding and a cast 26. In float32 residual sums of BatchNorms, each
# made of the one before, move 5 more each.
_MOST_MOVED, _MOST_MOVED_IN_HALF = 24, 10
# Most rebuilt tensors on the way to one that is kept. Across blocks the sites of a policy cut the way.
_DEEPEST, _DEEPEST_DEEP, _DEEPEST_ACROSS = 4, 32, 1000
MOST_OPS = 40  # in one recipe
MOST_FILED = 512  # records without a decision

Hooks = tuple[Callable, Callable]
Look = Callable[[Record, Tensor], None]


def top_hooks() -> Hooks | None:
    """The saved-tensor hooks that autograd calls now."""
    return _autograd._top_saved_tensors_default_hooks(True)


class Scope:
    """One open scope."""

    def __init__(self, policy: Policy, look: Look | None = None):
        self.policy = policy
        # What the calls tell the pack hook.
        self.dropout: float | None = None  # the probability of the dropout that runs
        self.unread: torch.Size | None = None  # of an input that the op's backward does not read
        self.written: tuple[Tensor, int] | None = None  # what the op that runs may write to; its version then
        self.aliases = Aliases()
        self.block = ""  # the block whose forward runs
        self._outer: Hooks | None = None  # hooks around this scope, to which kept tensors are handed on
        self._filed: list[weakref.ref[Record]] = []
        self._counts: dict[tuple[str, str], int] = {}  # of the sites of a block, by the op's name
        self._calls = Calls(self)
        self._look = look  # called with what an op saves

    def enter(self) -> None:
        self._outer = top_hooks()
        _autograd._push_saved_tensors_default_hooks(self.pack, unpack)
        self._calls.__enter__()

    def leave(self) -> None:
        self._calls.__exit__(None, None, None)
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
        for site in [site for site in self._counts if site[0] == block]:
            del self._counts[site]

    def mark(self, tensors: Iterable[object]) -> None:
        """These go into a block, or come out of one."""
        if self.policy.deep and not self.policy.across:
            with torch._C.DisableTorchFunction():
                for tensor in tensors:
                    if type(tensor) is Tensor and (tensor._base is None or tensor._base.grad_fn is not None):
                        node: Any = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
                        if node is not None:
                            of_unsafe_view(node).metadata[BOUNDARY] = node.metadata[BOUNDARY] = True

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
            record.tensor = tensor if tensor.is_leaf else tensor.detach()
            is_filed = self.dropout is not None and self._is_mask(record, tensor, self.dropout)
            record.reason = record.reason or _NO_OP
        else:
            is_filed = self._file(record, tensor, node)
        if self._outer is not None and not is_filed:
            record.stand_by(HandedOn(record.tensor, *self._outer))
        if self._look is not None:
            self._look(record, tensor)
        return record

    def _file(self, record: Record, tensor: Tensor, node) -> bool:
        """Notes what the decision needs. False where the tensor is kept for certain."""
        if len(self._filed) >= MOST_FILED:
            self.decide()
        base = tensor._base
        if tensor.is_nested or (base is not None and base.is_nested):  # it has no size
            record.tensor = tensor.detach()
            return False
        if base is None:
            made, base = node, tensor
        else:
            made = base.grad_fn
            if made is None:  # a view of a leaf, such as a transposed weight
                record.tensor = tensor if node.name() in VIEWS else tensor.detach()
                record.reason = _NO_OP
                return False
            record.last = node, tensor.output_nr
            record.base = base.size(), base.stride(), base.storage_offset()
        record.tensor = tensor.detach()  # an op's own output refers to its node, and the node to this record
        record.block, record.made = self.block, made
        record.in_half = base.element_size() == 2 or _autocast()
        # The graph shows neither which of several results this is, nor a cast of the memory.
        is_known = not base.output_nr and base.dtype is tensor.dtype and type(tensor) is Tensor
        if is_known and record.version and not self._is_written_once(base, made):
            is_known, record.is_unfit = False, True  # it may be written to so again
        if not is_known or tensor.layout is not torch.strided or _transforms() is not None:
            record.made = record.last = record.base = None
            op = plain(of_unsafe_view(made).name())
            record.reason = f"one of several results of {op}, or written to before it was saved"
            return False
        self._filed.append(weakref.ref(record))
        return True

    def _is_mask(self, record: Record, tensor: Tensor, p: float) -> bool:
        """Makes it a mask of a bit an element. Drawing it again takes ten times as long."""
        if tensor.nbytes < SMALLEST or type(tensor) is not Tensor:
            return False
        value = Value()
        self._name(value, self.block, MASK)
        if self.policy.against(value.site):
            record.reason = self.policy.against(value.site)
            return False
        dtype, bits = tensor.dtype, Bits(tensor != 0)
        value.nbytes = tensor.nbytes - bits.packed.nbytes
        value.geometry = tensor.size(), tensor.stride(), 0
        recipe = Recipe(
            value,
            lambda _: bits.mask() if dtype is torch.bool else bits.mask().to(dtype).div_(1 - p),
            (Record.of(bits.packed),),
        )
        recipe.dtype, recipe.size, recipe.moved = dtype, tensor.nbytes, 2 * tensor.nbytes
        recipe.adopt()
        record.value, record.recipe = value, recipe
        del record.tensor
        return True

    def _is_written_once(self, base: Tensor, node) -> bool:
        """Whether all writes to `base` are ops in place that the graph shows, the last one being `node`."""
        written = self.written
        if written is not None and written[0] is base and written[1] == base._version:
            node.metadata[VERSION] = base._version  # the op saves its result before its call returns
        return node.metadata.get(VERSION, getattr(node, "fastvit_written", None)) == base._version

    def _name(self, value: Value, block: str, name: str) -> None:
        count = self._counts[block, name] = self._counts.get((block, name), 0) + 1
        value.name, value.site = name, (block, name, count)

    def is_filed(self, node) -> bool:
        """Whether a tensor that `node` made waits for a decision."""
        return any((record := reference()) is not None and record.made is node for reference in self._filed)

    def decide(self) -> None:
        """Decides on all that has been filed, in the order of the graph."""
        filed, self._filed = self._filed, []
        if len(self.aliases) > MOST_FILED:
            self.aliases.sweep()
        if filed:
            with torch._C.DisableTorchFunction():  # modes would see each attribute that is read here
                self._decide_all([record for reference in filed if (record := reference()) is not None])

    def _decide_all(self, records: list[Record]) -> None:
        waiting: Waiting = {}
        for record in records:
            node = record.made
            if record.last is not None and not leads_to(record.last[0], record.last[1], node):
                record.made = record.last = record.base = None
                record.reason = "made by no op of the graph"
                continue
            value = node.metadata.get(VALUE)
            if value is None:
                value = node.metadata[VALUE] = Value()
            if value.site is None:
                self._name(value, record.block, of_unsafe_view(node).name())
            waiting.setdefault(value, (node, []))[1].append(record)
            record.value = value
        Pass(self.policy, waiting, self._decide).run()
        for record in records:
            if record.recipe is None:
                if record.gate_of is not None:
                    record.reduce_to_gate()
                if self._outer is not None and record.stand_in is None:
                    record.stand_by(HandedOn(record.tensor, *self._outer))

    def _decide(self, search: Pass, value: Value, node, records: list[Record]) -> None:
        first = records[0]
        if value.geometry is None:
            tensor = first.tensor
            value.geometry = first.base or (tensor.size(), tensor.stride(), tensor.storage_offset())
            value.nbytes = math.prod(value.geometry[0]) * tensor.element_size()
        recipe = None
        if not value.is_known:
            for record in records:
                record.is_unfit = True
        elif value.nbytes < SMALLEST:
            value.reason = f"it has less than {SMALLEST} bytes"
        elif self.policy.deep and BOUNDARY in node.metadata:
            value.reason = "it goes into a block, or comes out of one"
        elif (not value.records or value.kept() is None) and rule_of(node.name(), self.policy) is not None:
            try:
                recipe = search.found_before(value) or search.recipe(node, value)
                self._refuse(value, recipe, first.in_half)
                recipe.adopt()
            except Unknown as reason:
                recipe, value.reason = None, str(reason)
        for record in records:
            tensor, record.made, record.last = record.tensor, None, None
            # The values of a conjugate or negative view differ from those in memory.
            is_plain = record.base is None or not (tensor.is_neg() or tensor.is_conj())
            if recipe is not None and is_plain:
                if record is not first:
                    recipe.adopt()
                if record.base is not None:
                    offset = tensor.storage_offset() - value.geometry[2]
                    record.geometry = tensor.size(), tensor.stride(), offset
                    if record.geometry == (*value.geometry[:2], 0):
                        record.geometry = None
                record.recipe = recipe
                del record.tensor
            elif value.is_known and is_plain and (record.base is None or self._outer is None):
                value.records.append(weakref.ref(record))  # hooks around hold a view, and not its base

    def _refuse(self, value: Value, recipe: Recipe, in_half: bool) -> None:
        """Raises Unknown where the recipe costs too much, or the policy is against it."""
        deepest = _DEEPEST_DEEP if self.policy.deep else _DEEPEST
        deepest = _DEEPEST_ACROSS if self.policy.across else deepest
        if recipe.depth >= deepest:
            raise Unknown(f"its recipe goes through more than {deepest} rebuilt tensors")
        if recipe.ops > MOST_OPS and not self.policy.deep:
            raise Unknown(f"its recipe has more than {MOST_OPS} ops")
        share = recipe.moved / (recipe.size or 1)
        if share > (_MOST_MOVED_IN_HALF if in_half else _MOST_MOVED) and not self.policy.products:
            raise Unknown(f"its recipe moves {share:.0f} bytes for each that it frees")
        if against := self.policy.against(value.site):
            raise Unknown(against)
