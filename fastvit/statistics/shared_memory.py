"""Statistics between processes of one host through shared memory: no collective, no system call.

The protocol is that of csrc/peer.h, in a segment of POSIX shared memory that every rank maps. The segment has
no name any more once all have mapped it, so nothing is left behind whatever becomes of the ranks.
"""

import mmap
import os
import time
import uuid
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
    never_ended,
    packets,
    room,
)

NAME = "SharedMemory"
FOLDER = Path("/dev/shm")  # where POSIX shared memory lives on Linux
_SLICE = 0.05  # seconds of waiting in C++ between looks at signals and at peers that died
_ops = torch.ops.fastvit

# csrc/cpu/peer.cpp, State; behind them a flag per rank: its message is missing
_STEP, _PEER, _PEER_LAYER, _PEER_STEP, _PEER_KIND, _MISSING = 5, 6, 7, 8, 10, 11
_STATUS_WORDS, _STATUS_PROCESS = 8, 3  # peer.h, Status


def host(device: torch.device) -> str:
    """The same on all ranks that can map one segment and see each other's processes; else why not."""
    try:
        return process_space() if FOLDER.is_dir() else f"no {FOLDER}"
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
        self._open: Tag | None = None  # of sums that were sent and not yet awaited
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
        self._open = tag
        _ops.peer_push(self._segment, self._state, sums, *tag, SUMS)

        def finish() -> Tensor:
            rows, total = sums.new_empty(self._world, sums.numel()), torch.empty_like(sums)
            self._open = None
            self._wait(_ops.peer_poll, sums, rows, total, tag, SUMS)
            return total

        return PendingSum(finish)

    def _begin(self) -> None:
        """Before an exchange: the ranks meet after an error, and one that was left half way is one."""
        if self._open is not None:
            tag, self._open = self._open, None
            self._give_up()
            raise never_ended(self._rank, self._text(tag, SUMS))
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
        """Waits until every rank has come back from the error, and agrees on epoch and step."""
        deadline = time.monotonic() + self._timeout
        self._state[_STEP] = self._step
        ended = []
        while _ops.peer_rejoin(self._segment, self._state, _SLICE) != DONE:
            self._check_missing("the first exchange after an error", ended, deadline)
            ended = self._ended_missing()
        self._step = int(self._state[_STEP])
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

    All ranks get the same kind of answer. Every rank knows the name before the segment exists and removes it
    when it has mapped it or cannot: whoever dies, nothing is left behind.
    """
    capacity = room(channels, dtype)
    path = FOLDER / agreement.from_rank_0("shared memory", f"fastvit-{uuid.uuid4().hex}")
    size = _ops.peer_segment_bytes(agreement.world, capacity)
    segment, result = None, "mapped"
    try:
        try:
            if agreement.rank == 0:
                _create(path, size)
        except OSError as error:
            result = str(error)
        created = agreement.from_rank_0("shared memory", result)
        if created == "mapped":
            try:
                segment = _map(path, size)
                words = segment[: 8 * _STATUS_WORDS * agreement.world].view(torch.int64)
                words[agreement.rank * _STATUS_WORDS + _STATUS_PROCESS] = os.getpid()
            except (OSError, ValueError) as error:
                result = str(error)
        else:
            result = created
        answers = agreement.ask("shared memory", result)
    finally:
        path.unlink(missing_ok=True)
    if list(answers) == ["mapped"]:
        return SharedMemory(segment, capacity, agreement, describe)
    return answers_text(answers)


def _create(path: Path, size: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # now, as an error: a full disk would kill the process at a store
    finally:
        os.close(file)


def _map(path: Path, size: int) -> Tensor:
    file = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
