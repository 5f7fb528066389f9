"""One run at a time in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from .errors import TrainingError

__all__ = ["RunLock"]


class RunLock:
    """A lock on the directory of a run, from `take` to `close`.

    Every rank has one; only the rank that calls `take` locks. The lock belongs to the process, and the
    kernel releases it when the process ends for any reason. Workers do not inherit it, unlike a lock of
    `fcntl.flock`, so surviving workers of a killed rank do not block a restarted run.
    """

    def __init__(self) -> None:
        self.file: TextIO | None = None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def take(self, run: Path) -> None:
        """Make the directory and lock it; without locks in the file system, print a message and continue.

        Raises:
            TrainingError: another run has locked it.
            OSError: the directory is not writable.
        """
        run.mkdir(parents=True, exist_ok=True)
        self.file = (run / "lock").open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                why = error.strerror
                print(f"{run} cannot be locked ({why}): a second run in it would not be detected", flush=True)
                return
            self.file.seek(0)
            raise TrainingError(
                f"--out {run} is in use by another run ({self.file.read().strip()}); wait for its end, or "
                f"give another directory"
            ) from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()
