"""Restores a model after a trial run of its forward.

A forward may have side effects: fill caches, advance a queue, count in Python, write to buffers and even to
parameters, draw random numbers. The model itself runs, not a copy, because a trace needs the modules
themselves, not every model can be copied, and a copy takes memory. A parameter is copied only when an op is
about to write to it, so that a large model is not held twice.
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

_CONTAINERS = (OrderedDict, dict, list, set, deque)  # they hold parameters, buffers, modules and hooks too
# Modules whose classes a model's code often uses as namespaces.
_OWN_PACKAGES = frozenset({"__main__", "types", "argparse"})

Undo = Callable[[], None]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores at its end the state that `model` has at its beginning, by identity and by value.

    Restored are attributes, training flags, hooks and classes of modules; containers and objects of the
    model's own code in attributes, at any depth; data attributes of the modules' classes; values in the
    closures and globals of hooks that are plain functions; tensors, their `grad` and `requires_grad`; the
    random states of torch, Python and, where it is loaded, NumPy. Objects of other packages (a logger, for
    example) and effects outside of the process are not. A write to a parameter by an op whose schema does
    not say that it writes is missed.
    """
    before = _Before(model)
    torch.clear_autocast_cache()  # it holds casts of weights until its region ends
    try:
        with before.journal:
            yield
    finally:
        before.restore()
        torch.clear_autocast_cache()


class _Before:
    """The state of a model, and the functions that restore it."""

    def __init__(self, model: nn.Module):
        self.journal = _Journal()
        self._undo = contextlib.ExitStack()
        for undo in _random_states():
            self._undo.callback(undo)
        self._seen: dict[int, object] = {}  # holds the objects, so that no id is reused
        packages = {_package(type(module)) for module in model.modules()}
        self._own = (packages - {"torch"}) | _OWN_PACKAGES
        # The tensors of scripted modules are in no attribute.
        todo: list[object] = [model, *model.modules(), *model.parameters(), *model.buffers()]
        self._buffers = {id(tensor) for tensor in model.buffers()}
        with torch._C.DisableTorchFunction():  # subclasses of Tensor are read like plain tensors
            while todo:
                value = todo.pop()
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    todo += self._note(value)

    def restore(self) -> None:
        with torch._C.DisableTorchFunction(), self._undo:  # an ExitStack continues after an error
            self.journal.restore()

    def _note(self, value: object) -> Iterable[object]:
        """Records how to restore `value`, and returns the objects in it."""
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
        # Methods of the base class, since a subclass may override them with side effects.
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
            if type(value) is not kind:  # a lazy module changes class at its first input
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
        """Data attributes of the classes of the model's own code: counters and caches of all instances."""
        parts: list[object] = []
        for base in kind.__mro__:
            if id(base) in self._seen or _package(base) not in self._own or _package(base) == "builtins":
                continue
            self._seen[id(base)] = base
            before = _data(base)
            self._undo.callback(_restore_data, base, before)
            parts += before.values()
        return parts

    def _function(self, function: types.FunctionType) -> list[object]:
        """Values in the closure and the globals of a function: a hook may count there."""
        if _package(function) == "torch":
            return []
        parts: list[object] = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
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
            # batch_norm writes to running statistics, and its schema does not declare it.
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

    def restore(self) -> None:
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
    """The storage of a tensor; None for a wrapper or a sparse tensor, which have none."""
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
    """Whether both lists have the same objects, or pairs of the same objects, in the same order."""
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


def _restore_data(kind: type, before: dict[str, object]) -> None:
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
    """How to restore an object whose state is not in its attributes; None for any other."""
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
