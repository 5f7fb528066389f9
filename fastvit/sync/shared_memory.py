"""Statistics between processes of one host through shared memory: no collective, no system call.

The arenas of all ranks lie in one segment that every rank maps. The segment has no name, so the kernel frees
the segment when the last rank has ended, for any reason.
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
from .backend import ExchangeOp, PeerBackend
from .process_watch import pid_namespace_id
from .protocol import DescribeExchange, Tag, direction_name
from .store_consensus import StoreConsensus

SHM_DIR = Path("/dev/shm")  # the folder of POSIX shared memory on Linux
_MARKER_BYTES = 16  # Random bytes behind the arenas, by which peers recognise the segment.
_OP_WAIT_SECONDS = 0.05  # Then Python checks for signals and for ended peers.
_ops = _library.fastvit_ops


class SharedMemoryBackend(PeerBackend):
    """Statistics over the ranks of one host. A call waits until its exchange is complete, or raises."""

    name = "SharedMemory"

    def __init__(self, segment: Tensor, capacity: int, consensus: StoreConsensus, describe: DescribeExchange):
        bytes_per_arena = segment.numel() // consensus.world_size
        arenas = [segment.data_ptr() + rank * bytes_per_arena for rank in range(consensus.world_size)]
        super().__init__(segment, arenas, consensus.rank, capacity, _OP_WAIT_SECONDS, describe)
        self.timeout = consensus.timeout
        self._process_watch = consensus.refreshed_process_watch()

    @staticmethod
    def host_name(device: torch.device) -> str:
        """Returns a name that is equal on ranks that can map one segment and see each other's processes.

        Raises OSError without writable shared memory.
        """
        if not os.access(SHM_DIR, os.W_OK):
            raise OSError(f"{SHM_DIR} is not writable")
        return pid_namespace_id()

    @classmethod
    def connect(
        cls,
        consensus: StoreConsensus,
        capacity: int,
        describe: DescribeExchange,
        device: torch.device,
        may_share_gpu: bool,
    ) -> "SharedMemoryBackend":
        """Maps one segment on all ranks. Raises BackendUnavailable on all ranks if that fails on one."""
        size = consensus.world_size * arena_bytes(consensus.world_size, capacity)
        with contextlib.ExitStack() as until_mapped:

            def create_segment() -> str:
                """Returns path and marker of a new unnamed file on rank 0, and "none" on other ranks."""
                if consensus.rank:
                    return "none"
                fd = until_mapped.enter_context(tempfile.TemporaryFile(dir=SHM_DIR)).fileno()
                # Without an allocation a write to full memory would kill the process later, by SIGBUS.
                os.posix_fallocate(fd, 0, size + _MARKER_BYTES)
                os.pwrite(fd, marker := os.urandom(_MARKER_BYTES), size)
                return f"/proc/{os.getpid()}/fd/{fd} {marker.hex()}"

            location = consensus.run_on_all_ranks("shared memory", create_segment)
            (location,) = consensus.gather_answers("shared memory", location).keys() - {"none"}
            path, marker = location.split()
            segment = consensus.run_on_all_ranks(
                "shared memory", lambda: _map_segment(path, size, bytes.fromhex(marker))
            )
        return cls(segment, capacity, consensus, describe)

    def _run_exchange(self, op: ExchangeOp, tag: Tag) -> Tensor:
        self.raise_if_failed()
        report = self._exchange.report
        report.missing_ranks_mask = 1 << self._rank  # The op replaces this by the missing ranks.
        try:
            result = op(self._exchange.with_tag(tag))
            if report.missing_ranks_mask:
                self._wait(result, tag)
            if report.fault:
                self._raise_fault()
        except BaseException as error:
            _ops.exchange_abandon(self._exchange.tensor)
            self._failure_message = str(error) or type(error).__name__
            raise
        return result

    def _wait(self, result: Tensor, tag: Tag) -> None:
        """Waits until the exchange that writes `result` is complete, or raises."""
        deadline = time.monotonic() + self.timeout - _OP_WAIT_SECONDS
        while missing_ranks := self._missing_ranks():
            ended_ranks = [rank for rank in missing_ranks if self._process_watch.has_ended(rank)]
            # The op reads the inbox again after the process check, because a rank may have sent its packets
            # before it ended.
            _ops.exchange_wait(result, self._exchange.tensor)
            still_missing_ranks = self._missing_ranks()
            direction = direction_name(result.dim() - 1)
            for rank in set(ended_ranks).intersection(still_missing_ranks):
                raise self._ended_error(rank, self._describe(tag, direction))
            if still_missing_ranks and time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self._rank} in {self._describe(tag, direction)}: nothing from rank "
                    f"{still_missing_ranks[0]} within {self.timeout:g} s"
                )

    def _missing_ranks(self) -> list[int]:
        mask = self._exchange.report.missing_ranks_mask
        return [rank for rank in range(self._exchange.descriptor.world) if mask >> rank & 1]

    def _raise_fault(self) -> None:
        """Raises, for an ended rank first, since its end may be why other ranks abandoned the exchange."""
        for rank in filter(self._process_watch.has_ended, range(self._exchange.descriptor.world)):
            raise self._ended_error(rank, self._exchange.describe_local_exchange(self._describe))
        super()._raise_fault()

    def _ended_error(self, rank: int, context: str) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} in {context}: {self._process_watch.ended_message(rank)}")


def arena_bytes(world_size: int, capacity: int) -> int:
    """Returns the bytes of a rank's arena for messages of `capacity` packets.

    CPUs send numbers without epochs, so 16 bytes hold the numbers of two packets.
    """
    return _ops.arena_bytes(world_size, (capacity + 1) // 2)


def _map_segment(path: str, size: int, marker: bytes) -> Tensor:
    """Maps the segment that rank 0 has created.

    On a clone of rank 0's virtual machine the path may lead to another file, which must not be written. So
    the function compares the marker before it opens the file for writing.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        is_segment = (status.st_size, status.st_nlink) == (size + _MARKER_BYTES, 0)
        if not is_segment or os.pread(fd, _MARKER_BYTES, size) != marker:
            raise OSError(f"{path} is not the segment of rank 0: hosts of one name?")
        writable_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(writable_fd, size), dtype=torch.uint8)
        finally:
            os.close(writable_fd)
    finally:
        os.close(fd)
