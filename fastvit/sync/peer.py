"""Statistics over ranks that see each other's memory, by the protocol of csrc/sync/protocol.h.

`bn_stats` and the reducing ops take the group as `exchange`. They send this rank's numbers, await those of
the others, and merge. No collective is called.
"""

import torch
from torch import Tensor

from .. import ops
from .protocol import Describe, Exchange, Fault, Tag, packets
from .transport import Backend, Reduce

_ops = torch.ops.fastvit


class Peer(Backend):
    """A backend over peer memory.

    Args:
        arenas: of all ranks (csrc/sync/protocol.h, Arena), each `peer_bytes` bytes, zeros at first.
        seconds: a GPU's timeout, or the length of a CPU's slice of waiting.
        describe: the text for an exchange in an error.

    After an error no rank goes on: every later exchange of the group raises.
    """

    def __init__(
        self,
        name: str,
        arenas: list[Tensor],
        rank: int,
        capacity: int,
        seconds: float,
        describe: Describe,
    ):
        device = arenas[rank].device
        super().__init__(Exchange(rank, len(arenas), device.type == "cuda", arenas), describe, device)
        self.name, self._arenas, self.timeout = name, arenas, seconds
        handle = self._exchange.handle
        handle.capacity, handle.nanoseconds = capacity, int(seconds * 1e9)
        self._failed = ""  # the message of an exchange that failed

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
        if not self._failed:  # else the error was raised before
            super().check(wait)

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self._begin()
        return op(self._exchange.of(tag))

    def _begin(self) -> None:
        """Before an exchange: raises a reported fault, and after it always."""
        self.check()
        if self._failed:
            raise RuntimeError(
                f"rank {self._rank}: an exchange of this group has failed ({self._failed}); end all ranks "
                "and start them anew, or create a new process group with all ranks at the same batch"
            )

    def _fail(self) -> None:
        report = self._exchange.report
        if report.fault == Fault.MISMATCH:
            error = self._exchange.mismatch(self._describe)
        else:
            what = f"rank {report.rank} in {self._exchange.text(self._describe)}"
            error = RuntimeError(
                f"{what}: rank {report.peer} raised an error and gave up the exchange"
                if report.fault == Fault.GAVE_UP
                else f"{what}: nothing from rank {report.peer} within {self.timeout:g} s "
                "(reported by the GPU; what it computed since is NaN)"
            )
        self._failed = str(error)
        raise error


def arena_bytes(world: int, capacity: int) -> int:
    return _ops.peer_bytes(world, capacity)
