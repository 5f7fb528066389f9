"""Detects changes of a model after its trace: of the code that a forward runs, and of the values it reads.

A trace is valid as long as both are the same. `runs_as` checks a module before the trace. A `Watch` compares
at each call: the children and the class of each module; functions and plain values of those classes; and
attributes that are plain values or functions, of modules and of configuration objects in them, whose names
occur in code that a forward may run. Changes by the forward itself are accepted. Attributes of normalisation
layers, convolutions and the like are not compared: they do not change which op reads which tensor, and other
tools replace normalisation layers by others of their kind.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter, itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .adopted import Converted, References

_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, property, type,
)  # fmt: skip
_PLAIN = _VALUES + _FUNCTIONS
_CONTAINERS = (tuple, list, set, frozenset, dict)
_LONGEST = 64  # longest container whose items are compared
_NOT_COMPARED = (_NormBase, nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)


def runs_as(module: nn.Module | None) -> type:
    """The class of `module` if a call runs the forward of that class's definition; else nn.Module."""
    kind = type(module)
    if not isinstance(module, nn.Module) or "forward" in module.__dict__:
        return nn.Module
    if kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl:
        return nn.Module
    defines = next(base for base in kind.__mro__ if "forward" in vars(base))
    made_in = getattr(vars(defines)["forward"], "__globals__", {}).get("__name__")
    return kind if made_in == defines.__module__ or not _of_torch(defines) else nn.Module


def watched_globally() -> bool:
    """Whether a global hook, a tracer or a profiler sees the inputs and outputs of every module."""
    patched = nn.Module.__call__ is not _CALL or nn.Module._call_impl is not _CALL_IMPL
    return patched or nn.modules.module._has_any_global_hook()


class Watch:
    """The recorded state of the modules of `root`. A copy records the copied modules."""

    def __init__(self, root: nn.Module):
        self._names, modules = zip(*root.named_modules(), strict=True)
        self._modules = References(modules)
        self._before: str | None = None  # the change that was found when it was copied
        self.record()

    def __getstate__(self) -> dict:
        return {"_names": self._names, "_modules": self._modules, "_before": self.changed(), "_found": None}

    def record(self) -> None:
        """Records the present state. A copy calls this when it is complete."""
        modules = list(self._modules)
        if None in modules:
            self._before = self._before or "a module has been replaced"
        if self._before is not None:
            return
        kinds = {type(module) for module in modules if not isinstance(module, _NormBase)}
        written = {_unconverted(kind) for kind in kinds}
        self._code = {kind: _Code(kind) for kind in kinds | written}
        read = _names_read(written)
        self._read = frozenset().union(*read.values()) - _OF_EVERY_MODULE
        asking = {kind for kind in written if "training" in read[kind] and not _of_torch(kind)}
        self._asking = References(m for m in modules if _unconverted(type(m)) in asking)
        self._found = [_Found(module, self._read, is_root=i == 0) for i, module in enumerate(modules)]
        places = {module: i for i, module in enumerate([*modules, None])}
        self._children = {
            i: (tuple(module._modules.keys()), _getter([places[m] for m in module._modules.values()]))
            for i, module in enumerate(modules)
            if len(module._modules)
        }
        self._held: dict[tuple[int, str], _Plain] = {}  # configuration objects, by module and attribute
        known = set()
        for i, module in enumerate(modules):
            for name, value in module.__dict__.items():
                if name in self._read and _is_held(value) and id(value) not in known:
                    known.add(id(value))
                    names = self._read | _behind_properties(value, self._read)
                    self._held[i, name] = _Plain(vars(value), names)

    def changed(self) -> str | None:
        """A description of the first difference from the recorded state; None without one."""
        if self._before is None and self._found is None:
            self.record()
        if self._before is not None:
            return self._before
        modules = [*self._modules, None]
        for i, (names, children) in self._children.items():
            now = {} if modules[i] is None else modules[i]._modules
            if tuple(now.keys()) != names or tuple(now.values()) != children(modules):
                return f"a child of {self._names[i] or 'the model'} has been replaced"
        for name, module, found in zip(self._names, modules, self._found, strict=False):
            if not found.is_in(module) and (what := self._different(found, module)):
                return f"{what} of {name or 'the model'} has changed"
        for kind, code in self._code.items():
            if not code.is_in(kind):
                return f"the code of {kind.__name__} has changed"
        for (i, name), plain in self._held.items():
            if not plain.is_in(attributes := _attributes(modules[i], name)):
                what = ", ".join(sorted(plain.differing(attributes)))
                return f"{what} in {name} of {self._names[i] or 'the model'} has changed"
        return None

    def _different(self, found: _Found, module: nn.Module) -> str | None:
        """The change of a module whose class or attributes differ; None if it is harmless."""
        kind, attributes = type(module), module.__dict__
        if found.kind is None:
            return "forward"
        if not found.plain.is_in(attributes):
            return ", ".join(sorted(found.plain.differing(attributes)))
        if kind is not found.kind:
            # A class derived from the root's, as amp makes one: the code of the base is what was traced.
            on_top = found.is_root and (issubclass(kind, found.kind) or issubclass(found.kind, kind))
            if not on_top:
                if not self._code[found.kind].is_in(kind):
                    return "the class"
                self._code[kind] = self._code[found.kind]  # the class of a parametrisation, for example
            found.kind = kind
        if len(module._modules) != found.children:
            return "the children"
        for name in attributes.keys() - found.names - found.ignored:
            if hasattr(kind, name) or name in self._read:
                return name
        found.names, found.size = frozenset(attributes), len(attributes)
        return None

    def accept(self, before: list[set[str]] | None = None) -> None:
        """Records attributes after a forward, except those that differed `before` it."""
        if self._before is not None:
            return
        modules = list(self._modules)
        for i, (module, found) in enumerate(zip(modules, self._found, strict=True)):
            if module is None or found.is_in(module):
                continue
            if before is None:
                self._found[i] = _Found(module, self._read, is_root=i == 0)
                self._code.setdefault(type(module), _Code(type(module)))  # a lazy module has changed class
            else:
                found.plain.take(module.__dict__, before[i])
        for n, ((i, name), plain) in enumerate(self._held.items()):
            plain.take(_attributes(modules[i], name), before[len(modules) + n] if before else ())

    def differing(self) -> list[set[str]]:
        """The names of the attributes that differ, by module and by configuration object."""
        if self._before is not None:
            return []
        modules = list(self._modules)
        of_modules = [
            found.plain.differing({} if module is None else module.__dict__)
            for module, found in zip(modules, self._found, strict=True)
        ]
        return of_modules + [
            plain.differing(_attributes(modules[i], name)) for (i, name), plain in self._held.items()
        ]

    def in_mixed_modes(self, training: bool) -> bool:
        """Whether a module whose forward reads `training` is in another mode than `training`."""
        return any(module is not None and module.training != training for module in self._asking)


class _Found:
    """The recorded state of one module."""

    def __init__(self, module: nn.Module, read: frozenset[str], is_root: bool):
        attributes = module.__dict__
        self.kind = None if isinstance(module, _NormBase) else type(module)
        self.names, self.size, self.children = frozenset(attributes), len(attributes), len(module._modules)
        # A wrapper around the whole model, on the instance or by a derived class, is not part of the trace.
        self.is_root = is_root
        self.ignored = _OF_EVERY_MODULE | ({"forward"} if is_root else set())
        self.forward = attributes.get("forward")
        names = {"forward"} if isinstance(module, _NOT_COMPARED) else read
        self.plain = _Plain(attributes, names - self.ignored)

    def is_in(self, module: nn.Module) -> bool:
        attributes = module.__dict__
        if self.kind is None:
            return attributes.get("forward") is self.forward
        same = type(module) is self.kind and len(attributes) == self.size
        return same and len(attributes["_modules"]) == self.children and self.plain.is_in(attributes)


class _Code:
    """The functions and plain values of a class."""

    def __init__(self, kind: type):
        own = [name for name in dir(kind) if not name.startswith("__") and not hasattr(nn.Module, name)]
        # Read without descriptors, some of which raise (a script module's forward).
        plain = (*_PLAIN, staticmethod, classmethod)
        names = [*own, "forward", "__call__", "_call_impl"]
        self._get = attrgetter(*(n for n in names if isinstance(inspect.getattr_static(kind, n), plain)))
        self._values = self._get(kind)

    def is_in(self, kind: type) -> bool:
        try:
            return self._get(kind) == self._values
        except AttributeError:
            return False


class _Plain:
    """Those attributes `among` some names that are plain: values, functions, short containers."""

    def __init__(self, attributes: dict[str, object], among: frozenset[str]):
        self._among = among
        self.take(attributes)

    def take(self, attributes: dict[str, object], excluded: Collection[str] = ()) -> None:
        """Records the present values, except of the names in `excluded`."""
        old = {name: self._values[name] for name in excluded}
        names = [name for name in attributes.keys() & self._among if _is_plain(attributes[name])]
        self._values = {name: _copied(attributes[name]) for name in names} | old
        self._get = _getter(list(self._values))
        self._in_order = tuple(self._values.values())

    def is_in(self, attributes: dict[str, object]) -> bool:
        try:
            return bool(self._get(attributes) == self._in_order)
        except Exception:  # an attribute was deleted, or cannot be compared
            return False

    def differing(self, attributes: dict[str, object]) -> set[str]:
        now = {name: attributes.get(name, ...) for name in self._values}
        return {
            name for name, value in self._values.items() if not _is_plain(now[name]) or now[name] != value
        }


def _getter(keys: list) -> Callable[[object], tuple]:
    """An itemgetter that returns a tuple for any number of keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda items: (items[keys[0]],)) if keys else (lambda items: ())


def _is_plain(value: object) -> bool:
    if not isinstance(value, _CONTAINERS):
        return isinstance(value, _PLAIN)
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    # An empty container is not compared: it may be a cache.
    return 0 < len(value) <= _LONGEST and all(map(_is_plain, items))


def _copied(value: object) -> object:
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


def _is_held(value: object) -> bool:
    """Whether `value` is an object with attributes, such as a configuration, and of no other known kind."""
    known = (nn.Module, Tensor, types.ModuleType, *_PLAIN, *_CONTAINERS)
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, known)


def _attributes(module: nn.Module | None, name: str) -> dict[str, object]:
    return getattr(module and module.__dict__.get(name), "__dict__", {})


def _of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _unconverted(kind: type) -> type:
    while issubclass(kind, Converted):
        kind = kind._original
    return kind


def _names_read(kinds: Iterable[type]) -> dict[type, set[str]]:
    """For each class, the names in the code, helpers included, that a forward of `kinds` may run."""
    functions: dict[str, list[tuple[type, types.FunctionType]]] = defaultdict(list)
    for kind in kinds:
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, value in vars(base).items():
                functions[name] += [(kind, function) for function in _functions(value)]
    todo, reached, done = functions["forward"] + functions["__call__"], {"forward", "__call__"}, set()
    read: dict[type, set[str]] = {kind: set() for kind in kinds}
    while todo:
        kind, function = todo.pop()
        if (kind, function) in done:
            continue
        done.add((kind, function))
        names = _names_in(function.__code__)
        todo += [item for name in names - reached for item in functions.get(name, ())]
        todo += [(kind, f) for name in names for f in _functions(function.__globals__.get(name))]
        read[kind] |= names
        reached |= names
    return read


def _functions(value: object) -> list[types.FunctionType]:
    """The Python functions that run when `value` is read or called, except torch's."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if (
        not isinstance(value, types.FunctionType)
        or value.__globals__.get("__name__", "") == "torch.nn.functional"
    ):
        return []
    inside = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    return [value, *(function for content in inside for function in _functions(content))]


def _names_in(code: types.CodeType) -> set[str]:
    """The names that the code reads, and its strings, which getattr may read."""
    names = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
    return names.union(*(_names_in(value) for value in code.co_consts if isinstance(value, types.CodeType)))


def _behind_properties(value: object, names: frozenset[str]) -> set[str]:
    """The names that those properties of an object that are in `names` read."""
    found = (getattr(type(value), name, None) for name in names)
    return set().union(
        *(_names_in(f.__code__) for p in found if isinstance(p, property) for f in _functions(p))
    )
