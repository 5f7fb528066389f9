"""Old spellings of public names. Each works for one release, and warns.

`renamed_arguments` is for keyword arguments of a function, `RenamedAttribute` for attributes of a class,
`renamed_state` for its pickles, which do not warn, and `renamed_names` for names of a module.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_NOT_OF_USERS = ("contextlib", "fastvit", "torch")


def user_stacklevel() -> int:
    """Returns the `stacklevel` by which a warning of the caller is at a line of the user's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_OF_USERS:
        frame, level = frame.f_back, level + 1
    return level


def warn_renamed(old: str, new: str) -> None:
    """Warns, at a line of the user's, that `old` is `new` now."""
    message = f"fastvit: {old} is {new} now; the old name is gone in the next release"
    warnings.warn(message, DeprecationWarning, user_stacklevel())


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that accepts keyword arguments by their old names, `old="new"`.

    The function raises TypeError if it gets both names of one argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in [name for name in new_names if name in kwargs] if kwargs else ():
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{name}: {old} is the old name of {new}; one of them expected, got both")
                warn_renamed(f"{name}({old}=)", f"{name}({new}=)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_state(state: dict[str, Any], **new_names: str) -> dict[str, Any]:
    """Returns the state of a pickled object with the new names of its attributes, `old="new"`."""
    return {new_names.get(name, name): value for name, value in state.items()}


class RenamedAttribute:
    """A descriptor that reads and writes the attribute `new` by an old name."""

    def __init__(self, new: str):
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(instance, self._new)

    def __set__(self, instance: Any, value: Any) -> None:
        name = type(instance).__name__
        warn_renamed(f"{name}.{self._old}", f"{name}.{self._new}")
        setattr(instance, self._new, value)


def renamed_names(module: str, new_names: dict[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module for names that are another now: `{old: "package.module.new"}`."""

    def getattr_of_module(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path, _, new = new_names[name].rpartition(".")
        warn_renamed(f"{module}.{name}", new_names[name])
        return getattr(importlib.import_module(path), new)

    return getattr_of_module
