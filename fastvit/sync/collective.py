"""Statistics by torch.distributed: one packed all_gather forward, one all_reduce backward, on any backend.

Every message of a group is as long as its widest layer's: ranks that are in different layers then see it in
the tags, where gloo ends the process when sizes differ. What is in a message: csrc/sync/message.h. One op
makes it and one takes it apart; on a GPU the host waits for neither, and hears of tags that differ at the
next call. All collectives are called as attributes of torch.distributed.
"""

import datetime
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from .protocol import Describe, Exchange, Kind, Tag
from .transport import Way

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SLICE = datetime.timedelta(seconds=0.2)  # of waiting, between looks at signals
_ops = torch.ops.fastvit


class Collective(Way):
    """Statistics over a process group of any size, on one host or many.

    A rank that dies, never calls or is in a backward when others are in a forward makes the others raise
    within the group's timeout. Gloo closes its connections then: that group cannot be used again. After tags
    that differ it can, where the ranks are in the same step.
    """

    name = "Collective"

    def __init__(self, group: "dist.ProcessGroup", device: torch.device, describe: Describe):
        on_gpu = device.type == "cuda"
        world = dist.get_world_size(group)
        super().__init__(Exchange(dist.get_rank(group), world, on_gpu), describe, device)
        self._group = weakref.ref(group)
        self._deferred = on_gpu  # the host does not wait to see what an op reports

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        handle = self._exchange.handle
        handle.capacity = max(handle.capacity, 2 * channels + 2)
        handle.wide |= dtype == torch.float64
        return True

    def next_step(self) -> int:
        self.check()
        return super().next_step()

    def share(self, numbers: Tensor, tag: Tag) -> Tensor:
        self.check()
        exchange, kind = self._exchange.of(tag), Kind(numbers.dim() - 1)
        message = _ops.message_pack(numbers, exchange)
        if kind == Kind.MOMENTS:
            messages = message.new_empty(self._exchange.handle.world * message.numel())
            work = getattr(dist, ALL_GATHER)(messages, message, group=self._group(), async_op=True)
        else:
            messages = message
            work = dist.all_reduce(messages, group=self._group(), async_op=True)
        self._wait(work, messages, self._text(tag, kind))
        result = _ops.message_merge(messages, numbers, exchange)
        if not self._deferred:
            self.check()
        return result

    def _fail(self) -> None:
        report = self._exchange.report
        report.fault = 0
        if self._deferred:  # the hosts have run on, not equally far; on a CPU who is ahead began anew alone
            self._step = max(self._step, report.epoch)
        raise self._exchange.mismatch(self._describe)

    def _wait(self, work: "dist.Work", messages: Tensor, what: str) -> None:
        """Waits; in slices where that blocks the host, as gloo's does on a CPU, so that Ctrl-C is seen."""
        if messages.is_cuda:
            work.wait()
            return
        try:
            wait_on_host(work)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} in {what}: the collective failed, so a rank has died, did not "
                f"come or is elsewhere: {error}"
            ) from error


def wait_on_host(work: "dist.Work") -> None:
    """Waits for a collective over gloo, in slices, so that Ctrl-C is seen.

    Raises:
        RuntimeError: the collective failed.
    """
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:  # the slice is over, or the collective failed
            if work.is_completed():
                work.wait()  # raises why it failed
                return
