"""Warnings that are issued once in a process."""

from __future__ import annotations

import warnings

import torch.distributed as dist

__all__ = ["warn_once"]

_said: set[str] = set()


def warn_once(text: str) -> None:
    """Warn on rank 0 at the first call with `text`."""
    first = text not in _said
    _said.add(text)
    if first and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(text, stacklevel=3)
