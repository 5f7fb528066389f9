"""Rebuilding the outputs of BatchNormAct in the backward pass instead of keeping them for it.

Inside `recompute_scope()` autograd hands every tensor that an op saves for backward to a pack hook
(torch.autograd.graph.saved_tensors_hooks). Where it lies in the output y of a layer that can rebuild it, the
hook keeps a recipe in its place: the tensors that the layer has saved anyway, and which part of y was meant.
The unpack hook follows the recipe, by one pass over the layer's input.

Nothing is taken for y by its address. A weak reference to y's storage is held, so the address cannot be
handed out again while the storage is looked for; the version counter tells whether y was written since; and a
y that the layer's own saved tensors can no longer rebuild is kept like any other tensor. All other references
are weak too: the scope keeps nothing alive.

Source of the idea: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

_autograd = torch._C._autograd


@contextlib.contextmanager
def recompute_scope() -> Iterator[None]:
    """Around a forward: BatchNormAct layers with memory="recompute" leave no output behind.

        with fastvit.recompute_scope():
            loss = criterion(model(x), target)
        loss.backward()

    The backward may run inside or outside. Gradients have the bits they have without the scope. An output is
    kept as it would be without when its saved copy was made after a write to it, is of another dtype (as
    autocast makes it), or would have to be rebuilt from something that is itself to be rebuilt. Scopes nest;
    the inner ones do nothing. Inside other saved-tensor hooks (non-reentrant checkpointing, save_on_cpu) a
    scope does nothing either: they go on deciding what is kept. Nor does it under torch.compile.

    A write through `tensor.data` or from an op that does not count versions goes unnoticed, as it does
    everywhere in autograd.
    """
    if torch.compiler.is_compiling() or not _autograd._saved_tensors_hooks_is_enabled() or _top_hooks():
        yield
        return
    scope = _Scope()
    with saved_tensors_hooks(scope.pack, scope.unpack):
        yield


def active_scope() -> "_Scope | None":
    """The scope whose hooks autograd would call, if it is one's turn."""
    if torch.compiler.is_compiling():
        return None
    hooks = _top_hooks()
    scope = getattr(hooks[0], "__self__", None) if hooks else None
    return scope if isinstance(scope, _Scope) else None


def _top_hooks() -> tuple[Callable, Callable] | None:
    return _autograd._top_saved_tensors_default_hooks(True)


class _Kept:
    """A saved tensor, with the check that autograd leaves to whoever installs hooks."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor):
        # An op's own output would keep the op alive, which keeps this alive.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def is_intact(self) -> bool:
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        if not self.is_intact():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


class _Source:
    """What y is rebuilt from, held by all who have saved y or a part of it."""

    def __init__(self, output: "_Output", inputs: list[_Kept]):
        self.inputs = inputs
        self.rebuild = output.rebuild
        self.original, self.version, self.alive = output.tensor, output.version, output.alive
        self.rebuilt: StorageWeakRef | None = None

    def storage(self) -> torch.UntypedStorage:
        """y's memory: its own if someone else kept that, or as rebuilt for another reader, or rebuilt."""
        y = self.original()
        if y is not None and y._version == self.version and y.untyped_storage()._cdata == self.alive.cdata:
            return y.untyped_storage()
        storage = self.rebuilt and torch.UntypedStorage._new_with_weak_ptr(self.rebuilt.cdata)
        if storage is None:
            with torch.no_grad():
                storage = self.rebuild(*(kept.unpack() for kept in self.inputs)).untyped_storage()
            self.rebuilt = StorageWeakRef(storage)
        return storage


class _Recipe:
    """Stands for a saved tensor that lies in y: all of it, or a view."""

    __slots__ = ("geometry", "like", "source")

    def __init__(self, source: _Source, tensor: Tensor):
        self.source = source
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.like = tensor.new_empty(0)

    def unpack(self) -> Tensor:
        with torch.no_grad():
            return self.like.new_empty(0).set_(self.source.storage(), *self.geometry)


class _Output:
    """One y that can be rebuilt for as long as what its layer saved lives, unwritten; holds none of it."""

    def __init__(self, y: Tensor, inputs: list[_Kept], rebuild: Callable[..., Tensor]):
        self.alive = StorageWeakRef(y.untyped_storage())
        self.tensor, self.version, self.dtype = TensorWeakRef(y), y._version, y.dtype
        self.inputs = [weakref.ref(kept) for kept in inputs]
        self.rebuild = rebuild
        self._source: Callable[[], _Source | None] = lambda: None

    def source(self) -> _Source | None:
        """The same one for every reader; None when y cannot be rebuilt any more."""
        inputs = [reference() for reference in self.inputs]
        if not all(kept is not None and kept.is_intact() for kept in inputs):
            return None
        source = self._source()
        if source is None:
            source = _Source(self, inputs)
            self._source = weakref.ref(source)
        return source


class _Scope:
    _SWEEP_AT_LEAST = 64

    def __init__(self):
        self._outputs: dict[int, _Output] = {}  # by the address of y's storage, which `alive` reserves
        self._sweep_at = self._SWEEP_AT_LEAST
        self._recorded: list[_Kept | _Recipe] | None = None

    def pack(self, tensor: Tensor) -> _Kept | _Recipe:
        packed = self._recipe(tensor) or _Kept(tensor)
        if self._recorded is not None:
            self._recorded.append(packed)
        return packed

    @staticmethod
    def unpack(packed: _Kept | _Recipe) -> Tensor:
        return packed.unpack()

    def call(self, layer: Callable[[], Tensor], rebuild: Callable[..., Tensor]) -> Tensor:
        """y = layer(), known from then on as what `rebuild` makes of the tensors that `layer` saves, in the
        order in which it saves them."""
        self._recorded = recorded = []
        try:
            y = layer()
        finally:
            self._recorded = None
        # From a recipe there would be recipes of recipes: work that grows with the square of their number.
        if y.requires_grad and all(type(packed) is _Kept for packed in recorded):
            self._sweep()
            storage = y.untyped_storage()
            self._outputs[storage._cdata] = _Output(y, recorded, rebuild)
        return y

    def _recipe(self, tensor: Tensor) -> _Recipe | None:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not self._outputs:
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        output = self._outputs.get(tensor.untyped_storage()._cdata)
        if (
            output is None
            or tensor._version != output.version
            or tensor.dtype != output.dtype
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return None
        source = output.source()
        return None if source is None else _Recipe(source, tensor)

    def _sweep(self) -> None:
        """Forgets outputs that are gone, now and then: a scope may stand around a whole training loop."""
        if len(self._outputs) < self._sweep_at:
            return
        self._outputs = {
            address: output for address, output in self._outputs.items() if not output.alive.expired()
        }
        self._sweep_at = max(self._SWEEP_AT_LEAST, 2 * len(self._outputs))
