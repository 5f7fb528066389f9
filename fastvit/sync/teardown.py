"""Ends a process group without an abort of the process.

Destroying a gloo group may abort the process while a peer still uses the group, or while the hooks of
DistributedDataParallel (DDP) still refer to the group. So a barrier comes first, and DDP models are freed.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist


def destroy_process_group(
    timeout: timedelta | None = None, release_models: Callable[[], object] = gc.collect
) -> None:
    """Destroys the default process group, if there is one, after a barrier. Every rank calls this function.

    Args:
        timeout: the timeout of the barrier; None means the group's timeout.
        release_models: called after the barrier, to drop references to DDP models.

    Raises:
        RuntimeError: a peer did not reach the barrier. The group still exists; use `exit_without_teardown`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    barrier = dist.barrier(async_op=True)
    assert barrier is not None  # Every rank of the default group gets a dist.Work with async_op.
    barrier.wait() if timeout is None else barrier.wait(timeout)
    release_models()
    gc.collect()
    dist.destroy_process_group()


def exit_without_teardown(status: int) -> NoReturn:
    """Ends the process without the interpreter's exit, which would destroy process groups."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
