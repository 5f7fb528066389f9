"""Statistics over ranks that see each other's memory, by the protocol of csrc/sync/protocol.h.

`bn_stats` and the reducing ops take the group as `exchange`. They send this rank's numbers, await those of
the others, and merge. No collective is called.
"""

import torch
from torch import Tensor

from .. import _library, ops
from .protocol import Describe, Exchange, Tag, packets
from .transport import Backend, Reduce

_ops = _library.ops


class Peer(Backend):
    """A backend over peer memory.

    Args:
        own: this rank's arena (csrc/sync/protocol.h, Arena), `peer_bytes` bytes, zeros at first; it decides
            on the device.
        arenas: the addresses of all ranks' arenas.
        seconds: a GPU's timeout, or the length of a CPU's slice of waiting.
        describe: the text for an exchange in an error.
    """

    def __init__(
        self,
        name: str,
        own: Tensor,
        arenas: list[int],
        rank: int,
        capacity: int,
        seconds: float,
        describe: Describe,
    ):
        super().__init__(Exchange(rank, len(arenas), own.is_cuda, arenas), describe, own.device)
        self.name, self._own, self.timeout = name, own, seconds
        handle = self._exchange.handle
        handle.capacity, handle.nanoseconds = capacity, int(seconds * 1e9)

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        return packets(channels, dtype) <= self._exchange.handle.capacity

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        return self._run(lambda exchange: _ops.peer_share(numbers, exchange), tag)

    def moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self._run(lambda exchange: ops.bn_stats(x, channel_dim, exchange), tag)

    def sums(self, reduce: Reduce, tag: Tag) -> Tensor:
        return self._run(reduce, tag)

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self.check_usable()
        return op(self._exchange.of(tag))


def arena_bytes(world: int, capacity: int) -> int:
    return _ops.peer_bytes(world, capacity)
