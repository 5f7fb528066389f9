"""Statistics between processes of one host through shared memory: no collective, no system call.

The arenas of all ranks lie in one segment that every rank maps. The segment has no name, so the kernel frees
it when the last rank has ended, by whatever cause.
"""

import mmap
import os
import re
import stat
import struct
import time
from pathlib import Path

import torch
from torch import Tensor

from .agreement import Agreement, Unavailable, process_space
from .peer import Peer, arena_bytes
from .protocol import MOST_RANKS, Arena, Describe, Tag, direction
from .transport import Reduce

NAME = "SharedMemory"
FOLDER = Path("/dev/shm")  # where POSIX shared memory lives on Linux
_SLICE = 0.05  # seconds of waiting in C++ between checks for signals and for dead peers
_ops = torch.ops.fastvit


class SharedMemory(Peer):
    """Statistics over the ranks of one host. A call waits until its exchange is complete, or raises."""

    def __init__(self, arenas: list[Tensor], capacity: int, agreement: Agreement, describe: Describe):
        super().__init__(NAME, arenas, agreement.rank, capacity, _SLICE, describe)
        self.timeout = agreement.timeout
        self._watch = agreement.watch
        self._watch.learn()  # now, since the store may be destroyed later

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self._begin()
        report = self._exchange.report
        report.missing = 1 << self._rank  # until the op writes the missing ranks
        try:
            result = op(self._exchange.of(tag))
            if report.missing:
                self._wait(result, tag)
            if report.fault:
                self._fail()
        except BaseException as error:
            _ops.peer_give_up(self._exchange.tensor)
            self._failed = str(error) or type(error).__name__
            raise
        return result

    def _wait(self, result: Tensor, tag: Tag) -> None:
        """Waits until the exchange of `result` is complete."""
        deadline = time.monotonic() + self.timeout - _SLICE
        while missing := self._missing():
            ended = [rank for rank in missing if self._watch.has_ended(rank)]
            # Read once more after the check: a rank may have sent its packets before it ended.
            _ops.peer_wait(result, self._exchange.tensor)
            still = self._missing()
            kind = direction(result.dim() - 1)
            for rank in set(ended).intersection(still):
                raise self._has_ended(rank, self._describe(tag, kind))
            if still and time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self._rank} in {self._describe(tag, kind)}: nothing from rank {still[0]} within "
                    f"{self.timeout:g} s"
                )

    def _missing(self) -> list[int]:
        return [rank for rank in range(len(self._arenas)) if self._exchange.report.missing >> rank & 1]

    def _fail(self) -> None:
        """Raises for an ended rank first, since other ranks may have given up because of it."""
        for rank in filter(self._watch.has_ended, range(len(self._arenas))):
            raise self._has_ended(rank, self._exchange.text(self._describe))
        super()._fail()

    def _has_ended(self, rank: int, what: str) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} in {what}: {self._watch.text(rank)}")

    def close(self) -> None:
        self._arenas = []


def place(device: torch.device) -> str:
    """A name that is equal on ranks that can map one segment and see each other's processes.

    Raises OSError without writable shared memory.
    """
    if not os.access(FOLDER, os.W_OK):
        raise OSError(f"{FOLDER} is not writable")
    return process_space()


def connect(
    agreement: Agreement, capacity: int, describe: Describe, device: torch.device, asked: bool
) -> SharedMemory:
    """Maps one segment on all ranks. Raises Unavailable on all ranks where that fails on one."""
    if agreement.world > MOST_RANKS:
        raise Unavailable(f"{agreement.world} ranks, more than {MOST_RANKS}")
    each, file, told = arena_bytes(agreement.world, capacity), None, ""
    try:
        try:
            if agreement.rank == 0:
                file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
                os.posix_fallocate(
                    file, 0, agreement.world * each
                )  # else a full disk kills the process later, at a store
                os.pwrite(file, struct.pack("=Q", os.getpid()), Arena.process.offset)
                told = f"{os.getpid()} {file}"
        except OSError as error:
            told = str(error)
        told = agreement.from_rank_0("shared memory", told)
        map_it = lambda: _map(told, each, agreement.rank, agreement.world)  # noqa: E731
        segment = agreement.together("shared memory", map_it)
    finally:
        if file is not None:
            os.close(file)
    return SharedMemory(list(segment.split(each)), capacity, agreement, describe)


def _map(told: str, each: int, rank: int, world: int) -> Tensor:
    """Maps the segment that rank 0 announced as its PID and file descriptor; ValueError for anything else.

    Other programs may write to the store. So a file is checked before it is opened, and only a new segment
    is accepted: an unnamed file of this user and this size, marked by that process and not by this rank.
    """
    if not re.fullmatch("[1-9][0-9]{0,9} [0-9]{1,9}", told):
        raise ValueError(told)
    process, number = told.split()
    size = world * each
    found = os.open(f"/proc/{process}/fd/{number}", os.O_PATH)  # without opening the file itself
    try:
        seen = os.fstat(found)
        expected = (stat.S_IFREG | 0o600, 0, size, os.geteuid(), os.stat(FOLDER).st_dev)
        if (seen.st_mode, seen.st_nlink, seen.st_size, seen.st_uid, seen.st_dev) != expected:
            raise ValueError(f"file {number} of process {process} is no segment of {size} bytes")
        file = os.open(f"/proc/self/fd/{found}", os.O_RDWR)
        try:
            segment = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)
    finally:
        os.close(found)
    marks = (
        segment.view(world, each)[:, Arena.process.offset :][:, :8].contiguous().view(torch.int64).flatten()
    )
    if marks[0] != int(process) or (rank > 0 and marks[rank] != 0):
        raise ValueError(f"file {number} of process {process} is no new segment")
    Arena.from_address(segment[rank * each :].data_ptr()).process = os.getpid()
    return segment
