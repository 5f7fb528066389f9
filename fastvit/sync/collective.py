"""Statistics by torch.distributed, over ranks without memory in common: one collective in each direction.

gloo aborts the process when a message is longer than expected, and ranks may be in different layers.
Therefore buffers fit the widest layer, and messages carry tags.

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
_SIGNAL_CHECK_SECONDS = 0.2  # between two checks for signals
# A collective that a rank had completed before it ended still ends on the other ranks within this time.
_COMPLETION_GRACE_SECONDS = 2.0
_ops = _library.fastvit_ops


class CollectiveBackend(Backend):
    """Statistics over a process group of any size, on one host or many.

    When a rank dies, does not call, or is in a backward while others are in a forward, the others raise
    within the group's timeout; CPU ranks within seconds when a process of this host has ended.
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
        except BaseException as error:  # Ctrl-C too
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

    That takes two delays of the network for any number of ranks, where gloo's all_gather and all_reduce take
    as much for each of their steps. A message has the length of its own layer. Each rank merges in rank order
    and in double, so that the bits are those of shared memory.
    """

    def try_reserve(self, channels: int, dtype: torch.dtype) -> bool:
        super().try_reserve(channels, dtype)
        descriptor = self._exchange.descriptor
        num_peers = descriptor.world - 1
        width = HEADER_WORDS + descriptor.capacity * (1 + descriptor.float64_messages)
        # One row for the message of each peer, by rank without this one.
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
        self._receive_buffer[:, :HEADER_WORDS] = 0  # a message that has not arrived keeps these zeros
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
        num_words = self._receive_buffer[:, 2].tolist()  # the header's third word
        num_words.insert(self._rank, True)
        missing = [rank for rank, count in enumerate(num_words) if not count]
        return f"nothing from {format_ranks(missing)}" if missing else "a message was not sent"


def wait_interruptibly(
    work: "dist.Work", process_watch: ProcessWatch | None = None, timeout: float = math.inf
) -> None:
    """Waits for a collective over gloo, a fraction of a second at a time, so that signals are seen.

    Raises:
        RuntimeError: the collective failed or did not end within `timeout` seconds, or a rank of
            `process_watch` has ended.
    """
    begin = time.monotonic()
    first_seen_ended = None  # the time at which a rank was first seen to have ended
    while (seconds_left := begin + timeout - time.monotonic()) > 0:
        try:
            # At least 1 ms, because gloo takes 0 ms for no limit.
            work.wait(datetime.timedelta(seconds=min(_SIGNAL_CHECK_SECONDS, seconds_left + 1e-3)))
            return
        except RuntimeError:  # the end of this wait, or an error
            if work.is_completed():
                work.wait()  # raises the error
                return
        # gloo sometimes misses that a connection has closed, and then waits for the group's timeout.
        if process_watch and (ended := [*filter(process_watch.has_ended, process_watch.pids_by_rank)]):
            first_seen_ended = first_seen_ended or time.monotonic()
            if time.monotonic() - first_seen_ended > _COMPLETION_GRACE_SECONDS:
                raise RuntimeError(process_watch.ended_message(ended[0]))
    raise RuntimeError(f"the timeout of {timeout:g} s is over")
