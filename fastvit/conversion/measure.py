"""Measures a training forward: the bytes that it keeps for backward, and which tensors these are.

The bytes are those of every storage that an op allocated and that is alive when the forward ends. The tensors
are read from the autograd graph. A tensor is named after the module whose op saved it: the module that has
that op's parameters, or, for an op without parameters, the next module behind it.
"""

from __future__ import annotations

import contextlib
import math
import re
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
from ..recompute.graph import KEY
from ..recompute.saved import Kept, Recipe
from ..recompute.values import Value
from .calls import Arguments, Signature, plain_output
from .report import TensorReport
from .untouched import untouched

_WRAPPERS = ("torch.nn.parallel", "torch.distributed")
_LEAF = "torch::autograd::AccumulateGrad"
_NUMBER = re.compile(r"(?<![^. ])\d+(?![^.])")  # a whole part of a name
_PASSING = ("TBackward", "ViewBackward", "ToCopyBackward", "TransposeBackward", "PermuteBackward", "Reshape")


@dataclass
class Observed:
    """The results of one forward; empty where none was run."""

    sizes: dict[nn.Module, int] = field(default_factory=dict)  # bytes of each layer's outputs, over its calls
    # For each module, the arguments of its first call that a trace takes as constants.
    constants: dict[nn.Module, dict[str, object]] = field(default_factory=dict)
    kept: int | None = None  # bytes that a training forward keeps, its result included
    unmeasured: str = ""  # why `kept` is None


def observe(model: nn.Module, layers: Iterable[nn.Module], arguments: Arguments) -> Observed:
    """Runs a training forward of `model` as it is; a forward in evaluation where training is not possible.

    Saved tensors are counted and dropped, so this takes no more memory than evaluation does.
    """
    observed = Observed(unmeasured=_against_measuring(model))
    if not observed.unmeasured:
        try:
            with untouched(model), _training(model), _noted(model, layers, observed):
                observed.kept = _kept_bytes(model, arguments, dry=True)
            return observed
        except Exception as error:  # a forward that takes targets, for example
            observed = Observed(unmeasured=f"a training forward raised {type(error).__name__}")
    with untouched(model), torch.no_grad(), _noted(model, layers, observed):
        for module in model.modules():
            vars(module)["training"] = False
        args, kwargs = _copied(model, arguments)
        model(*args, **kwargs)
    return observed


def kept_bytes(
    model: nn.Module, arguments: Arguments, look: Callable[[object], None] | None = None
) -> tuple[int, set[nn.Module]]:
    """Bytes that a training forward keeps, its result included, and the layers that ran as converted.

    `look` is called with the result while its graph is alive.
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
            return f"the forward of a {type(module).__name__} cannot be run without its backward"
    return ""


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The modes that the user set for training, or all modules in training; `untouched` restores them."""
    ranks = distributed.is_available() and distributed.is_initialized()
    whole = model.training
    for module in model.modules():
        # Other ranks may not convert, so no exchange may run here. In evaluation such a layer keeps as much.
        synchronised = ranks and isinstance(module, (nn.SyncBatchNorm, SharesGroup))
        vars(module)["training"] = (module.training or not whole) and not synchronised
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def _noted(model: nn.Module, layers: Iterable[nn.Module], observed: Observed) -> Iterator[None]:
    """Registers hooks that write into `observed`; `untouched` removes them."""

    def call(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        if module not in observed.constants:
            observed.constants[module] = Signature(type(module).forward).constants(args, kwargs)

    def size(layer: nn.Module, _: tuple, output: Tensor) -> None:
        observed.sizes[layer] = observed.sizes.get(layer, 0) + output.numel() * output.element_size()

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and is not traced
            module.register_forward_pre_hook(call, with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(size)
    yield


def _copied(model: nn.Module, arguments: Arguments) -> Arguments:
    """Copies of the inputs, since a forward may overwrite them."""
    device = "meta" if all(p.is_meta for p in model.parameters()) else None

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, copied, arguments)


def _kept_bytes(
    model: nn.Module, arguments: Arguments, dry: bool = False, look: Callable[[object], None] | None = None
) -> int:
    args, kwargs = _copied(model, arguments)
    allocated = _Allocated()
    hooks = saved_tensors_hooks(allocated.drop, _refuse) if dry else contextlib.nullcontext()
    with allocated, hooks:
        result = model(*args, **kwargs)
        torch.clear_autocast_cache()  # it holds casts of weights, which a backward may not need
        kept = allocated.kept_bytes()
    if look is not None:
        look(result)
    return kept


class _Placeholder:
    """Stands for a dropped saved tensor; lives as long as the graph needs that tensor."""

    def __init__(self, address: int):
        self.address = address


def _refuse(_: _Placeholder) -> Tensor:
    raise NotImplementedError("a forward that runs a backward itself cannot be measured")


class _Allocated(TorchDispatchMode):
    """Weak references to the storages that ops allocate while the mode is active.

    Unlike the allocator's count this excludes caches of libraries, and it works while a profiler runs.
    """

    def __init__(self):
        super().__init__()
        # The reference reserves the address, so that no later storage has it.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._dropped: weakref.WeakSet[_Placeholder] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {address for address, _ in _storages((args, kwargs))}
        for address, storage in _storages(result):
            if address not in known and address not in self._storages:
                self._storages[address] = StorageWeakRef(storage), storage.nbytes()
        return result

    def drop(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder(next((address for address, _ in _storages(tensor)), 0))
        self._dropped.add(placeholder)
        return placeholder

    def kept_bytes(self) -> int:
        needed = {placeholder.address for placeholder in self._dropped}
        return sum(
            size
            for address, (storage, size) in self._storages.items()
            if address in needed or not storage.expired()
        )


def _storages(values: object) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and torch._C._has_storage(leaf):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def account(result: object, model: nn.Module) -> list[TensorReport]:
    """The tensors that the graph of `result`, returned by a forward of `model`, saves; largest first."""
    graph = _Graph(result, model)
    groups: dict[tuple, list[int]] = {}
    for names, kept, rebuilt, reason in graph.entries():
        total = groups.setdefault((names, reason), [0, 0, 0])
        for i, more in enumerate((1, kept, rebuilt)):
            total[i] += more
    rows = [TensorReport(names, *total, reason) for (names, reason), total in groups.items()]
    return sorted(rows, key=lambda row: (-row.rebuilt_bytes, -row.kept_bytes, row.names))


def rebuilt_values(result: object, model: nn.Module) -> list[Value]:
    """The values that the backward of `result` rebuilds, each once."""
    return list(_Graph(result, model).rebuilt)


class _Graph:
    """The saved tensors of an autograd graph."""

    def __init__(self, result: object, model: nn.Module):
        self.parameters = {parameter: name for name, parameter in model.named_parameters()}
        of_model = [*model.parameters(), *model.buffers()]
        self.of_model = {t.untyped_storage()._cdata for t in of_model if torch._C._has_storage(t)}
        self.readers: dict[object, set[str]] = {}  # of a kept storage, or of a rebuilt value
        self.kept: dict[int, tuple[Kept, bool]] = {}  # by storage; whether it has a recipe that waits
        self.rebuilt: dict[Value, Recipe] = {}
        self.masks: set[int] = set()  # dropout's, by storage
        self.copies: set[int] = set()  # storages that only recipes hold
        self.values: dict[int, Value] = {}  # by the storage of the kept tensor
        self._walk(result)

    def _walk(self, result: object) -> None:
        leaves = pytree.tree_leaves(plain_output(result))
        todo = [(t.grad_fn, "the result") for t in leaves if isinstance(t, Tensor)]
        seen = set()
        while todo:
            node, behind = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            module = self._module(node)
            label = module or f"{op_name(node.name())} before {behind}"
            for packed in _saved_by(node):
                self._note(packed, label, node.name())
            value = node.metadata.get(KEY)
            if isinstance(value, Value) and (kept := value.kept()) is not None:
                self.values[kept.tensor.untyped_storage()._cdata] = value
            todo += [(edge[0], module or behind) for edge in reversed(node.next_functions)]

    def _note(self, packed: Kept | Recipe, label: str, op: str) -> None:
        if type(packed) is Recipe and packed.kept is None:
            self.rebuilt[packed.value] = packed
            self._read(packed.value, label)
            return
        kept = packed if type(packed) is Kept else packed.kept
        tensor = kept.tensor
        if not isinstance(tensor, Tensor) or not torch._C._has_storage(tensor):
            return
        address = tensor.untyped_storage()._cdata
        if address in self.of_model:
            return
        self.kept.setdefault(address, (kept, type(packed) is Recipe))
        if op == "NativeDropoutBackward0" and tensor.dtype is torch.bool:
            self.masks.add(address)
        elif op == "MulBackward0" and type(packed) is Kept and _is_mask(tensor):
            self.masks.add(address)
        self._read(address, label)

    def _read(self, key: object, label: str) -> None:
        self.readers.setdefault(key, set()).add(label)

    def _module(self, node) -> str | None:
        """The module whose parameter is an input of the op."""
        for source, _ in node.next_functions:
            for _ in range(3):
                if source is None or not source.name().startswith(_PASSING) or not source.next_functions:
                    break
                source = source.next_functions[0][0]
            if source is not None and source.name() == _LEAF:
                name = self.parameters.get(source.variable)
                if name is not None:
                    return name.rpartition(".")[0] or name
        return None

    def entries(self) -> Iterator[tuple[tuple[str, ...], int, int, str]]:
        # Fewest ingredients first: a tensor that only recipes hold counts once, with the simplest of them.
        for value, recipe in sorted(self.rebuilt.items(), key=lambda item: len(item[1].source.ingredients)):
            inputs = [self._names(kept.tensor.untyped_storage()._cdata) for kept in recipe.source.ingredients]
            inputs = [" and ".join(names) for names in dict.fromkeys(inputs) if names]
            own = [kept for kept in recipe.source.ingredients if self._only_for_recipes(kept)]
            source = f" of what {'; '.join(inputs)} saved" if inputs else ""
            copies = sum(kept.tensor.nbytes for kept in own)
            yield self._names(value), copies, value.nbytes, f"{op_name(value.name)}{source}"
        for address, (kept, waited) in self.kept.items():
            size = kept.tensor.untyped_storage().nbytes()
            value = self.values.get(address)
            if value is None and address in self.masks:
                reason = "dropout's mask, not of an nn.Dropout"
            else:
                reason = self._against(value, waited)
            yield self._names(address), size, 0, reason

    def _only_for_recipes(self, kept: Kept) -> bool:
        """Whether no op saved it (a byte mask of dropout, for example) and it was not counted before."""
        address = kept.tensor.untyped_storage()._cdata
        if address in self.of_model or address in self.kept or address in self.copies:
            return False
        self.copies.add(address)
        return True

    def _names(self, key: object) -> tuple[str, ...]:
        return tuple(sorted({_NUMBER.sub("*", label) for label in self.readers.get(key, ())}))

    @staticmethod
    def _against(value: Value | None, waited: bool) -> str:
        if value is None:
            return "not an op's first result, or written to"
        if waited:
            return f"an input of {op_name(value.name)} is not kept"
        return (value.against() or "saved before its inputs were known").replace(
            value.name, op_name(value.name)
        )


def _is_mask(factor: Tensor) -> bool:
    """Whether `factor` has the values of a dropout mask: 0, and 1 / (1 - p) with frequency 1 - p."""
    if not factor.is_floating_point() or not factor.numel():
        return False
    most, count = factor.max().item(), factor.numel()
    if not 1 < most < math.inf or not ((factor == 0) | (factor == most)).all():
        return False
    mean = most * torch.count_nonzero(factor).item() / count
    return abs(mean - 1) < 5 * math.sqrt((most - 1) / count) + torch.finfo(factor.dtype).eps


def op_name(name: str) -> str:
    """`GeluBackward0` is gelu."""
    plain = re.sub(r"((Function)?Backward\d*|<.*>)$", "", name.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()


def _saved_by(node) -> Iterable[Kept | Recipe]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                packed = one.data
                if type(packed) in (Kept, Recipe):
                    yield packed
