"""The interface by which a layer gets statistics, and the base classes of the backends to share them."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .. import _library, ops
from .protocol import STEPS, Describe, Exchange, ExchangeState, Tag, packets

Reduce = Callable[[Tensor | None], Tensor]  # bn_reduce of a layer, given its `exchange`


class Transport(Protocol):
    """The source of a layer's statistics: one process, or a group.

    moments: returns the moments of x over all ranks, `(2C + 2,)`, and a tag for the backward: a small CPU
        tensor, which a compiler saves like any other; None with one rank.
    sums: returns `reduce(exchange)`: this rank's sums and those of all ranks, `(2, 2C)`; one row with one
        rank.

    After a failed exchange the result is NaN, the count included, and the next call of the host raises; where
    the host waits, this call does. No running statistics or parameters are written then.
    """

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None]: ...

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor: ...


class Local:
    """Statistics of this process alone. There is no exchange, so a layer may use the local ops."""

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, None]:
        return ops.bn_stats(x, channel_dim), None

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor:
        return reduce(None)


LOCAL = Local()


class Backend:
    """A backend that shares numbers, for all layers of a group on devices of one type.

    A Tag names an exchange. `share` takes numbers that an op without `exchange` has computed: for moments,
    `(2C + 2,)`, it returns the group's; for sums, `(1, 2C)`, it adds the group's as a second row.

    After an error no rank goes on: every later exchange of the group raises.
    """

    name: str
    timeout: float  # seconds, for the text of an error
    _failed = ""  # the message of an exchange that failed

    def __init__(self, exchange: Exchange, describe: Describe, device: torch.device):
        self._exchange, self._describe, self._device = exchange, describe, device
        self._rank, self._step = exchange.descriptor.rank, 0

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Makes room for a layer; False where there is none. All ranks call it between the same exchanges."""
        raise NotImplementedError

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        raise NotImplementedError

    def moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self.share(ops.bn_stats(x, channel_dim), tag)

    def sums(self, reduce: Reduce, tag: Tag) -> Tensor:
        return self.share(reduce(None), tag)

    def tag(self) -> Tensor:
        """The tag of the last exchange, for its backward."""
        return self._exchange.tag()

    def check(self, wait: bool = False) -> None:
        """Raises a reported fault, once; with `wait` after the device has finished its work."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._exchange.report.fault and not self._failed:
            self._fail()

    def next_step(self) -> int:
        self.check_usable()
        if self._capturing():
            return 0  # a wildcard: the graph replays at any step
        self._step = (self._step + 1) % STEPS
        return self._step

    def check_usable(self) -> None:
        """Before an exchange: raises a reported fault, and after any error always."""
        self.check()
        if self._failed:
            raise RuntimeError(
                f"rank {self._rank}: an exchange of this group has failed ({self._failed}); end all ranks "
                "and start them anew, or create a new process group with all ranks at the same batch"
            )

    def _fail(self) -> None:
        report = self._exchange.report
        if report.fault == ExchangeState.MISMATCH:
            error = self._exchange.mismatch(self._describe)
        else:
            context = f"rank {report.rank} in {self._exchange.text(self._describe)}"
            error = RuntimeError(
                f"{context}: rank {report.peer} raised an error and gave up the exchange"
                if report.fault == ExchangeState.PEER_ABANDONED
                else f"{context}: nothing from rank {report.peer} within {self.timeout:g} s "
                "(reported by the GPU; what it computed since is NaN)"
            )
        self._failed = str(error)
        raise error

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Peer(Backend):
    """A backend over memory of the ranks that all of them see, by the protocol of csrc/sync/protocol.h.

    `bn_stats` and `bn_reduce` take the group as `exchange`. They send this rank's numbers, await those
    of the others, and merge. No collective is called.

    Args:
        own: memory that the backend keeps alive, zeros at first: this rank's arena (csrc/sync/protocol.h,
            Arena), or a segment with all arenas. Its device is the backend's.
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
        descriptor = self._exchange.descriptor
        descriptor.capacity, descriptor.timeout_ns = capacity, int(seconds * 1e9)

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        return packets(channels, dtype) <= self._exchange.descriptor.capacity

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        return self._run(lambda exchange: _library.fastvit_ops.exchange_merge(numbers, exchange), tag)

    def moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self._run(lambda exchange: ops.bn_stats(x, channel_dim, exchange), tag)

    def sums(self, reduce: Reduce, tag: Tag) -> Tensor:
        return self._run(reduce, tag)

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self.check_usable()
        return op(self._exchange.of(tag))
