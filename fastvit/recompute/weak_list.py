"""A `WeakList` refers to objects without keeping them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_MIN_LIMIT = 256  # length at which dead references are dropped for the first time


class WeakList(list[T]):
    """Refers to objects in the order in which they were appended. Drops dead references if it has doubled.

    The class is a list of the references, so that each of many short lists is a single object. Its length
    includes dead references that are not dropped yet.
    """

    __slots__ = ("__dict__",)
    _limit = _MIN_LIMIT

    def append(self, one: T) -> None:
        if len(self) >= self._limit:
            self[:] = [reference for reference in _references(self) if reference() is not None]
            self._limit = max(_MIN_LIMIT, 2 * len(self))
        _append(self, weakref.ref(one))

    def __iter__(self) -> Iterator[T]:
        """Yields the objects that are alive."""
        for reference in list(_references(self)):  # a copy, because an append may change the list
            if (one := reference()) is not None:
                yield one

    def clear(self) -> None:
        super().clear()
        self._limit = _MIN_LIMIT


_append: Any = list.append
_references: Any = list.__iter__
