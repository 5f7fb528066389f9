"""Finds out which ranks on this host have ended, by a pidfd of each process."""

import contextlib
import os
import select
import weakref
from pathlib import Path

import torch.distributed as dist


def boot_id() -> str:
    """Returns an id of this machine, equal on clones of a virtual machine. Raises OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace_id() -> str:
    """Returns an id of the host and its PID namespace: equal on processes that see each other by PID.

    Raises OSError without /proc.
    """
    return f"host {boot_id()}, {os.readlink('/proc/self/ns/pid')}"


def _process_start_ticks(pid: int | str) -> str:
    """Returns when a process started, in ticks since the boot. PID and start together identify a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class ProcessWatch:
    """Finds the ranks of a group whose process on this host has ended, zombies included.

    The watch knows nothing of ranks on other hosts, nor of any rank if the system has no pidfd. Clones of one
    virtual machine have the same host id and PIDs, so a rank whose process is not found may run on a clone:
    `has_ended` returns False for all these ranks.
    """

    def __init__(self, store: "dist.Store", rank: int):
        self.pids_by_rank: dict[int, int] = {}  # all registered ranks of this host
        self._pidfds: dict[int, int] = {}  # by rank; each belongs to a process that was found
        self._num_entries_read = 0
        try:
            host, start = pid_namespace_id(), _process_start_ticks("self")
        except OSError:
            host, start = f"rank {rank} alone", "unknown"
        # Entries are numbered for each host, so that a rank reads only those of its own host.
        self._store = dist.PrefixStore(host, store)
        self._store.set(str(self._store.add("count", 1)), f"{rank} {os.getpid()} {start}")
        weakref.finalize(self, _close_pidfds, self._pidfds)

    def has_ended(self, rank: int) -> bool:
        if rank not in self._pidfds:
            return False
        poll = select.poll()
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def find_ended_ranks(self) -> list[int]:
        self.read_registrations()
        return [rank for rank in self._pidfds if self.has_ended(rank)]

    def read_registrations(self) -> None:
        """Reads the processes that have registered since the last call."""
        while self._store.check([key := str(self._num_entries_read + 1)]):
            rank, pid, start = self._store.get(key).decode().split()
            self._num_entries_read += 1
            self.pids_by_rank[int(rank)] = int(pid)
            # OSError means that the process has ended, AttributeError that the system has no pidfd.
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(int(pid))
                if _process_start_ticks(pid) == start:
                    self._pidfds[int(rank)] = pidfd
                else:
                    os.close(pidfd)

    def ended_message(self, rank: int) -> str:
        return f"rank {rank} has ended (process {self.pids_by_rank[rank]})"


def _close_pidfds(pidfds: dict[int, int]) -> None:
    for pidfd in pidfds.values():
        os.close(pidfd)
