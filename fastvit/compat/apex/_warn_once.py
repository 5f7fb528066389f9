"""Warnings that are issued once in a process."""

import functools
import warnings

import torch.distributed as dist


@functools.cache
def warn_once(text: str) -> None:
    """Warns on rank 0 at the first call with `text`."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(text, stacklevel=3)  # the caller of the function that warns
