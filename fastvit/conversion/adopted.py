"""Swaps a module's class; identity, parameters and hooks stay.

The new class derives from a mixin and the original class, so `isinstance` holds and the mixin's forward comes
first. The new class is made at run time, so a pickle names the mixin and the original class instead. torch's
parametrize and FSDP swap classes too, before or after; their classes stay on top.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterable
from functools import cache

from torch import nn
from torch.nn.utils import parametrize

_ADOPTIONS = "_fastvit_adoptions"  # attribute: by mixin, the attributes before and the names of those set


class Adopted:
    """Base of the mixins.

    Each class that `adopt` makes has `_mixin`, `_original`, and `_fastvit_forward`, the forward that the
    original class had at that time.
    """

    _mixin: type
    _original: type
    _fastvit_forward: Callable
    _note = ""  # added to the class's qualified name

    @staticmethod
    def name_for(original: type) -> str:
        return original.__name__

    def __reduce_ex__(self, protocol):
        made, arguments, *state = super().__reduce_ex__(protocol)
        if made is not copyreg.__newobj__:  # a class with its own reduction
            return (made, arguments, *state)
        return (_blank, (self._mixin, self._original), *state)


class Converted(Adopted):
    """Base of the mixins of `fastvit.convert`."""

    # Tools that look a class up by name print this when they do not find it.
    _note = ".<converted, until fastvit.revert>"

    @property
    def qconfig(self) -> object:
        """The attribute by which torch.ao.quantization marks a layer.

        Quantization finds layers by their exact class, so it would miss converted ones; hence the error.
        """
        if "qconfig" in self.__dict__:
            return self.__dict__["qconfig"]
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: object) -> None:
        if value is not None:
            raise RuntimeError(
                f"fastvit.convert: qconfig was set on a converted {self._original.__name__}. "
                "torch.ao.quantization finds layers by their exact class and would miss converted ones; "
                "call fastvit.revert(model) first"
            )
        self.__dict__["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        self.__dict__.pop("qconfig", None)


@cache
def _class(mixin: type, original: type) -> type:
    namespace = {
        "_mixin": mixin,
        "_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__.removesuffix(mixin._note) + mixin._note,
        "__doc__": original.__doc__,
        "_fastvit_forward": original.forward,
        # state_dict has the original's format.
        "_version": getattr(original, "_version", 1),
        "_load_from_state_dict": original._load_from_state_dict,
        "_save_to_state_dict": original._save_to_state_dict,
    }
    return type(original)(mixin.name_for(original), (mixin, original), namespace)


def _blank(mixin: type, original: type) -> nn.Module:
    made = _class(mixin, original)
    return made.__new__(made)


def _over(bases: tuple[type, ...], top: type) -> type:
    """A class like `top`, derived from `bases`."""
    namespace = {name: value for name, value in vars(top).items() if name not in ("__dict__", "__weakref__")}
    name = top.__name__
    for before, after in zip(top.__bases__, bases, strict=True):  # parametrize names its classes by the base
        name = name.replace(before.__name__, after.__name__)
    return type(top)(name, bases, namespace)


def _without(kind: type, mixin: type) -> type:
    """`kind` without `mixin` among its bases."""
    if vars(kind).get("_mixin") is mixin:
        return kind._original
    if "_mixin" in vars(kind):
        return _class(kind._mixin, _without(kind._original, mixin))
    return _over(tuple(_without(b, mixin) if issubclass(b, mixin) else b for b in kind.__bases__), kind)


def adopt(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Gives `module` a class derived from `mixin` and its own class, and sets `attributes` on it."""
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    adoptions = dict(module.__dict__.get(_ADOPTIONS, {}))  # a new one: a shallow copy shares the old
    module.__dict__[_ADOPTIONS] = adoptions | {mixin: (before, tuple(attributes))}
    kind = type(module)
    if parametrize.is_parametrized(module):  # parametrize restores the first base
        module.__class__ = _over((_class(mixin, kind.__bases__[0]),), kind)
    else:
        module.__class__ = _class(mixin, kind)


def release(module: nn.Module, mixin: type) -> dict[str, object]:
    """Undoes `adopt(module, mixin)`; returns the attributes that it had set."""
    adoptions = dict(module.__dict__.pop(_ADOPTIONS))
    before, names = adoptions.pop(mixin)
    attributes = {name: module.__dict__.pop(name) for name in names if name in module.__dict__}
    module.__dict__.update(before)
    if adoptions:
        module.__dict__[_ADOPTIONS] = adoptions
    module.__class__ = _without(type(module), mixin)
    return attributes


def class_of(module: nn.Module, mixin: type) -> type[Adopted]:
    """The class that `adopt` made of `mixin`, or of a subclass of it, for `module`."""
    return next(kind for kind in type(module).__mro__ if issubclass(vars(kind).get("_mixin", object), mixin))


def conversions(module: nn.Module) -> list[type]:
    """The mixins of `fastvit.convert` that `module` has, the last one first."""
    return [mixin for mixin in reversed(module.__dict__.get(_ADOPTIONS, {})) if issubclass(mixin, Converted)]


class References:
    """Weak references to modules, in order. A copy refers to the copies of the modules."""

    def __init__(self, modules: Iterable[nn.Module | None]):
        self._all = self._to(modules)

    @staticmethod
    def _to(modules: Iterable[nn.Module | None]) -> tuple[weakref.ref | None, ...]:
        return tuple(None if module is None else weakref.ref(module) for module in modules)

    def __iter__(self):
        """The modules; None for one that was destroyed, or was None."""
        return (reference and reference() for reference in self._all)

    def are(self, modules: Iterable[nn.Module | None]) -> bool:
        return self._all == self._to(modules)

    def __getstate__(self) -> dict:
        return {"modules": list(self)}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["modules"])
