"""Leaving a model as it was, after its forward has run for a look at it.

A forward may do more than compute: fill caches, move a queue on, count in Python, write to buffers and even
to parameters, draw random numbers. What a model holds is put back in place, and it is not a copy that runs:
a trace must know the modules themselves, not every model can be copied, and a copy takes memory. Parameters
are copied only when an op is about to write to them, so that a large model is not held twice.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_CONTAINERS = (
    OrderedDict,
    dict,
    list,
    set,
    deque,
)  # parameters, buffers, modules and hooks are in some of them
# Namespaces that a model's own code makes, besides its own classes.
_OWN_PACKAGES = frozenset({"__main__", "types", "argparse"})

Undo = Callable[[], None]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back, at the end, all that `model` held at the beginning, by identity and by value.

    Attributes, training flags, hooks and classes of its modules; containers, and objects of its own code,
    in its attributes, however deep; data attributes of its modules' classes; what its hooks, where they are
    plain functions, hold in their closures and name in their globals; tensors, their `grad` and
    `requires_grad`; the random states of torch, Python and, where it is loaded, NumPy. Objects of other
    packages (a logger, say) and the world outside are left alone. What an op makes of a parameter without
    saying in its schema that it writes is not seen.
    """
    before = _Before(model)
    torch.clear_autocast_cache()  # in which casts of weights stay as long as its region
    try:
        with before.journal:
            yield
    finally:
        before.put_back()
        torch.clear_autocast_cache()


class _Before:
    """What a model holds, and how to put that back."""

    def __init__(self, model: nn.Module):
        self.journal = _Journal()
        self._undo = contextlib.ExitStack()
        for undo in _random_states():
            self._undo.callback(undo)
        self._seen: dict[int, object] = {}  # holds the objects, so that their ids stay theirs
        packages = {_package(type(module)) for module in model.modules()}
        self._own = (packages - {"torch"}) | _OWN_PACKAGES
        # of scripted modules the tensors are in no attribute
        todo: list[object] = [model, *model.modules(), *model.parameters(), *model.buffers()]
        self._buffers = {id(tensor) for tensor in model.buffers()}
        with torch._C.DisableTorchFunction():  # tensors of all kinds are looked at as what they are
            while todo:
                value = todo.pop()
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    todo += self._note(value)

    def put_back(self) -> None:
        with torch._C.DisableTorchFunction(), self._undo:  # which goes on where one of them raises
            self.journal.put_back()

    def _note(self, value: object) -> Iterable[object]:
        """Notes how to put `value` back, and returns what it holds."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _CONTAINERS):
            parts = self._container(value)
            return [*parts, *self._attributes(value)] if hasattr(value, "__dict__") else parts
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, nn.Module):
            self._buffers.update(map(id, (vars(value).get("_buffers") or {}).values()))
            return [*self._attributes(value), *self._class_attributes(type(value))]
        if (undo := _state(value)) is not None:
            self._undo.callback(undo)
        elif not isinstance(value, (type, types.ModuleType)) and _package(type(value)) in self._own:
            return self._attributes(value)
        return ()

    def _container(self, value: object) -> list[object]:
        # the methods of the base, which subclasses may have put more into
        base = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        held = list(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))

        def undo() -> None:
            now = list(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
            if not _same(now, held):
                base.clear(value)
                (base.update if issubclass(base, (dict, set)) else base.extend)(value, held)

        self._undo.callback(undo)
        return [part for _, part in held] if issubclass(base, dict) else held

    def _attributes(self, value: object) -> list[object]:
        kind = type(value)
        before = dict(getattr(value, "__dict__", ()))
        slots = [name for name in copyreg._slotnames(kind) if hasattr(value, name)]
        in_slots = {name: getattr(value, name) for name in slots}

        def undo() -> None:
            if type(value) is not kind:  # a lazy module that has seen an input
                value.__class__ = kind
            now = getattr(value, "__dict__", {})
            if not _same(list(now.items()), list(before.items())):
                now.clear()
                now.update(before)
            for name, held in in_slots.items():
                if getattr(value, name, None) is not held:
                    setattr(value, name, held)

        self._undo.callback(undo)
        return [*before.values(), *in_slots.values()]

    def _class_attributes(self, kind: type) -> list[object]:
        """The data that the classes of a module's own code hold: counters and caches for all instances."""
        parts: list[object] = []
        for base in kind.__mro__:
            if id(base) in self._seen or _package(base) not in self._own or _package(base) == "builtins":
                continue
            self._seen[id(base)] = base
            before = _data(base)
            self._undo.callback(_put_data_back, base, before)
            parts += before.values()
        return parts

    def _function(self, function: types.FunctionType) -> list[object]:
        """A hook, say, that counts: what it names outside of itself, of the kinds that it may count with."""
        if _package(function) == "torch":
            return []
        parts: list[object] = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            parts.append(content)
            self._undo.callback(setattr, cell, "cell_contents", content)
        outside = function.__globals__
        for name in function.__code__.co_names:
            value = outside.get(name)
            if isinstance(value, (*_CONTAINERS, int, float, Tensor)):
                parts.append(value)
                self._undo.callback(outside.__setitem__, name, value)
        return parts

    def _tensor(self, tensor: Tensor) -> list[object]:
        parts = self._attributes(tensor)
        if (storage := _storage(tensor)) is None:
            return parts
        alias, leaf = tensor.data, tensor.is_leaf
        gradient, requires_grad = (tensor.grad if leaf else None), tensor.requires_grad
        if id(tensor) in self._buffers:
            # a BatchNorm's op writes to running statistics without a word in its schema
            self.journal.save(storage)
        else:
            self.journal.protect(storage)

        def undo() -> None:
            if _place(tensor) != _place(alias):
                tensor.data = alias
            if leaf and tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._undo.callback(undo)
        return [*parts, gradient]


class _Journal(TorchDispatchMode):
    """Copies a protected storage when an op is about to write to it."""

    def __init__(self):
        super().__init__()
        self._protected: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def protect(self, storage: torch.UntypedStorage) -> None:
        self._protected.setdefault(storage._cdata, storage)

    def save(self, storage: torch.UntypedStorage) -> None:
        self.protect(storage)
        if storage._cdata not in self._saved and storage.device.type != "meta":
            self._saved[storage._cdata] = storage.clone()

    def put_back(self) -> None:
        for address, saved in self._saved.items():
            storage = self._protected[address]
            if storage.nbytes() == saved.nbytes() and not torch.equal(_bytes(storage), _bytes(saved)):
                storage.copy_(saved)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for index, name in _written(func):
            value = kwargs.get(name, args[index] if index < len(args) else None)
            for tensor in pytree.tree_leaves(value):
                storage = _storage(tensor) if isinstance(tensor, Tensor) else None
                if storage is not None and storage._cdata in self._protected:
                    self.save(storage)
        return func(*args, **kwargs)


@functools.cache
def _written(func: object) -> list[tuple[int, str]]:
    """Position and name of the arguments that an op writes to."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return [
        (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for one that has none of its own, a wrapper or a sparse one."""
    if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
        return None
    return tensor.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _place(tensor: Tensor) -> tuple:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
    )


def _same(now: list, before: list) -> bool:
    """Whether the same objects, or pairs of them, come in the same order."""
    if len(now) != len(before):
        return False
    for a, b in zip(now, before, strict=True):
        pair = type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2
        if not (a is b or (pair and a[0] is b[0] and a[1] is b[1])):
            return False
    return True


def _package(kind: object) -> str:
    return (getattr(kind, "__module__", None) or "").split(".")[0]


def _data(kind: type) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }


def _put_data_back(kind: type, before: dict[str, object]) -> None:
    now = _data(kind)
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(kind, name, value)


def _random_states() -> list[Undo]:
    undo = [functools.partial(torch.set_rng_state, torch.get_rng_state())]
    undo.append(functools.partial(random.setstate, random.getstate()))
    if torch.cuda.is_initialized():
        undo.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        undo.append(functools.partial(numpy.set_state, numpy.get_state()))
    return undo


def _state(value: object) -> Undo | None:
    """How to put back an object whose state is in none of its attributes."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if isinstance(value, getattr(numpy, "ndarray", ())):
        return functools.partial(numpy.copyto, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, getattr(getattr(numpy, "random", None), "Generator", ())):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None
