"""Statistics by torch.distributed, over ranks without memory in common: one collective in each direction.

gloo aborts the process when a message is longer than the receiver expects. Ranks may be in different layers,
so buffers fit the widest layer. Each message has a tag, so that different layers are never merged.

All collectives are called as attributes of torch.distributed, so that tests can count them.
"""

import datetime
import math
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from .backend import Backend
from .process_watch import ProcessWatch
from .protocol import FLOAT64, HEADER_WORDS, DescribeExchange, Exchange, NumberKind, Tag, direction_name
from .store_consensus import StoreConsensus, format_ranks

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SIGNAL_CHECK_SECONDS = 0.2  # The time between two checks for signals.
# A collective that a rank had completed before it ended still ends on the other ranks within this time.
_COMPLETION_GRACE_SECONDS = 2.0
_ops = _library.fastvit_ops


class CollectiveBackend(Backend):
    """Statistics over a process group of any size, on one host or many.

    When a rank dies, does not call, or is in a backward while other ranks are in a forward, the other ranks
    raise within the group's timeout. CPU ranks raise within seconds if the process of a rank on their own
    host has ended.
    """

    name = "Collective"

    def __init__(
        self,
        process_group: "dist.ProcessGroup",
        consensus: StoreConsensus,
        device: torch.device,
        describe: DescribeExchange,
    ):
        exchange = Exchange(consensus.rank, consensus.world_size, device.type == "cuda")
        super().__init__(exchange, describe, device)
        self._process_group = weakref.ref(process_group)
        self._process_watch = consensus.refreshed_process_watch()
        self.timeout = consensus.timeout

    def try_reserve(self, channels: int, dtype: torch.dtype) -> bool:
        descriptor = self._exchange.descriptor
        descriptor.capacity = max(descriptor.capacity, 2 * channels + 2)
        descriptor.float64_messages |= dtype == torch.float64
        return True

    def merge_over_ranks(self, numbers: Tensor, tag: Tag) -> Tensor:
        self.raise_if_failed()
        exchange, kind = self._exchange.with_tag(tag), NumberKind(numbers.dim() - 1)
        try:
            return self._merge(numbers, exchange, kind)
        except BaseException as error:  # KeyboardInterrupt too leaves the exchange incomplete.
            self._failure_message = str(error) or type(error).__name__
            if not isinstance(error, RuntimeError):
                raise
            context = f"rank {self._rank} in {self._describe(tag, direction_name(kind))}"
            raise RuntimeError(f"{context}: {self._failure_reason()}: {error}") from error

    def _merge(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        """Returns the numbers of all ranks. Raises RuntimeError if a collective fails."""
        raise NotImplementedError

    def _failure_reason(self) -> str:
        return "the collective failed, so a rank has died, did not arrive or is in another collective"


class GpuCollectiveBackend(CollectiveBackend):
    """Statistics of GPUs: one packed all_gather forward, one all_reduce backward.

    csrc/cuda/collective_message.cu defines a message. One op packs this rank's message, and one op merges the
    messages of all ranks. The host waits for neither, and different tags raise at the next call.
    """

    def _merge(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        messages = message = _ops.pack_message(numbers, exchange)
        if kind == NumberKind.MOMENTS:
            messages = message.new_empty(self._exchange.descriptor.world * message.numel())
            getattr(dist, ALL_GATHER_NAME)(messages, message, group=self._process_group())
        else:
            dist.all_reduce(messages, group=self._process_group())
        return _ops.merge_messages(messages, numbers, exchange)


class CpuCollectiveBackend(CollectiveBackend):
    """Statistics of CPUs: each rank sends its numbers to all others at once, forward and backward.

    An exchange takes two delays of the network for any number of ranks; gloo's all_gather and all_reduce
    take two delays for each of their steps. A message has the length of its own layer. Each rank merges in
    rank order and in float64, as `SharedMemoryBackend` does, so the bits of the results are the same.
    """

    def try_reserve(self, channels: int, dtype: torch.dtype) -> bool:
        super().try_reserve(channels, dtype)
        descriptor = self._exchange.descriptor
        num_peers = descriptor.world - 1
        width = HEADER_WORDS + descriptor.capacity * (1 + descriptor.float64_messages)
        # `(num_peers, width)`: a row of 32-bit words for the message of each peer, in rank order.
        self._receive_buffer = torch.empty(num_peers, width, dtype=torch.int32)
        return True

    def _merge(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        descriptor, words = self._exchange.descriptor, numbers.view(-1).view(torch.int32)
        float64_flag = FLOAT64 if numbers.dtype == torch.float64 else 0
        header = torch.tensor(
            [descriptor.layer, descriptor.forward_index, len(words), kind | float64_flag], dtype=torch.int32
        )
        num_peers, width = self._receive_buffer.shape
        send_sizes = [HEADER_WORDS + len(words)] * descriptor.world
        receive_sizes = [width] * descriptor.world
        send_sizes[self._rank] = receive_sizes[self._rank] = 0
        self._receive_buffer[:, :HEADER_WORDS] = 0  # The row of a missing message keeps these zeros.
        flat_buffer, messages = self._receive_buffer.view(-1), torch.cat([header, words]).repeat(num_peers)
        work = dist.all_to_all_single(
            flat_buffer, messages, receive_sizes, send_sizes, group=self._process_group(), async_op=True
        )
        wait_interruptibly(work, self._process_watch, self.timeout)
        return _ops.merge_received(self._receive_buffer, numbers, exchange)

    def merge_over_ranks(self, numbers: Tensor, tag: Tag) -> Tensor:
        result = super().merge_over_ranks(numbers, tag)
        self.raise_reported_fault()
        return result

    def _failure_reason(self) -> str:
        num_words = self._receive_buffer[:, 2].tolist()  # The header's third word is the number of words.
        num_words.insert(self._rank, 1)  # This rank receives no message of its own, so it is not missing.
        missing_ranks = [rank for rank, count in enumerate(num_words) if not count]
        return f"nothing from {format_ranks(missing_ranks)}" if missing_ranks else "a message was not sent"


def wait_interruptibly(
    work: "dist.Work", process_watch: ProcessWatch | None = None, timeout: float = math.inf
) -> None:
    """Waits for a collective over gloo, a fraction of a second at a time, so that Python handles signals.

    Raises:
        RuntimeError: the collective failed or did not end within `timeout` seconds, or a rank of
            `process_watch` has ended.
    """
    begin = time.monotonic()
    first_end_time = None  # The time at which this rank first saw that another rank had ended.
    while (seconds_left := begin + timeout - time.monotonic()) > 0:
        try:
            # The limit is at least 1 ms, because gloo waits without a limit for 0 ms.
            work.wait(datetime.timedelta(seconds=min(_SIGNAL_CHECK_SECONDS, seconds_left + 1e-3)))
            return
        except RuntimeError:  # The time of this wait is over, or the collective failed.
            if work.is_completed():
                work.wait()  # Raises the collective's error.
                return
        # gloo sometimes misses that a connection has closed, and then waits for the group's timeout.
        if process_watch and (ended_ranks := [*filter(process_watch.has_ended, process_watch.pids_by_rank)]):
            first_end_time = first_end_time or time.monotonic()
            if time.monotonic() - first_end_time > _COMPLETION_GRACE_SECONDS:
                raise RuntimeError(process_watch.ended_message(ended_ranks[0]))
    raise RuntimeError(f"the timeout of {timeout:g} s is over")
