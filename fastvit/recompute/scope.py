"""The hooks under which outputs are rebuilt in the backward pass instead of kept for it.

Inside `recompute_scope()` autograd hands every tensor that an op saves for backward to a pack hook
(torch.autograd.graph.saved_tensors_hooks). Where the tensor can be made again from what others keep anyway,
the hook puts a recipe in its place; the unpack hook follows it. Two things tell how a tensor came about: a
layer of fastvit says so itself (`_Scope.call`), and for ops of torch autograd's graph does (graph.py).

Nothing more is kept for the sake of a recipe. Where it turns out only later that somebody keeps what a recipe
takes (queries and keys are saved before the values with which they share their memory), the tensor is held
until then. A rebuilt tensor is held only while another reader waits for it.

Nothing is taken for a layer's output by its address. A weak reference to its storage is held, so the address
cannot be handed out again while the storage is looked for; the version counter tells whether it was written
since. All references are weak: the scope keeps nothing alive but tensors that wait as above.

Source of the idea: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .graph import KEY, value_of
from .policy import Policy
from .rules import VIEWS
from .saved import Kept, Recipe
from .values import SMALLEST, Argument, Given, Held, Value, View

_MASK = "dropout_mask, a byte an element"
_autograd = torch._C._autograd
_transforms = torch._C._functorch.peek_interpreter_stack


def recompute_scope(
    products: bool = False, weight_casts: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Around a forward: what can be rebuilt by little arithmetic leaves no output behind.

        with fastvit.recompute_scope():
            loss = criterion(model(x), target)
        loss.backward()

    That is the output of BatchNormAct layers with memory="recompute", and of torch's activations, products,
    sums, casts, copies and concatenations, wherever somebody keeps what they are made from. LayerNorms take
    `fastvit.convert`. With `products`, the output of a Linear that is no narrower than its input is rebuilt
    too: about half of what is left, for the time of these matrix products. With `weight_casts`, the copies
    in half precision that autocast makes of weights are cast again instead of kept: 2 bytes for each element
    of a weight, whatever the batch. A weight that is written to before the backward is then an error, which
    it is not without; a write through `weight.data` goes unnoticed, and the gradient is of the new weight.

    The backward may run inside or outside. Gradients have the bits they have without the scope. An output is
    kept as it would be without when it was written to before it was saved. Scopes nest: the end of an inner
    one settles what was held because its ingredients might yet be kept. Inside other saved-tensor hooks
    (non-reentrant checkpointing, save_on_cpu) a scope does nothing: they go on deciding what is kept. Nor
    does it under torch.compile.

    A write through `tensor.data` or from an op that does not count versions goes unnoticed, as it does
    everywhere in autograd.
    """
    return policy_scope(Policy(products, weight_casts))


@contextlib.contextmanager
def policy_scope(policy: Policy, block: str = "") -> Iterator[None]:
    """`recompute_scope` around the forward of a block of this name."""
    outer = active_scope()
    if outer is not None:
        yield
        outer.finish()
        return
    if torch.compiler.is_compiling() or not _autograd._saved_tensors_hooks_is_enabled() or _top_hooks():
        yield
        return
    scope = _Scope(policy, block)
    with saved_tensors_hooks(scope.pack, scope.unpack):
        yield
    scope.finish()


def active_scope() -> _Scope | None:
    """The scope whose hooks autograd would call, if it is one's turn."""
    if torch.compiler.is_compiling():
        return None
    hooks = _top_hooks()
    scope = getattr(hooks[0], "__self__", None) if hooks else None
    return scope if isinstance(scope, _Scope) else None


def _top_hooks() -> tuple[Callable, Callable] | None:
    return _autograd._top_saved_tensors_default_hooks(True)


class _Noted:
    """An output of a layer of ours, by its storage."""

    def __init__(self, y: Tensor, value: Value):
        self.alive = StorageWeakRef(y.untyped_storage())
        self.value, self.version, self.dtype = value, y._version, y.dtype


class _Scope:
    _SWEEP_AT_LEAST = 64

    def __init__(self, policy: Policy, block: str):
        self.policy = policy
        self.block = block  # whose forward runs
        self._outputs: dict[int, _Noted] = {}  # by the address of y's storage, which `alive` reserves
        self._sweep_at = self._SWEEP_AT_LEAST
        self._recorded: list[Kept | Recipe] | None = None
        self._dropout: float | None = None  # the probability of one that runs
        self._waiting: list[weakref.ref[Recipe]] = []

    def pack(self, tensor: Tensor) -> Kept | Recipe:
        packed: Kept | Recipe | None = None
        if type(tensor) is Tensor:
            if self._dropout is not None:
                packed = self._mask(tensor, self._dropout)
            elif self._outputs:
                packed = self._noted(tensor)
            if packed is None and tensor.grad_fn is not None:
                packed = self._of_graph(tensor)
        if packed is None:
            packed = Kept(tensor)
        if self._recorded is not None:
            self._recorded.append(packed)
        return packed

    @staticmethod
    def unpack(packed: Kept | Recipe) -> Tensor:
        return packed.unpack()

    def call(self, layer: Callable[[], Tensor], rebuild: Callable[..., Tensor]) -> Tensor:
        """y = layer(), known from then on as what `rebuild` makes of the tensors that `layer` saves, in the
        order in which it saves them.
        """
        self._recorded = recorded = []
        try:
            y = layer()
        finally:
            self._recorded = None
        if y.requires_grad:
            self._sweep()
            value = Value()
            value.made_by(rebuild, tuple(_argument(packed) for packed in recorded))
            value.depth += 1
            storage = y.untyped_storage()
            value.original, value.version, value.address = TensorWeakRef(y), y._version, storage._cdata
            value.geometry = (y.size(), y.stride(), y.storage_offset())
            value.nbytes, value.name = y.nbytes, y.grad_fn.name()
            self._outputs[storage._cdata] = _Noted(y, value)
            if y._base is None and y.output_nr == 0 and y._version == 0:
                y.grad_fn.metadata[KEY] = value
        return y

    @contextlib.contextmanager
    def dropout(self, p: float) -> Iterator[None]:
        """Around torch's dropout, which saves what it multiplies by: 0, or 1 / (1 - p)."""
        outer, self._dropout = self._dropout, p
        try:
            yield
        finally:
            self._dropout = outer

    def _mask(self, tensor: Tensor, p: float) -> Recipe | None:
        """A byte an element in its place; drawing it again takes ten times as long."""
        size = tensor.element_size()
        if tensor.grad_fn is not None or not tensor.is_floating_point() or tensor.nbytes < SMALLEST:
            return None
        if self.policy.sites is not None and (self.block, _MASK) not in self.policy.sites:
            return None
        kept, dtype = Kept(tensor != 0), tensor.dtype
        value = Value()
        value.made_by(lambda mask: mask.to(dtype).div_(1 - p), (Held(kept),))
        value.name, value.block, value.flops, value.depth = _MASK, self.block, 2, 1
        value.nbytes = tensor.nbytes // size * (size - 1)  # as much is saved
        recipe = Recipe(value, tensor, tensor)
        recipe.settle()
        return recipe

    def _noted(self, tensor: Tensor) -> Kept | Recipe | None:
        if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        noted = self._outputs.get(tensor.untyped_storage()._cdata)
        if noted is None or tensor._version != noted.version or tensor.dtype != noted.dtype:
            return None
        return self._choose(noted.value, tensor, None)

    def _of_graph(self, tensor: Tensor) -> Kept | Recipe | None:
        base = tensor._base
        if base is None:
            base = tensor
        node = base.grad_fn
        if node is None:  # a transposed weight, say
            return Kept(tensor, is_input=tensor.grad_fn.name() in VIEWS)
        # The graph tells what was made and not what was written over it, nor which of several results it is.
        if base._version or base.output_nr or base.dtype != tensor.dtype:
            return None
        if tensor.layout is not torch.strided or _transforms() is not None:
            return None
        value = node.metadata.get(KEY) or value_of(node, self.policy, base)
        if value.original is not None:  # a layer's output that has other memory now
            return None
        if not value.nbytes:
            value.nbytes = base.nbytes
            value.depth += 1
        return self._choose(value, tensor, base)

    def _choose(self, value: Value, tensor: Tensor, base: Tensor | None) -> Kept | Recipe:
        """What stands for `tensor`, a view of `base`, or `base` itself: all that `value` is."""
        kept = value.kept()
        if kept is not None and kept.is_intact():  # which keeps all of it
            return Kept(tensor)
        # a view whose memory has other values than it
        if tensor is not base and (tensor.is_neg() or tensor.is_conj()):
            return Kept(tensor)
        sites = self.policy.sites
        if sites is not None and (self.block, value.name) not in sites and value.is_worth_it():
            value.unknown = "the budget is met without it"
        if value.unknown or not value.is_worth_it():
            kept = Kept(tensor)
            if tensor is not base:
                value.lies_in(base)
            self._is_kept(value, kept)
            return kept
        if value.block is None:
            value.block = self.block
        recipe = Recipe(value, tensor, base)
        missing = recipe.settle()
        if missing is not None:
            recipe.kept = Kept(tensor)
            self._wait(recipe, missing)
        return recipe

    def _wait(self, recipe: Recipe, missing: Value | Given) -> None:
        reference = weakref.ref(recipe)
        self._waiting.append(reference)
        if type(missing) is Value:
            if missing.waiting is None:
                missing.waiting = []
            missing.waiting.append(reference)

    def _is_kept(self, value: Value, kept: Kept) -> None:
        value.keeper = weakref.ref(kept)
        waiting, value.waiting = value.waiting, None
        for reference in waiting or ():
            recipe = reference()
            if recipe is not None and recipe.source is None:
                missing = recipe.settle()
                if missing is not None:
                    self._wait(recipe, missing)

    def finish(self) -> None:
        """What nobody turned out to keep is kept by those who wait; others may then be made from it."""
        for reference in self._waiting:
            recipe = reference()
            if recipe is not None and recipe.source is None and recipe.settle() is not None:
                recipe.hold(recipe.kept)
        self._waiting = []

    def _sweep(self) -> None:
        """Forgets outputs that are gone, now and then: a scope may stand around a whole training loop."""
        if len(self._outputs) < self._sweep_at:
            return
        self._outputs = {
            address: output for address, output in self._outputs.items() if not output.alive.expired()
        }
        self._sweep_at = max(self._SWEEP_AT_LEAST, 2 * len(self._outputs))


def _argument(packed: Kept | Recipe) -> Argument:
    if type(packed) is Recipe:
        return View(packed.value, ((torch.as_strided, *packed.geometry),))
    return Held(packed)
