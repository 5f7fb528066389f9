"""Statistics between processes of one host through shared memory: no collective, no system call.

The protocol is that of csrc/peer.h, in a segment of shared memory that every rank maps. The segment never has
a name, so nothing is left behind whatever becomes of the ranks.
"""

import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .agreement import Agreement, answers_text, process_space
from .exchange import (
    DONE,
    GAVE_UP,
    MOMENTS,
    PENDING,
    STEPS,
    SUMS,
    PendingSum,
    Tag,
    direction,
    mismatch,
    packets,
    room,
)

NAME = "SharedMemory"
FOLDER = Path("/dev/shm")  # where POSIX shared memory lives on Linux
_SLICE = 0.05  # seconds of waiting in C++ between looks at signals and at peers that died
_ops = torch.ops.fastvit

# csrc/cpu/peer.cpp, State; behind them a flag per rank: its message is missing
_STEP, _PEER, _PEER_LAYER, _PEER_STEP, _PEER_KIND, _MISSING = 5, 6, 7, 8, 10, 11
_STATUS_WORDS, _STATUS_STEP, _STATUS_PROCESS = 8, 2, 3  # peer.h, Status


def host(device: torch.device) -> str:
    """The same on all ranks that can map one segment and see each other's processes; else why not."""
    try:
        return process_space() if os.access(FOLDER, os.W_OK) else f"no {FOLDER} to write to"
    except OSError as error:
        return f"no shared memory: {error}"


class SharedMemory:
    """Statistics over the ranks of one host, which have one segment mapped."""

    name = NAME

    def __init__(
        self,
        segment: Tensor,
        capacity: int,
        agreement: Agreement,
        describe: Callable[[Tag, str], str],
    ):
        self._segment, self._agreement, self._describe = segment, agreement, describe
        self._rank, self._world, self._timeout = agreement.rank, agreement.world, agreement.timeout
        self.capacity = capacity
        self._state = torch.zeros(_MISSING + self._world, dtype=torch.int64, device="cpu")
        self._state[:3] = torch.tensor([self._rank, self._world, capacity], device="cpu")
        self._step = 0
        self._abandoned = False  # an exchange: the ranks meet before the next
        self._open = False  # sums were sent and not yet awaited
        self._watch = agreement.watch
        self._watch.learn()  # while the store is there for certain

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Whether a layer fits into the segment."""
        return packets(channels, dtype) <= self.capacity

    def next_step(self) -> int:
        self._begin()
        self._step = (self._step + 1) % STEPS
        return self._step

    def check(self) -> None:
        """Nothing: whoever waits for an exchange raises what becomes of it."""

    def gather(self, moments: Tensor, tag: Tag) -> Tensor:
        """The moments of all ranks, `(world_size, 2C + 2)`, in rank order."""
        rows = moments.new_empty(self._world, moments.numel())
        self._wait(_ops.peer_exchange, moments, rows, None, tag, MOMENTS)
        return rows

    def start_sum(self, sums: Tensor, tag: Tag) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks; the argument itself stays local."""
        self._begin()
        self._open = True
        _ops.peer_push(self._segment, self._state, sums, *tag, SUMS)

        def finish() -> Tensor:
            rows, total = sums.new_empty(self._world, sums.numel()), torch.empty_like(sums)
            self._open = False
            self._wait(_ops.peer_poll, sums, rows, total, tag, SUMS)
            return total

        return PendingSum(finish)

    def _begin(self) -> None:
        """Before an exchange: the ranks meet after an error."""
        if self._open:  # this rank has raised between sending and awaiting, and the peers do now
            self._open = False
            self._give_up()
        if self._abandoned:
            self._rejoin()

    def _wait(
        self,
        begin: Callable[..., int],
        numbers: Tensor,
        rows: Tensor,
        total: Tensor | None,
        tag: Tag,
        kind: int,
    ) -> None:
        """`begin`, and then peer_poll for as long as it takes."""
        arguments = (self._segment, self._state, numbers, rows, total, *tag, kind, _SLICE)
        try:
            deadline = time.monotonic() + self._timeout
            fault = begin(*arguments)
            while fault == PENDING:
                ended = self._ended_missing()
                fault = _ops.peer_poll(*arguments)  # once more: who has ended may have sent before
                if fault == PENDING:
                    self._check_missing(self._text(tag, kind), ended, deadline)
            if fault != DONE:
                raise self._fault(fault, self._text(tag, kind))
        except BaseException:
            self._give_up()
            raise

    def _fault(self, fault: int, mine: str) -> RuntimeError:
        state = self._state.tolist()
        peer = state[_PEER]
        if fault == GAVE_UP:
            for rank in filter(self._watch.has_ended, range(self._world)):
                return self._has_ended(rank, mine)  # which may be why
            return RuntimeError(f"rank {self._rank} in {mine}: rank {peer} gave up after an error of its own")
        theirs = self._text(Tag(state[_PEER_LAYER], state[_PEER_STEP]), state[_PEER_KIND])
        return mismatch(self._rank, mine, [(peer, theirs)])

    def _text(self, tag: Tag, kind: int) -> str:
        return self._describe(tag, direction(kind))

    def _missing(self) -> list[int]:
        return [rank for rank, flag in enumerate(self._state[_MISSING:].tolist()) if flag]

    def _ended_missing(self) -> list[int]:
        return [rank for rank in self._missing() if self._watch.has_ended(rank)]

    def _check_missing(self, what: str, ended: list[int], deadline: float) -> None:
        """Raises when the message of a rank that had ended is still missing, or time is up."""
        missing = self._missing()
        for rank in missing:
            if rank in ended:
                raise self._has_ended(rank, what)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {self._rank} in {what}: nothing from rank {missing[0]} within {self._timeout:g} s"
            )

    def _has_ended(self, rank: int, what: str) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} in {what}: {self._watch.text(rank)}")

    def _give_up(self) -> None:
        _ops.peer_give_up(self._segment, self._state)
        self._abandoned = True

    def _rejoin(self) -> None:
        """Waits until every rank has come back from the error, and agrees on the epoch.

        Raises RuntimeError, at every call, when the ranks are in different steps: one had raised an error of
        its own and begun anew while the others were still where it had left them. If they went on together
        now, the first would be a try, and so perhaps a batch, ahead of the others for ever.
        """
        deadline = time.monotonic() + self._timeout
        self._state[_STEP] = self._step
        ended = []
        while _ops.peer_rejoin(self._segment, self._state, _SLICE) != DONE:
            self._check_missing("the first exchange after an error", ended, deadline)
            ended = self._ended_missing()
        steps = self._segment.view(torch.int64)[_STATUS_STEP::_STATUS_WORDS][: self._world].tolist()
        if min(steps) != max(steps):
            begun = ", ".join(f"rank {rank} {step}" for rank, step in enumerate(steps))
            raise RuntimeError(
                f"rank {self._rank}: the ranks are back after an error, but in different steps ({begun}): "
                "one began anew after an error of its own that the others had not seen, so from now on they "
                "would mix different batches; make the process group anew, with all ranks at the same batch"
            )
        self._abandoned = False


def connect(
    agreement: Agreement,
    channels: int,
    dtype: torch.dtype,
    describe: Callable[[Tag, str], str],
    device: torch.device,
    asked: bool,
) -> SharedMemory | str:
    """A segment that all ranks have mapped, with room for layers of `channels`; or why there is none.

    All ranks get the same kind of answer. The segment never has a name: rank 0 keeps its file open until all
    have mapped it, so whoever dies, nothing is left behind.
    """
    capacity = room(channels, dtype)
    size = _ops.peer_segment_bytes(agreement.world, capacity)
    file, segment, told, result = None, None, "", "mapped"
    try:
        try:
            if agreement.rank == 0:
                file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
                os.posix_fallocate(file, 0, size)  # now: later a full disk would kill the process at a store
                os.pwrite(file, struct.pack("=q", os.getpid()), 8 * _STATUS_PROCESS)
                told = f"{os.getpid()} {file}"
        except OSError as error:
            told = str(error)
        told = agreement.from_rank_0("shared memory", told)
        try:
            segment = _map(told, size, agreement.rank)
        except (OSError, ValueError) as error:
            result = str(error)
        answers = agreement.ask("shared memory", result)
    finally:
        if file is not None:
            os.close(file)
    if list(answers) == ["mapped"]:
        return SharedMemory(segment, capacity, agreement, describe)
    return answers_text(answers)


def _map(told: str, size: int, rank: int) -> Tensor:
    """The segment that rank 0 has told of: its process, and the file there. ValueError if it is no such.

    Others may write to the store. So a file is looked at before it is opened, and only a new segment is
    taken: memory without a name, of this user and this size, marked by that process and not by this rank.
    """
    if not re.fullmatch("[1-9][0-9]{0,9} [0-9]{1,9}", told):
        raise ValueError(told)
    process, number = told.split()
    found = os.open(f"/proc/{process}/fd/{number}", os.O_PATH)  # which does nothing to the file
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
    marks = segment.view(torch.int64)[_STATUS_PROCESS::_STATUS_WORDS]  # by rank
    if marks[0] != int(process) or (rank > 0 and marks[rank] != 0):
        raise ValueError(f"file {number} of process {process} is no new segment")
    marks[rank] = os.getpid()
    return segment
