"""Statistics between processes of one host through shared memory: no collective, no system call.

The arenas of all ranks lie in one segment that every rank maps. The segment has no name, so the kernel frees
it when the last rank has ended, by whatever cause.
"""

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from .. import _library
from .agreement import Agreement, process_space
from .protocol import Describe, Tag, direction
from .transport import Peer, Reduce

FOLDER = Path("/dev/shm")  # where POSIX shared memory lives on Linux
_MARK = 16  # bytes
_SLICE = 0.05  # seconds of waiting in C++ between checks for signals and for dead peers
_ops = _library.fastvit_ops


class SharedMemory(Peer):
    """Statistics over the ranks of one host. A call waits until its exchange is complete, or raises."""

    def __init__(self, segment: Tensor, capacity: int, agreement: Agreement, describe: Describe):
        each = segment.numel() // agreement.world
        arenas = [segment.data_ptr() + rank * each for rank in range(agreement.world)]
        super().__init__("SharedMemory", segment, arenas, agreement.rank, capacity, _SLICE, describe)
        self.timeout = agreement.timeout
        self._watch = agreement.watched()

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self.check_usable()
        report = self._exchange.report
        report.missing_ranks_mask = 1 << self._rank  # until the op writes the missing ranks
        try:
            result = op(self._exchange.of(tag))
            if report.missing_ranks_mask:
                self._wait(result, tag)
            if report.fault:
                self._fail()
        except BaseException as error:
            _ops.exchange_abandon(self._exchange.tensor)
            self._failed = str(error) or type(error).__name__
            raise
        return result

    def _wait(self, result: Tensor, tag: Tag) -> None:
        """Waits until the exchange of `result` is complete."""
        deadline = time.monotonic() + self.timeout - _SLICE
        while missing := self._missing():
            ended = [rank for rank in missing if self._watch.has_ended(rank)]
            # Read once more after the check: a rank may have sent its packets before it ended.
            _ops.exchange_wait(result, self._exchange.tensor)
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
        missing = self._exchange.report.missing_ranks_mask
        return [rank for rank in range(self._exchange.descriptor.world) if missing >> rank & 1]

    def _fail(self) -> None:
        """Raises for an ended rank first, since other ranks may have given up because of it."""
        for rank in filter(self._watch.has_ended, range(self._exchange.descriptor.world)):
            raise self._has_ended(rank, self._exchange.text(self._describe))
        super()._fail()

    def _has_ended(self, rank: int, context: str) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} in {context}: {self._watch.text(rank)}")


def host_of(device: torch.device) -> str:
    """A name that is equal on ranks that can map one segment and see each other's processes.

    Raises OSError without writable shared memory.
    """
    if not os.access(FOLDER, os.W_OK):
        raise OSError(f"{FOLDER} is not writable")
    return process_space()


def connect(
    agreement: Agreement, capacity: int, describe: Describe, device: torch.device, may_share_gpu: bool
) -> SharedMemory:
    """Maps one segment on all ranks. Raises Unavailable on all ranks where that fails on one."""
    size = agreement.world * cpu_arena_bytes(agreement.world, capacity)
    with contextlib.ExitStack() as until_mapped:

        def make() -> str:
            """The path of a file without a name, and the random bytes at its end, by which peers know it."""
            if agreement.rank:
                return "none"
            file = until_mapped.enter_context(tempfile.TemporaryFile(dir=FOLDER)).fileno()
            os.posix_fallocate(file, 0, size + _MARK)  # else a full disk kills the process later, at a store
            os.pwrite(file, mark := os.urandom(_MARK), size)
            return f"/proc/{os.getpid()}/fd/{file} {mark.hex()}"

        (made,) = agreement.ask("shared memory", agreement.together("shared memory", make)).keys() - {"none"}
        path, mark = made.split()
        segment = agreement.together("shared memory", lambda: _map(path, size, bytes.fromhex(mark)))
    return SharedMemory(segment, capacity, agreement, describe)


def cpu_arena_bytes(world: int, capacity: int) -> int:
    """The bytes of a rank's arena: without flags the numbers of two packets fit into the 16 bytes of one."""
    return _ops.arena_bytes(world, (capacity + 1) // 2)


def _map(path: str, size: int, mark: bytes) -> Tensor:
    """Maps the segment that rank 0 has made.

    On a clone of rank 0's virtual machine the path may lead to another file, which must not be written. So
    the mark is compared first.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if (found.st_size, found.st_nlink) != (size + _MARK, 0) or os.pread(file, _MARK, size) != mark:
            raise OSError(f"{path} is not the segment of rank 0: hosts of one name?")
        both = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(both, size), dtype=torch.uint8)
        finally:
            os.close(both)
    finally:
        os.close(file)
