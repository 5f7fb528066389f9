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
    """Keeps other runs out of a directory, from `take` to the end of the `with` block.

    Every rank may enter one; only the rank that calls `take` locks. The lock belongs to the process: the
    kernel gives it back when the process ends, however it ends. Workers do not inherit it, as they would one
    of `fcntl.flock`, and so cannot keep a restarted run out after their rank was killed.
    """

    def __init__(self) -> None:
        self.file: TextIO | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def take(self, run: Path) -> None:
        """Make the directory and lock it; where the file system has no locks, say so and go on.

        Raises:
            TrainingError: another run has it.
            OSError: the directory is not writable.
        """
        run.mkdir(parents=True, exist_ok=True)
        self.file = (run / "lock").open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(
                    f"{run} cannot be locked ({error.strerror}): nothing keeps a second run out of it",
                    flush=True,
                )
                return
            self.file.seek(0)
            raise TrainingError(
                f"--out {run} is in use by another run ({self.file.read().strip()}); wait for its end, or "
                f"give another directory"
            ) from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()
