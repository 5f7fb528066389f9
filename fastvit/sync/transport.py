"""How the numbers of several ranks become one row: the interface, and what its ways have in common."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .. import ops
from .protocol import STEPS, Describe, Exchange, Kind, Tag, direction

Reduce = Callable[[Tensor | None], Tensor]  # bn_reduce or abn_reduce of a layer, given its `exchange`


class Transport(Protocol):
    """Whose statistics a layer takes, and the way that they go.

    moments: the moments of x over all ranks, `(2C + 2,)`, and a tag for the backward, a small tensor on the
        CPU (None: one rank), which a compiler saves like any other.
    sums: `reduce(exchange)`, this rank's sums and then those of all ranks, `(2, 2C)`, or one row for both.
    check: raises what became of exchanges that the host did not wait for.
    close: ends the use of the group.

    What cannot be had of all ranks is NaN, the count included, and the next call of the host raises, this one
    where it waits. Then nothing has been written that outlives the call.
    """

    world_size: int

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None]: ...

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Local:
    """Statistics of this process alone: nothing to exchange, so a layer may take the local ops."""

    world_size = 1

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, None]:
        return ops.bn_stats(x, channel_dim), None

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor:
        return reduce(None)

    def check(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Way:
    """One way of sharing numbers, for all layers of a group on devices of one type.

    Exchanges are called by a Tag here. `share` is for numbers that no op has at hand: moments, `(2C + 2,)`,
    become the group's; sums, `(1, 2C)`, get the group's as a second row.
    """

    name: str

    def __init__(self, exchange: Exchange, describe: Describe, device: torch.device):
        self._exchange, self._describe, self._device = exchange, describe, device
        self._rank, self._step = exchange.handle.rank, 0

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Whether a layer fits; called by all ranks between the same exchanges."""
        raise NotImplementedError

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        raise NotImplementedError

    def moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self.share(ops.bn_stats(x, channel_dim), tag)

    def sums(self, reduce: Reduce, tag: Tag) -> Tensor:
        return self.share(reduce(None), tag)

    def tag(self) -> Tensor:
        """The tag of the exchange that was begun last, for its backward."""
        return self._exchange.tag()

    def check(self, wait: bool = False) -> None:
        """Raises what has been reported, once; with `wait` when the device has done all it was given."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._exchange.report.fault:
            self._fail()

    def close(self) -> None:
        """Lets go of what the way holds; it is not used again."""

    def next_step(self) -> int:
        if self._capturing():
            return 0  # a wildcard: the graph replays at any step
        self._step = (self._step + 1) % STEPS
        return self._step

    def _fail(self) -> None:
        raise NotImplementedError

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _text(self, tag: Tag, kind: Kind) -> str:
        return self._describe(tag, direction(kind))
