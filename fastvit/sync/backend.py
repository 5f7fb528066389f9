"""`Backend` and `PeerBackend`, the base classes by which a group exchanges and merges a layer's numbers."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _library, ops
from .protocol import (
    FORWARD_INDEX_MODULUS,
    DescribeExchange,
    Exchange,
    ExchangeState,
    Tag,
    num_packets,
)
from .store_consensus import StoreConsensus

# Calls an op of a layer. The parameter is the op's argument `exchange`, None for this rank alone.
ExchangeOp = Callable[[Tensor | None], Tensor]


class Backend:
    """Merges the numbers of all ranks, for all layers of a group on devices of one type.

    A Tag names an exchange. `merge_over_ranks` takes numbers of this rank, from an op without `exchange`. For
    moments, `(2C + 2,)`, it returns the moments of all ranks. For sums, `(1, 2C)`, it returns `(2, 2C)`: the
    sums of this rank and those of all ranks.

    After a failed exchange the group is unusable: every later exchange raises on every rank.
    """

    name: str  # `describe_groups` prints this name.
    timeout: float  # Seconds after which an exchange fails; error messages show this number.
    _failure_message = ""  # The message of the exchange that failed, "" if none has failed.

    def __init__(self, exchange: Exchange, describe: DescribeExchange, device: torch.device):
        self._exchange, self._describe, self._device = exchange, describe, device
        self._rank, self._forward_index = exchange.descriptor.rank, 0

    def try_reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Reserves memory for a layer, and returns whether the backend has enough memory.

        All ranks call this method between the same two exchanges.
        """
        raise NotImplementedError

    def merge_over_ranks(self, numbers: Tensor, tag: Tag) -> Tensor:
        raise NotImplementedError

    def compute_moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self.merge_over_ranks(ops.bn_stats(x, channel_dim), tag)

    def compute_sums(self, reduce: ExchangeOp, tag: Tag) -> Tensor:
        return self.merge_over_ranks(reduce(None), tag)

    def last_tag_tensor(self) -> Tensor:
        """Returns the tag of the last exchange, for its backward."""
        return self._exchange.last_tag_tensor()

    def raise_reported_fault(self, wait: bool = False) -> None:
        """Raises a reported fault, once. With `wait` the host first waits until the device has finished."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._exchange.report.fault and not self._failure_message:
            self._raise_fault()

    def next_forward_index(self) -> int:
        self.raise_if_failed()
        if self._is_capturing():
            return 0  # 0 matches every index, because the graph replays at any index.
        self._forward_index = (self._forward_index + 1) % FORWARD_INDEX_MODULUS
        return self._forward_index

    def raise_if_failed(self) -> None:
        """Raises a reported fault, and always after a failed exchange. Called before each exchange."""
        self.raise_reported_fault()
        if self._failure_message:
            raise RuntimeError(
                f"rank {self._rank}: an exchange of this group has failed ({self._failure_message}); end all "
                "ranks and start them anew, or create a new process group with all ranks at the same batch"
            )

    def _raise_fault(self) -> None:
        report = self._exchange.report
        if report.fault == ExchangeState.MISMATCH:
            error = self._exchange.mismatch_error(self._describe)
        else:
            context = f"rank {report.rank} in {self._exchange.describe_local_exchange(self._describe)}"
            error = RuntimeError(
                f"{context}: rank {report.peer} abandoned the exchange after an error of its own; see its "
                "traceback"
                if report.fault == ExchangeState.PEER_ABANDONED
                else f"{context}: nothing from rank {report.peer} within {self.timeout:g} s "
                "(reported by the GPU, whose results since then are NaN)"
            )
        self._failure_message = str(error)
        raise error

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class PeerBackend(Backend):
    """A backend over memory that all ranks see, by the protocol of csrc/sync/protocol.h.

    `bn_stats` and `bn_reduce` take the group as `exchange`. They send this rank's numbers, wait for
    the numbers of the other ranks, and merge all. No collective is called.

    Args:
        local_memory: this rank's arena (csrc/sync/protocol.h, Arena), or a segment with the arenas of all
            ranks. The backend keeps this memory alive. The memory holds zeros at first, and its device
            becomes the backend's device.
        arenas: the addresses of all ranks' arenas.
        capacity: packets that a message may have.
        op_wait_seconds: how long an op waits for the peers. After this time an op on a GPU reports a
            timeout, and an op on a CPU returns to Python.
        describe: returns the text by which an error names an exchange.
    """

    def __init__(
        self,
        local_memory: Tensor,
        arenas: list[int],
        rank: int,
        capacity: int,
        op_wait_seconds: float,
        describe: DescribeExchange,
    ):
        exchange = Exchange(rank, len(arenas), local_memory.is_cuda, arenas)
        super().__init__(exchange, describe, local_memory.device)
        self._local_memory, self.timeout = local_memory, op_wait_seconds
        exchange.descriptor.capacity, exchange.descriptor.timeout_ns = capacity, int(op_wait_seconds * 1e9)

    @staticmethod
    def host_name(device: torch.device) -> str:
        """Returns a name that is equal on ranks that can see each other's memory.

        Raises OSError if other ranks cannot see this rank's memory.
        """
        raise NotImplementedError

    @classmethod
    def connect(
        cls,
        consensus: StoreConsensus,
        capacity: int,
        describe: DescribeExchange,
        device: torch.device,
        may_share_gpu: bool,
    ) -> "PeerBackend":
        """Opens the memory of all ranks. Raises BackendUnavailable on all ranks if that fails on one."""
        raise NotImplementedError

    def try_reserve(self, channels: int, dtype: torch.dtype) -> bool:
        return num_packets(channels, dtype) <= self._exchange.descriptor.capacity

    def merge_over_ranks(self, numbers: Tensor, tag: Tag) -> Tensor:
        return self._run_exchange(
            lambda exchange: _library.fastvit_ops.exchange_merge(numbers, exchange), tag
        )

    def compute_moments(self, x: Tensor, channel_dim: int, tag: Tag) -> Tensor:
        return self._run_exchange(lambda exchange: ops.bn_stats(x, channel_dim, exchange), tag)

    def compute_sums(self, reduce: ExchangeOp, tag: Tag) -> Tensor:
        return self._run_exchange(reduce, tag)

    def _run_exchange(self, op: ExchangeOp, tag: Tag) -> Tensor:
        self.raise_if_failed()
        return op(self._exchange.with_tag(tag))
