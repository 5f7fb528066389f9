"""A step with the example inputs: how modules are called, how large outputs are, what backward needs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._norm import SharesGroup
from .calls import Arguments, Signature
from .untouched import untouched

_WRAPPERS = ("torch.nn.parallel", "torch.distributed")


@dataclass
class Observed:
    """What one forward showed; empty where none was run."""

    sizes: dict[nn.Module, int] = field(default_factory=dict)  # bytes of each layer's outputs, over its calls
    # The arguments of each module's first call that a trace takes as they are.
    constants: dict[nn.Module, dict[str, object]] = field(default_factory=dict)
    kept: int | None = None  # bytes that a training forward keeps, its result included
    unmeasured: str = ""  # why that is not known


def observe(model: nn.Module, layers: Iterable[nn.Module], arguments: Arguments) -> Observed:
    """Runs `model`, as it is, for a training forward; in evaluation where that is not possible.

    What autograd saves is counted and let go, so this takes no more memory than evaluation does.
    """
    observed = Observed(unmeasured=_against_measuring(model))
    if not observed.unmeasured:
        try:
            with untouched(model), _training(model), _noted(model, layers, observed):
                observed.kept = _kept_bytes(model, arguments, dry=True)
            return observed
        except Exception as error:  # one that takes targets, say
            observed = Observed(unmeasured=f"a training forward raised {type(error).__name__}")
    with untouched(model), _evaluation(model), torch.no_grad(), _noted(model, layers, observed):
        args, kwargs = _copied(model, arguments)
        model(*args, **kwargs)
    return observed


def kept_bytes(
    model: nn.Module, arguments: Arguments, look: Callable[[object], None] | None = None
) -> tuple[int, set[nn.Module]]:
    """Bytes that a training forward keeps, its result included, and the converted layers that ran as such.

    `look` is shown the result, whose graph stands.
    """
    with untouched(model), _training(model):
        kept = _kept_bytes(model, arguments, look=look)
        return kept, {module for module in model.modules() if vars(module).get("_ran")}


def _against_measuring(model: nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return "the model is on the meta device, where nothing is computed"
    for module in model.modules():
        if type(module).__module__.startswith(_WRAPPERS):  # their forward begins what a backward ends
            return f"a {type(module).__name__} cannot be run for a look at it"
    return ""


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """In the modes that the user chose for training, or all in training; `untouched` puts back what was."""
    ranks = distributed.is_available() and distributed.is_initialized()
    whole = model.training
    for module in model.modules():
        # no rank waits here for others, who may not convert; in evaluation such a layer keeps as much
        synchronised = ranks and isinstance(module, (nn.SyncBatchNorm, SharesGroup))
        vars(module)["training"] = (module.training or not whole) and not synchronised
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    for module in model.modules():
        vars(module)["training"] = False
    yield


@contextlib.contextmanager
def _noted(model: nn.Module, layers: Iterable[nn.Module], observed: Observed) -> Iterator[None]:
    """Hooks that write into `observed`; `untouched` takes them away."""

    def call(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        if module not in observed.constants:
            observed.constants[module] = Signature(type(module).forward).constants(args, kwargs)

    def size(layer: nn.Module, _: tuple, output: Tensor) -> None:
        observed.sizes[layer] = observed.sizes.get(layer, 0) + output.numel() * output.element_size()

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks, and is not traced
            module.register_forward_pre_hook(call, with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(size)
    yield


def _copied(model: nn.Module, arguments: Arguments) -> Arguments:
    """Inputs for one run: a forward may overwrite them."""
    device = "meta" if all(p.is_meta for p in model.parameters()) else None

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, copied, arguments)


def _kept_bytes(
    model: nn.Module, arguments: Arguments, dry: bool = False, look: Callable[[object], None] | None = None
) -> int:
    args, kwargs = _copied(model, arguments)
    made = _Made()
    hooks = saved_tensors_hooks(made.let_go, _refuse) if dry else contextlib.nullcontext()
    with made, hooks:
        result = model(*args, **kwargs)
        kept = made.kept_bytes()
    if look is not None:
        look(result)
    del result
    return kept


class _Saved:
    """Stands for a tensor that autograd has saved, and lives as long as what would need it."""

    def __init__(self, address: int):
        self.address = address


def _refuse(_: _Saved) -> Tensor:
    raise NotImplementedError("a forward that runs a backward itself cannot be measured")


class _Made(TorchDispatchMode):
    """The memory that ops take while it is active, held weakly: what is left at the end is what is kept.

    Unlike the allocator's count it does not take caches of libraries for what the model keeps, and it can be
    had while somebody else profiles.
    """

    def __init__(self):
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # the reference keeps the address from others
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {address for address, _ in _storages((args, kwargs))}
        for address, storage in _storages(result):
            if address not in known and address not in self._made:
                self._made[address] = StorageWeakRef(storage), storage.nbytes()
        return result

    def let_go(self, tensor: Tensor) -> _Saved:
        saved = _Saved(next((address for address, _ in _storages(tensor)), 0))
        self._saved.add(saved)
        return saved

    def kept_bytes(self) -> int:
        needed = {saved.address for saved in self._saved}
        return sum(
            size
            for address, (storage, size) in self._made.items()
            if address in needed or not storage.expired()
        )


def _storages(values: object) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and torch._C._has_storage(leaf):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage
