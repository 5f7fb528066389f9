"""Changing what a module does without changing what it is.

An adopted module is the object it was, of a class made from a mixin and the class it had: `isinstance`, its
parameters, hooks and names stay, the mixin's forward comes first. Such classes are made on the fly, so a
pickle holds the mixin and the original class in their place.
"""

from __future__ import annotations

import copyreg
from functools import cache

from torch import nn


class Adopted:
    """What the mixins have in common. `_mixin` and `_original` are set on each class that `adopt` makes."""

    _mixin: type
    _original: type

    def __reduce_ex__(self, protocol):
        made, arguments, *state = super().__reduce_ex__(protocol)
        if made is not copyreg.__newobj__:  # a class that pickles in its own way
            return (made, arguments, *state)
        return (_blank, (self._mixin, self._original), *state)


@cache
def _class(mixin: type, original: type) -> type:
    namespace = {
        "_mixin": mixin,
        "_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        # the format that state_dict writes and reads is the original's
        "_version": getattr(original, "_version", 1),
        "_load_from_state_dict": original._load_from_state_dict,
        "_save_to_state_dict": original._save_to_state_dict,
    }
    return type(original)(mixin.name_for(original), (mixin, original), namespace)


def _blank(mixin: type, original: type) -> nn.Module:
    made = _class(mixin, original)
    return made.__new__(made)


def adopt(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Lets `module` do what `mixin` does, with attributes that `release` takes back."""
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    module.__dict__["_fastvit_before"] = (before, tuple(attributes))
    module.__class__ = _class(mixin, type(module))


def release(module: nn.Module) -> None:
    """Undoes `adopt`."""
    before, names = module.__dict__.pop("_fastvit_before")
    for name in names:
        module.__dict__.pop(name, None)
    module.__dict__.update(before)
    module.__class__ = type(module)._original
