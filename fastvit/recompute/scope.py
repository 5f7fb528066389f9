"""One recompute scope: the hooks under which saved tensors become recipes.

Where a tensor that autograd saves can be rebuilt from tensors that other ops keep, the pack hook returns a
recipe; the unpack hook follows it. The op and the inputs of a tensor come from autograd's graph (graph.py),
and what the graph lacks from the ops' calls (calls.py).

No tensor is kept only for a recipe, except copies of small leaves and masks. An ingredient may be saved
later than the tensor that needs it: queries and keys are saved before the values with which they share
memory. The recipe holds the tensor until then. A rebuilt tensor is held only while another reader waits. All
references are weak: a scope holds no tensors but those that wait as above.

A training loop runs the same ops again and again. So whether a tensor is worth its recipe is decided once
(places.py). The recipe itself is read from the graph of every forward.

Source of the idea: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import rules  # noqa: F401  # fills the tables of graph
from .calls import Calls, Told
from .graph import value_of
from .kept import SMALLEST, Kept, Unread
from .masks import Bits
from .places import Place
from .policy import Policy
from .saved import Recipe, unpack
from .values import VALUE, VERSION, Copied, Ingredient, Value
from .views import VIEWS, leads_to, of_unsafe_view

_MASK = "dropout_mask, a bit an element"
_autograd = torch._C._autograd
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_function_stack
# Most bytes that a recipe moves for each byte of the tensor. In half precision and under autocast matrix
# products are so fast that long recipes show in a step's time: a LayerNorm and a cast move 7, a LayerScale, a
# residual sum and a cast 11, a rotary embedding and a cast 26. In float32 residual sums of BatchNorms, each
# made of the one before, move 5 more each.
_MOST_MOVED, _MOST_MOVED_IN_HALF = 24, 10

Hooks = tuple[Callable, Callable]
Look = Callable[[Kept | Recipe | Unread, Tensor], None]


def top_hooks() -> Hooks | None:
    """The saved-tensor hooks that autograd calls now."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _of_unknown(tensor: Tensor) -> Kept:
    """Keeps a tensor that was written to in unknown ways: no ingredient, as it may be written to so again."""
    kept = Kept(tensor)
    kept.is_unfit = True
    return kept


class Scope(Told):
    """One open scope: its pack hook, and what it knows of the forward that runs."""

    _SWEEP_AT_LEAST = 64

    def __init__(self, policy: Policy, block: str, place: Place, look: Look | None = None):
        super().__init__(policy)
        self.block = block  # the block whose forward runs
        self.place = place  # how far it has got
        self._outer: Hooks | None = None  # hooks around this scope, to which kept tensors are handed on
        self._sweep_at = self._SWEEP_AT_LEAST
        self._waiting: list[weakref.ref[Recipe]] = []
        self._calls = Calls(self)
        self._look = look  # called with what an op saves: the packed object, the tensor

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

    def pack(self, tensor: Tensor) -> Kept | Recipe | Unread:
        if _modes():  # they would see each attribute that is read here
            with torch._C.DisableTorchFunction():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Kept | Recipe | Unread:
        node = tensor.grad_fn
        packed: Kept | Recipe | Unread | None = None
        if type(tensor) is Tensor:
            if node is not None:
                is_unread = self.unread is not None and self.unread == tensor.size()
                packed = Unread(tensor) if is_unread else self._of_graph(tensor, node)
            elif self.dropout is not None:
                packed = self._mask(tensor, self.dropout)
        if packed is None:
            packed = Kept(tensor)
        if self._outer is not None and type(packed) is Kept:
            packed.hand_on(self._outer)
        if self._look is not None:
            self._look(packed, tensor)
        return packed

    def _mask(self, tensor: Tensor, p: float) -> Recipe | None:
        """A mask of a bit an element in place of the factor. Drawing it again takes ten times as long."""
        if tensor.nbytes < SMALLEST:
            return None
        self.place = self.place.next((_MASK, tensor.size(), tensor.dtype))
        site = self.block, _MASK, self.place.depth
        if self.policy.against(site):
            return None
        dtype, bits = tensor.dtype, Bits(tensor != 0)
        value = Value()
        value.size = tensor.nbytes
        value.function = lambda _: bits.mask() if dtype is torch.bool else bits.mask().to(dtype).div_(1 - p)
        value.arguments = (Copied(Kept(bits.packed)),)
        value.name, value.site, value.is_rebuilt = _MASK, site, True
        value.nbytes = tensor.nbytes - bits.packed.nbytes
        recipe = Recipe(value, tensor, tensor)
        recipe.settle()
        return recipe

    def _of_graph(self, tensor: Tensor, node) -> Kept | Recipe:
        base = tensor._base
        if base is None:
            base, made = tensor, node
        else:
            made = base.grad_fn
            if made is None:  # a view of a leaf, such as a transposed weight
                return Kept(tensor, is_input=node.name() in VIEWS)
        # The graph shows neither which of several results this is, nor a cast of the memory.
        if base.output_nr or base.dtype is not tensor.dtype:
            return Kept(tensor)
        if base._version and not self._is_written_once(base, made):
            return _of_unknown(tensor)
        if tensor.layout is not torch.strided or base.is_nested or _transforms() is not None:
            return Kept(tensor)
        if tensor is not base and not leads_to(node, tensor.output_nr, made):
            return Kept(tensor)
        metadata = made.metadata
        value = metadata.get(VALUE)
        if value is not None and value.keeper is not None:
            kept = value.keeper()
            if kept is not None:
                if tensor is base:
                    kept.restore(tensor)
                if kept.is_intact():  # its storage is kept already
                    return kept.again(tensor)
        # The values of a conjugate or negative view differ from those in memory.
        if tensor is not base and (tensor.is_neg() or tensor.is_conj()):
            return Kept(tensor)
        if value is None or value.is_rebuilt is None:
            place = self.place = self.place.next((of_unsafe_view(made).name(), base.size(), base.dtype))
            if place.is_rebuilt is None or self._look is not None:
                value = value or value_of(made, self.policy, base)
                self._decide(value, base, place)
            elif place.is_rebuilt:
                value = value or value_of(made, self.policy, base)
                value.nbytes, value.is_rebuilt = base.nbytes, value.function is not None
            else:
                if value is None:
                    value = metadata[VALUE] = Value()
                value.is_rebuilt = False
        if value.is_rebuilt:
            recipe = Recipe(value, tensor, base)
            missing = recipe.settle()
            if missing is not None:
                recipe.kept = Kept(tensor)
                self._wait(recipe, missing)
            return recipe
        if not value.is_ingredient:
            return _of_unknown(tensor)
        kept = Kept(tensor)
        if tensor is not base:
            if self._outer is not None:  # hooks around hold the view, and not its base
                return kept
            value.lies_in(base)
        self._is_kept(value, kept)
        return kept

    def _decide(self, value: Value, base: Tensor, place: Place) -> None:
        """Whether `value` is rebuilt, which an op saves for the first time."""
        value.nbytes = base.nbytes
        value.site = self.block, value.name, place.depth
        against = value.against()
        if not against:
            share = value.price().moved / (value.size or 1)
            half = base.element_size() == 2 or torch._C._is_any_autocast_enabled()
            if share > (_MOST_MOVED_IN_HALF if half else _MOST_MOVED) and not self.policy.products:
                against = f"its recipe moves {share:.0f} bytes for each that it frees"
            value.unknown = against = against or self.policy.against(value.site)
        value.is_rebuilt = not against
        if value.lasts:
            place.is_rebuilt = value.is_rebuilt

    def _is_written_once(self, base: Tensor, node) -> bool:
        """Whether all writes to `base` are ops in place that the graph shows, the last one being `node`."""
        written = self.written
        if written is not None and written[0] is base and written[1] == base._version:
            node.metadata[VERSION] = base._version  # the op saves its result before its call returns
        return node.metadata.get(VERSION, getattr(node, "fastvit_written", None)) == base._version

    def _wait(self, recipe: Recipe, missing: Value | Ingredient) -> None:
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
        if len(self._waiting) + len(self.aliases) < self._sweep_at:
            return
        self.aliases.sweep()
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._sweep_at = max(self._SWEEP_AT_LEAST, 2 * (len(self._waiting) + len(self.aliases)))
