"""Statistics by torch.distributed: one packed all_gather forward, one all_reduce backward, on any backend.

Every message of a group has the length of its widest layer. Ranks in different layers then find different
tags, where gloo would abort the process because of different sizes. csrc/sync/message.h defines a message.
One op packs it and one merges all. On a GPU the host waits for neither, and different tags raise at the next
call. All collectives are called as attributes of torch.distributed, so that tests can count them.
"""

import datetime
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from .agreement import Agreement, ProcessWatch
from .protocol import Describe, Exchange, Kind, Tag
from .transport import Backend

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SLICE = datetime.timedelta(seconds=0.2)  # of waiting, between checks for signals
_GRACE = 2.0  # seconds in which a collective ends that a rank had completed before it ended
_ops = _library.ops


class Collective(Backend):
    """Statistics over a process group of any size, on one host or many.

    When a rank dies, does not call, or is in a backward while others are in a forward, the others raise
    within the group's timeout; over gloo within seconds when a process of this host has ended.
    """

    name = "Collective"

    def __init__(
        self,
        process_group: "dist.ProcessGroup",
        agreement: Agreement,
        device: torch.device,
        describe: Describe,
    ):
        on_gpu = device.type == "cuda"
        super().__init__(Exchange(agreement.rank, agreement.world, on_gpu), describe, device)
        self._process_group, self._watch = weakref.ref(process_group), agreement.watched()
        self._deferred = on_gpu  # the host reads an op's report at the next call

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        handle = self._exchange.handle
        handle.capacity = max(handle.capacity, 2 * channels + 2)
        handle.wide |= dtype == torch.float64
        return True

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        self.check_usable()
        exchange, kind = self._exchange.of(tag), Kind(numbers.dim() - 1)
        messages = message = _ops.message_pack(numbers, exchange)
        try:
            if kind == Kind.MOMENTS:
                messages = message.new_empty(self._exchange.handle.world * message.numel())
                gather = getattr(dist, ALL_GATHER)
                work = gather(messages, message, group=self._process_group(), async_op=True)
            else:
                work = dist.all_reduce(messages, group=self._process_group(), async_op=True)
            work.wait() if messages.is_cuda else wait_on_host(work, self._watch)
        except BaseException as error:  # Ctrl-C too
            self._failed = str(error) or type(error).__name__
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"rank {self._rank} in {self._text(tag, kind)}: the collective failed, so a rank has died, "
                f"did not arrive or is in another collective: {error}"
            ) from error
        result = _ops.message_merge(messages, numbers, exchange)
        if not self._deferred:
            self.check()
        return result


def wait_on_host(work: "dist.Work", watch: ProcessWatch | None = None) -> None:
    """Waits for a collective over gloo, in slices, so that signals are seen.

    Raises:
        RuntimeError: the collective failed, or a rank of `watch` has ended and it does not.
    """
    seen = None  # when a rank was first seen to have ended
    while True:
        try:
            work.wait(_SLICE)
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
