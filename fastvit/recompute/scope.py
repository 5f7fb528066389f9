"""One recompute scope: the hooks under which saved tensors become recipes.

Where a tensor that autograd saves can be rebuilt from tensors that other ops keep, the pack hook returns a
recipe; the unpack hook follows it. The op and the inputs of a tensor come from a layer of fastvit
(`Scope.call`), or from autograd's graph for ops of torch (graph.py) and from their calls (calls.py).

No tensor is kept only for a recipe, except copies of small leaves and byte masks. An ingredient may be saved
later than the tensor that needs it: queries and keys are saved before the values with which they share
memory. The recipe holds the tensor until then. A rebuilt tensor is held only while another reader waits.

A layer's output is recognised by the address of its storage. A weak reference to the storage reserves the
address, so no other storage can have it, and the version counter shows writes. All references are weak: a
scope holds no tensors but those that wait as above.

Source of the idea: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .calls import VALUE, VERSION, Aliases, Calls, has_memory
from .graph import argument_of, value_of
from .policy import Policy, Site
from .saved import Kept, Recipe
from .values import SMALLEST, Given, Held, Value
from .views import VIEWS, leads_to

_MASK = "dropout_mask, a byte an element"
_autograd = torch._C._autograd
_transforms = torch._C._functorch.peek_interpreter_stack

Hooks = tuple[Callable, Callable]
Look = Callable[["Kept | Recipe", Tensor], None]


def top_hooks() -> Hooks | None:
    """The saved-tensor hooks that autograd calls now."""
    return _autograd._top_saved_tensors_default_hooks(True)


class _Noted:
    """An output of a layer of fastvit, with its storage."""

    def __init__(self, y: Tensor, value: Value):
        self.alive = StorageWeakRef(y.untyped_storage())
        self.value, self.version, self.dtype = value, y._version, y.dtype


class Scope:
    """One open scope: its pack hook, and what it knows of the forward that runs."""

    _SWEEP_AT_LEAST = 64

    def __init__(self, policy: Policy, block: str, look: Look | None = None):
        self.policy = policy
        self.block = block  # the block whose forward runs
        self.numbers: dict[str, dict[str, int]] = {}  # by block and name, how many values have a site
        self.dropout: float | None = None  # the probability of the dropout that runs
        self.written: tuple[Tensor, int] | None = None  # what the op that runs may write to; its version then
        self.aliases = Aliases()
        self._outer: Hooks | None = None  # hooks around this scope, to which kept tensors are handed on
        self._outputs: dict[int, _Noted] = {}  # by the address of y's storage, which `alive` reserves
        self._sweep_at = self._SWEEP_AT_LEAST
        self._recorded: list[Kept | Recipe] | None = None
        self._waiting: list[weakref.ref[Recipe]] = []
        self._calls = Calls(self)
        self._look = look  # called with what an op saves: the packed object, the tensor

    def enter(self) -> None:
        self._outer = top_hooks()
        _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
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
            _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Kept | Recipe:
        packed: Kept | Recipe | None = None
        if type(tensor) is Tensor:
            if self.dropout is not None:
                packed = self._mask(tensor, self.dropout)
            elif self._outputs:
                packed = self._noted(tensor)
            if packed is None and tensor.grad_fn is not None:
                packed = self._of_graph(tensor)
        if packed is None:
            packed = Kept(tensor)
        if self._outer is not None and type(packed) is Kept:
            packed.hand_on(self._outer)
        if self._recorded is not None:
            self._recorded.append(packed)
        if self._look is not None:
            self._look(packed, tensor)
        return packed

    @staticmethod
    def unpack(packed: Kept | Recipe) -> Tensor:
        return packed.unpack()

    def call(self, layer: Callable[[], Tensor], rebuild: Callable[..., Tensor]) -> Tensor:
        """Runs `layer`, and records that `rebuild` makes its result from the tensors that `layer` saves.

        `rebuild` takes those tensors in the order in which `layer` saves them.
        """
        self._recorded = recorded = []
        try:
            y = layer()
        finally:
            self._recorded = None
        if y.requires_grad:
            self._sweep()
            value = Value()
            value.size, value.dtype = y.nbytes, y.dtype
            value.made_by(rebuild, tuple(argument_of(packed) for packed in recorded))
            value.depth += 1
            storage = y.untyped_storage()
            value.original, value.version, value.address = TensorWeakRef(y), y._version, storage._cdata
            value.geometry = (y.size(), y.stride(), y.storage_offset())
            value.nbytes, value.name = y.nbytes, y.grad_fn.name()
            self._outputs[storage._cdata] = _Noted(y, value)
            if y._base is None and y.output_nr == 0 and y._version == 0:
                y.grad_fn.metadata[VALUE] = value
        return y

    @staticmethod
    def unknown(reason: str) -> Value:
        """A value that is never rebuilt, nor another from it: an op before may have read something else."""
        value = Value()
        value.unknown, value.is_ingredient = reason, False
        return value

    def _mask(self, tensor: Tensor, p: float) -> Recipe | None:
        """A mask of one byte an element in place of the factor. Drawing it again takes ten times as long."""
        size = tensor.element_size()
        if tensor.grad_fn is not None or not tensor.is_floating_point() or tensor.nbytes < SMALLEST:
            return None
        site = self._next_site(_MASK)
        if self.policy.against(site):
            return None
        kept, dtype = Kept(tensor != 0), tensor.dtype
        value = Value()
        value.size = tensor.nbytes
        value.made_by(lambda mask: mask.to(dtype).div_(1 - p), (Held(kept),))
        value.name, value.site, value.depth = _MASK, site, 1
        value.nbytes = tensor.nbytes // size * (size - 1)  # the bytes that the mask saves
        recipe = Recipe(value, tensor, tensor)
        recipe.settle()
        return recipe

    def _next_site(self, name: str) -> Site:
        numbers = self.numbers.setdefault(self.block, {})
        numbers[name] = number = numbers.get(name, 0) + 1
        return self.block, name, number

    def _noted(self, tensor: Tensor) -> Kept | Recipe | None:
        if not has_memory(tensor):
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
        if node is None:  # a view of a leaf, such as a transposed weight
            return Kept(tensor, is_input=tensor.grad_fn.name() in VIEWS)
        # The graph shows neither which of several results this is, nor a cast of the memory.
        if base.output_nr or base.dtype != tensor.dtype:
            return None
        if base._version and not self._is_written_once(base, node):
            return None
        if tensor.layout is not torch.strided or base.is_nested or _transforms() is not None:
            return None
        if tensor is not base and not leads_to(tensor, node):
            return None
        value = node.metadata.get(VALUE) or value_of(node, self.policy, base)
        if value.original is not None:  # a layer's output whose memory was replaced
            return None
        if not value.nbytes:
            value.nbytes = base.nbytes
            value.depth += 1
        return self._choose(value, tensor, base)

    def _is_written_once(self, base: Tensor, node) -> bool:
        """Whether all writes to `base` are ops in place that the graph shows, the last one being `node`."""
        written = self.written
        if written is not None and written[0] is base and written[1] == base._version:
            node.metadata[VERSION] = base._version  # the op saves its result before its call returns
        return node.metadata.get(VERSION) == base._version

    def _choose(self, value: Value, tensor: Tensor, base: Tensor | None) -> Kept | Recipe:
        """Keeps `tensor`, which is `base` or a view of it, or makes a recipe. `value` is that of `base`."""
        kept = value.kept()
        if kept is not None and kept.is_intact():  # its storage is kept already
            return kept.again(tensor)
        # The values of a conjugate or negative view differ from those in memory.
        if tensor is not base and (tensor.is_neg() or tensor.is_conj()):
            return Kept(tensor)
        if not value.site[2]:
            value.site = self._next_site(value.name)
            if value.is_worth_it():
                value.unknown = value.unknown or self.policy.against(value.site)
        if value.unknown or not value.is_worth_it():
            kept = Kept(tensor)
            if not value.is_ingredient:
                return kept
            if tensor is not base:
                if self._outer is not None:  # hooks around hold the view, and not its base
                    return kept
                value.lies_in(base)
            self._is_kept(value, kept)
            return kept
        recipe = Recipe(value, tensor, base)
        missing = recipe.settle()
        if missing is not None:
            recipe.kept = Kept(tensor)
            self._wait(recipe, missing)
        return recipe

    def _wait(self, recipe: Recipe, missing: Value | Given) -> None:
        reference = weakref.ref(recipe)
        self._sweep()
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
        """Recipes that still wait for an ingredient keep their tensor, which may then be an ingredient."""
        for reference in self._waiting:
            recipe = reference()
            if recipe is not None and recipe.source is None and recipe.settle() is not None:
                if self._outer is not None:
                    recipe.kept.hand_on(self._outer)
                else:
                    recipe.hold(recipe.kept)
        self._waiting = []

    def _sweep(self) -> None:
        """Drops freed references from time to time, since a scope may enclose a whole training loop."""
        if len(self._outputs) + len(self._waiting) + len(self.aliases) < self._sweep_at:
            return
        self.aliases.sweep()
        self._outputs = {
            address: output for address, output in self._outputs.items() if not output.alive.expired()
        }
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._sweep_at = max(
            self._SWEEP_AT_LEAST, 2 * (len(self._outputs) + len(self._waiting) + len(self.aliases))
        )
