"""One run at a time in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from .config import TrainingError


def lock(run: Path, until: ExitStack) -> None:
    """Make the directory of a run and lock it until the stack is closed.

    The kernel releases the lock when the process ends for any reason. Workers do not inherit it, unlike a
    lock of `fcntl.flock`, so surviving workers of a killed rank do not block a restarted run. Without locks
    in the file system a message is printed.

    Raises:
        TrainingError: another run has locked it, or it is no directory.
        OSError: the directory is not writable.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise TrainingError(f"--out {run} is a file, or in one; give a directory") from None
    file = until.enter_context((run / "lock").open("a+"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            why = error.strerror
            print(f"{run} cannot be locked ({why}): a second run in it would not be detected", flush=True)
            return
        file.seek(0)
        raise TrainingError(
            f"--out {run} is in use by another run ({file.read().strip()}); wait for its end, or "
            f"give another directory"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
