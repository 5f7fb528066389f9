"""Statistics by torch.distributed, over ranks without memory in common: one collective in each direction.

gloo aborts the process when a message is longer than expected, and ranks may be in different layers. So
buffers fit the widest layer, and messages carry tags.

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
from .agreement import Agreement, ProcessWatch, ranks_text
from .protocol import FLOAT64, HEADER_WORDS, Describe, Exchange, NumberKind, Tag, direction
from .transport import Backend

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SLICE = 0.2  # seconds of waiting between checks for signals
_GRACE = 2.0  # seconds in which a collective ends that a rank had completed before it ended
_ops = _library.fastvit_ops


class Collective(Backend):
    """Statistics over a process group of any size, on one host or many.

    When a rank dies, does not call, or is in a backward while others are in a forward, the others raise
    within the group's timeout; CPU ranks within seconds when a process of this host has ended.
    """

    name = "Collective"

    def __init__(
        self,
        process_group: "dist.ProcessGroup",
        agreement: Agreement,
        device: torch.device,
        describe: Describe,
    ):
        super().__init__(Exchange(agreement.rank, agreement.world, device.type == "cuda"), describe, device)
        self._process_group, self._watch = weakref.ref(process_group), agreement.watched()
        self.timeout = agreement.timeout

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        descriptor = self._exchange.descriptor
        descriptor.capacity = max(descriptor.capacity, 2 * channels + 2)
        descriptor.float64_messages |= dtype == torch.float64
        return True

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        self.check_usable()
        exchange, kind = self._exchange.of(tag), NumberKind(numbers.dim() - 1)
        try:
            return self._merged(numbers, exchange, kind)
        except BaseException as error:  # Ctrl-C too
            self._failed = str(error) or type(error).__name__
            if not isinstance(error, RuntimeError):
                raise
            context = f"rank {self._rank} in {self._describe(tag, direction(kind))}"
            raise RuntimeError(f"{context}: {self._why()}: {error}") from error

    def _merged(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        """The numbers of all ranks. RuntimeError where a collective fails."""
        raise NotImplementedError

    def _why(self) -> str:
        return "the collective failed, so a rank has died, did not arrive or is in another collective"


class Packed(Collective):
    """Statistics of GPUs: one packed all_gather forward, one all_reduce backward.

    csrc/cuda/collective_message.cu defines a message. One op packs it and one merges all. The host waits for
    neither, and different tags raise at the next call.
    """

    def _merged(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        messages = message = _ops.pack_message(numbers, exchange)
        if kind == NumberKind.MOMENTS:
            messages = message.new_empty(self._exchange.descriptor.world * message.numel())
            getattr(dist, ALL_GATHER)(messages, message, group=self._process_group())
        else:
            dist.all_reduce(messages, group=self._process_group())
        return _ops.merge_messages(messages, numbers, exchange)


class Direct(Collective):
    """Statistics of CPUs: each rank sends its numbers to all others at once, forward and backward.

    That takes two delays of the network for any number of ranks, where gloo's all_gather and all_reduce take
    as much for each of their steps. A message has the length of its own layer. Each rank merges in rank order
    and in double, so that the bits are those of shared memory.
    """

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        super().reserve(channels, dtype)
        descriptor = self._exchange.descriptor
        width, others = (
            HEADER_WORDS + descriptor.capacity * (1 + descriptor.float64_messages),
            descriptor.world - 1,
        )
        self._received = torch.empty(others, width, dtype=torch.int32)  # messages, by rank without this one
        return True

    def _merged(self, numbers: Tensor, exchange: Tensor, kind: NumberKind) -> Tensor:
        descriptor, words = self._exchange.descriptor, numbers.view(-1).view(torch.int32)
        wide = FLOAT64 if numbers.dtype == torch.float64 else 0
        header = torch.tensor(
            [descriptor.layer, descriptor.forward_index, len(words), kind | wide], dtype=torch.int32
        )
        others, width = self._received.shape
        sent, received = [HEADER_WORDS + len(words)] * descriptor.world, [width] * descriptor.world
        sent[self._rank] = received[self._rank] = 0
        self._received[:, :HEADER_WORDS] = 0  # a message that has not arrived keeps these zeros
        arrived, messages = self._received.view(-1), torch.cat([header, words]).repeat(others)
        group = self._process_group()
        work = dist.all_to_all_single(arrived, messages, received, sent, group=group, async_op=True)
        wait_on_host(work, self._watch, self.timeout)
        return _ops.merge_received(self._received, numbers, exchange)

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        result = super().share(numbers, tag)
        self.check()
        return result

    def _why(self) -> str:
        arrived = self._received[:, 2].tolist()  # the number of words of a message
        arrived.insert(self._rank, True)
        missing = [rank for rank, words in enumerate(arrived) if not words]
        return f"nothing from {ranks_text(missing)}" if missing else "a message was not sent"


def wait_on_host(work: "dist.Work", watch: ProcessWatch | None = None, timeout: float = math.inf) -> None:
    """Waits for a collective over gloo, in slices, so that signals are seen.

    Raises:
        RuntimeError: the collective failed, a rank of `watch` has ended and it does not, or the time is up.
    """
    begin = time.monotonic()
    seen = None  # when a rank was first seen to have ended
    while (left := begin + timeout - time.monotonic()) > 0:
        try:
            work.wait(datetime.timedelta(seconds=min(_SLICE, left + 1e-3)))  # 0 ms would be no limit
            return
        except RuntimeError:  # the end of a slice, or an error
            if work.is_completed():
                work.wait()  # raises the error
                return
        # gloo sometimes misses that a connection has closed, and then waits for the group's timeout.
        if watch and (ended := list(filter(watch.has_ended, watch.processes))):
            seen = seen or time.monotonic()
            if time.monotonic() - seen > _GRACE:
                raise RuntimeError(watch.text(ended[0]))
    raise RuntimeError(f"the timeout of {timeout:g} s is over")
