"""Statistics by torch.distributed: one packed all_gather forward, one all_reduce backward, on any backend.

Every message of a group is as long as its widest layer's: ranks that are in different layers then see it in
the tags, where gloo ends the process when sizes differ. What is in a message: csrc/message.h. One op makes it
and one takes it apart; on a GPU the host waits for neither, and hears of tags that differ at the next call.
All collectives are called as attributes of torch.distributed.
"""

import datetime
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import STEPS, PendingSum, Report, Tag, mismatch

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SLICE = datetime.timedelta(seconds=0.2)  # of waiting, between looks at signals
_ops = torch.ops.fastvit


class Collective:
    """Statistics over a process group of any size, on one host or many.

    A rank that dies, never calls or is in a backward when others are in a forward makes the others raise
    within the group's timeout. Gloo closes its connections then: that group cannot be used again. After tags
    that differ it can, where the ranks are in the same step.
    """

    name = "Collective"

    def __init__(self, group: "dist.ProcessGroup", device: torch.device, describe: Callable[[Tag, str], str]):
        self._group = weakref.ref(group)
        self._describe = describe
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._channels, self._wide = 0, False  # of the widest layer; whether one computes in float64
        self._on_gpu = device.type == "cuda"
        self._deferred = self._on_gpu  # the host does not wait to see what an op reports
        self._report = Report(self._on_gpu)
        self._step = 0

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Makes room for a layer; called by all ranks between the same exchanges."""
        self._channels = max(self._channels, channels)
        self._wide = self._wide or dtype == torch.float64
        return True

    def next_step(self) -> int:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return 0  # which goes with every step
        self.check()
        self._step = (self._step + 1) % STEPS
        return self._step

    def gather(self, moments: Tensor, tag: Tag) -> Tensor:
        """The moments of all ranks, `(world_size, 2C + 2)`, in rank order."""
        message = self._message(moments, tag, 0, 1)
        rows = message.new_empty(self._world * message.numel())
        work = getattr(dist, ALL_GATHER)(rows, message, group=self._group(), async_op=True)
        self._wait(work, rows, tag, "forward")
        return self._unpacked(rows, moments, tag, True)

    def start_sum(self, sums: Tensor, tag: Tag) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks; the argument itself stays local."""
        self.check()
        message = self._message(sums, tag, self._rank, self._world)
        work = dist.all_reduce(message, group=self._group(), async_op=True)

        def finish() -> Tensor:
            self._wait(work, message, tag, "backward")
            return self._unpacked(message, sums, tag, False)

        return PendingSum(finish)

    def check(self) -> None:
        """Raises what has been reported about tags that differed, once."""
        if not self._report:
            return
        self._report.clear()
        if self._deferred:  # the hosts have run on, not equally far; on a CPU who is ahead began anew alone
            self._step = max(self._step, self._report.epoch)
        peer, theirs = self._report.peer, self._report.theirs(self._describe)
        raise mismatch(self._rank, self._report.mine(self._describe), [(peer, theirs)])

    def _message(self, numbers: Tensor, tag: Tag, place: int, places: int) -> Tensor:
        return _ops.message_pack(numbers, *tag, place, places, 2 * self._channels + 2, self._wide)

    def _unpacked(self, messages: Tensor, numbers: Tensor, tag: Tag, gathered: bool) -> Tensor:
        """The numbers; where ranks' tags differ it raises, on a GPU at a later call (NaN meanwhile)."""
        result = _ops.message_unpack(
            messages, numbers, *tag, self._rank, self._world, gathered, self._report.memory
        )
        if not self._deferred:
            self.check()
        return result

    def _wait(self, work: "dist.Work", result: Tensor, tag: Tag, direction: str) -> None:
        """Waits; in slices where that blocks the host, as gloo's does on a CPU, so that Ctrl-C is seen."""
        if result.is_cuda:
            work.wait()
            return
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise RuntimeError(
                        f"rank {self._rank} in {self._describe(tag, direction)}: the collective failed, so a "
                        f"rank has died, did not come or is elsewhere: {error}"
                    ) from error
