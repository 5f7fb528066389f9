"""Statistics over ranks that see each other's memory, by the protocol of csrc/sync/protocol.h.

`bn_stats` and the reducing ops take the group as `exchange`. They send this rank's numbers, await those of
the others, and merge. No collective is called.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from .agreement import Agreement, answers_text, ranks_text
from .protocol import Arena, Describe, Exchange, Fault, Tag, packets
from .transport import Reduce, Way

_ops = torch.ops.fastvit
Position = tuple[int, int, int]  # epoch, generation and step of a rank


class Peer(Way):
    """A way over peer memory.

    Args:
        arenas: of all ranks (csrc/sync/protocol.h, Arena), each `peer_bytes` bytes, zeros at first.
        seconds: a GPU's timeout, or the length of a CPU's slice of waiting.
        describe: the text for an exchange in an error.
        meet: called after an error with this rank's position; waits for all ranks, returns their positions.
    """

    def __init__(
        self,
        name: str,
        arenas: list[Tensor],
        rank: int,
        capacity: int,
        seconds: float,
        describe: Describe,
        meet: Callable[[Position], list[Position]],
    ):
        device = arenas[rank].device
        super().__init__(Exchange(rank, len(arenas), device.type == "cuda", arenas), describe, device)
        self.name, self._arenas, self._meet, self.timeout = name, arenas, meet, seconds
        handle = self._exchange.handle
        handle.capacity, handle.nanoseconds = capacity, int(seconds * 1e9)
        self._generation = 0
        self._abandoned = False  # an exchange failed: the ranks meet before the next one

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        return packets(channels, dtype) <= self._exchange.handle.capacity

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        return self._run(lambda exchange: _ops.peer_share(numbers, exchange), tag)

    def moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self._run(lambda exchange: ops.bn_stats(x, channel_dim, exchange), tag)

    def sums(self, reduce: Reduce, tag: Tag) -> Tensor:
        return self._run(reduce, tag)

    def next_step(self) -> int:
        self._begin()
        return super().next_step()

    def check(self, wait: bool = False) -> None:
        if not self._abandoned:  # else the error was raised before
            super().check(wait)

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self._begin()
        return op(self._exchange.of(tag))

    def _begin(self) -> None:
        """Before an exchange: raises a reported fault. After one, waits until all ranks are back."""
        if self._abandoned:
            if self._capturing():
                raise RuntimeError(
                    "an exchange has failed; run a step before the next capture of a CUDA graph"
                )
            self._rejoin()
        self.check()

    def _fail(self) -> None:
        self._abandoned = True
        report = self._exchange.report
        if report.fault == Fault.MISMATCH:
            raise self._exchange.mismatch(self._describe)
        what = f"rank {report.rank} in {self._exchange.text(self._describe)}"
        if report.fault == Fault.GAVE_UP:
            raise RuntimeError(f"{what}: rank {report.peer} raised an error and gave up the exchange")
        raise RuntimeError(
            f"{what}: nothing from rank {report.peer} within {self.timeout:g} s "
            "(reported by the GPU; what it computed since is NaN)"
        )

    def position(self) -> Position:
        """This rank's position for `meet`."""
        return self._exchange.report.epoch, self._generation + 1, self._step

    def _rejoin(self) -> None:
        """Waits until every rank is back after the error. All continue after the largest epoch."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of this rank have ended
        positions = self._meet(self.position())
        epoch = positions[0][0]
        for other, _, _ in positions[1:]:
            ahead = (other - epoch) % 2**32
            epoch = other if 0 < ahead < 2**31 else epoch  # epochs wrap
        self._generation = max(generation for _, generation, _ in positions)
        self._step = max(step for _, _, step in positions)
        start = bytes(Arena(epoch, self._generation))[: Arena.process.offset]
        self._arenas[self._rank][: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        self._exchange.report.fault = 0
        self._abandoned = False


def meeting(agreement: Agreement, one_step: bool) -> Callable[[Position], list[Position]]:
    """`Peer`'s argument `meet`, by questions of `agreement`.

    With `one_step` it raises RuntimeError, at this and every later call, when the ranks are back in different
    steps. One rank then raised an error and restarted its step while the others still waited in theirs. If
    they continued, that rank would stay one try, and so perhaps one batch, ahead of the others.
    """
    apart = ""

    def meet(position: Position) -> list[Position]:
        nonlocal apart
        if apart:
            raise RuntimeError(apart)
        texts = agreement.ask("the first exchange after an error", " ".join(map(str, position)))
        if wrong := {text: ranks for text, ranks in texts.items() if len(text.split()) != 3}:
            raise RuntimeError(f"rank {agreement.rank} is back after an error, but {answers_text(wrong)}")
        steps: dict[Position, list[int]] = {}
        for text, ranks in texts.items():
            epoch, generation, step = map(int, text.split())
            steps[epoch, generation, step] = ranks
        if one_step and len({step for _, _, step in steps}) > 1:
            by_rank = sorted((rank, step) for (_, _, step), ranks in steps.items() for rank in ranks)
            begun = ", ".join(f"{ranks_text([rank])} {step}" for rank, step in by_rank)
            apart = (
                f"rank {agreement.rank}: the ranks are back after an error, but in different steps "
                f"({begun}): one repeated its step after an error that the others did not have, so they "
                "would mix different batches; create a new process group, with all ranks at the same batch"
            )
            raise RuntimeError(apart)
        return list(steps)

    return meet


def arena_bytes(world: int, capacity: int) -> int:
    return _ops.peer_bytes(world, capacity)
