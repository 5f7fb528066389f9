"""The end of a script that leaves its process group open."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

__all__ = ["leave_process_group"]

_PATIENCE = timedelta(seconds=30)


def leave_process_group(failed: bool) -> None:
    """Destroys the default process group when there is one.

    Destroying a gloo group while a peer still talks to it, or while DDP's hooks still hold it, aborts the
    process now and then; hence a barrier, and the globals of `__main__` dropped, first. A rank that failed
    does neither: its peers may wait for it somewhere else, and the end of the process closes its connections.
    A peer of such a rank sees the barrier fail, and goes without.
    """
    dist = sys.modules.get("torch.distributed")
    if failed or dist is None or not dist.is_available() or not dist.is_initialized():
        return
    try:
        dist.barrier(async_op=True).wait(_PATIENCE)
    except RuntimeError:
        return
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    dist.destroy_process_group()
