"""The end of a script that leaves its process group open."""

from __future__ import annotations

import gc
import logging
import os
import sys
from datetime import timedelta

__all__ = ["leave_process_group"]

_PATIENCE = timedelta(seconds=30)


def leave_process_group(status: int | None) -> None:
    """Destroys the default process group when there is one; the last thing that a process does.

    Destroying a gloo group while a peer still talks to it, or while DDP's hooks still hold it, aborts the
    process now and then; hence a barrier, and the globals of `__main__` dropped, first. A rank that failed
    skips the barrier, because its peers may wait for it somewhere else. It, and a peer that sees the barrier
    fail, end with the group as it is: tearing the interpreter down would destroy it, and abort.

    Args:
        status: the script's exit status; None leaves everything to Python.
    """
    dist = sys.modules.get("torch.distributed")
    if status is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return
    if status:
        _end(status)
    try:
        dist.barrier(async_op=True).wait(_PATIENCE)
    except RuntimeError:
        _end(status)
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    dist.destroy_process_group()


def _end(status: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
