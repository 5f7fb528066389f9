"""What holds for the whole process is said once."""

from __future__ import annotations

import warnings

__all__ = ["warn_once"]

_said: set[str] = set()


def warn_once(text: str) -> None:
    """Warn the first time that `text` comes up in this process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)
