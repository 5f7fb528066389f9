"""Swaps a module's class; identity, parameters and hooks stay.

The new class is made of a mixin and the original class, so `isinstance` holds and the mixin's forward comes
first. A pickle holds the mixin and the original class, because the new class is made on the fly. torch's
parametrize and fully sharded models swap classes too, before or afterwards; their classes stay on top.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterable
from functools import cache

from torch import nn
from torch.nn.utils import parametrize


class Adopted:
    """What the mixins have in common.

    `_mixin`, `_original` and the forward that this had then are set on each class that `adopt` makes.
    """

    _mixin: type
    _original: type
    _fastvit_forward: Callable

    def __reduce_ex__(self, protocol):
        made, arguments, *state = super().__reduce_ex__(protocol)
        if made is not copyreg.__newobj__:  # a class that pickles in its own way
            return (made, arguments, *state)
        return (_blank, (self._mixin, self._original), *state)

    @property
    def qconfig(self) -> object:
        """torch.ao.quantization's mark. It goes by exact classes, so it would pass over what is converted."""
        if "qconfig" in self.__dict__:
            return self.__dict__["qconfig"]
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: object) -> None:
        if value is not None:
            raise RuntimeError(
                f"fastvit.convert: qconfig was set on a converted {self._original.__name__}, but "
                "torch.ao.quantization finds layers by their exact classes, so it would quantise a converted "
                "model in other places than the original; fastvit.revert(model) first, and prepare that"
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
        # what tools that look classes up print when they do not find this one
        "__qualname__": f"{original.__qualname__}.<converted, until fastvit.revert>",
        "__doc__": original.__doc__,
        "_fastvit_forward": original.forward,
        # the format that state_dict writes and reads is the original's
        "_version": getattr(original, "_version", 1),
        "_load_from_state_dict": original._load_from_state_dict,
        "_save_to_state_dict": original._save_to_state_dict,
    }
    return type(original)(mixin.name_for(original), (mixin, original), namespace)


def _blank(mixin: type, original: type) -> nn.Module:
    made = _class(mixin, original)
    return made.__new__(made)


def _over(bases: tuple[type, ...], top: type) -> type:
    """`top` as it would be had it been made from `bases`."""
    namespace = {name: value for name, value in vars(top).items() if name not in ("__dict__", "__weakref__")}
    name = top.__name__
    for before, after in zip(top.__bases__, bases, strict=True):  # parametrize's are called after their base
        name = name.replace(before.__name__, after.__name__)
    return type(top)(name, bases, namespace)


def _without(kind: type) -> type:
    """The class that `kind` would be without the last mixin below it."""
    if "_original" in vars(kind):
        return kind._original
    return _over(tuple(_without(b) if issubclass(b, Adopted) else b for b in kind.__bases__), kind)


def adopt(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Lets `module` do what `mixin` does, with attributes that `release` takes back."""
    attributes["_fastvit_before"] = None  # a layer can be the whole model, and is adopted twice then
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    module.__dict__["_fastvit_before"] = (before, tuple(attributes))
    kind = type(module)
    if parametrize.is_parametrized(module):  # which takes the first base for what was there before
        module.__class__ = _over((_class(mixin, kind.__bases__[0]),), kind)
    else:
        module.__class__ = _class(mixin, kind)


def release(module: nn.Module) -> None:
    """Undoes `adopt`."""
    before, names = module.__dict__["_fastvit_before"]
    for name in names:
        module.__dict__.pop(name, None)
    module.__dict__.update(before)
    module.__class__ = _without(type(module))


class References:
    """Modules in order, not kept alive by it. A copy refers to the copies of those that are left."""

    def __init__(self, modules: Iterable[nn.Module | None]):
        self._all = self._to(modules)

    @staticmethod
    def _to(modules: Iterable[nn.Module | None]) -> tuple[weakref.ref | None, ...]:
        return tuple(None if module is None else weakref.ref(module) for module in modules)

    def __iter__(self):
        """The modules; None for one that is gone, or was None."""
        return (reference and reference() for reference in self._all)

    def are(self, modules: Iterable[nn.Module | None]) -> bool:
        return self._all == self._to(modules)

    def __getstate__(self) -> dict:
        return {"modules": list(self)}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["modules"])
