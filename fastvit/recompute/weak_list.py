"""`WeakList`: objects that the list does not keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_MIN_LIMIT = 256


class WeakList(Generic[T]):
    """Refers to objects in the order in which they were appended. Forgets dead ones when it has doubled."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []
        self._limit = _MIN_LIMIT

    def append(self, one: T) -> None:
        if len(self._references) >= self._limit:
            self._references = [reference for reference in self._references if reference() is not None]
            self._limit = max(_MIN_LIMIT, 2 * len(self._references))
        self._references.append(weakref.ref(one))

    def __iter__(self) -> Iterator[T]:
        """Yields the objects that are alive."""
        for reference in self._references:
            if (one := reference()) is not None:
                yield one

    def __len__(self) -> int:
        """Returns how many there are, with dead ones that are not forgotten yet."""
        return len(self._references)

    def clear(self) -> None:
        self._references, self._limit = [], _MIN_LIMIT
