"""Statistics by torch.distributed: one packed all_gather forward, one all_reduce backward, on any backend.

Every message of a group is as long as its widest layer's: ranks that are in different layers then see it in
the tags, where gloo ends the process when sizes differ. Forward, a tag travels before the moments; backward,
every rank writes its own into a place of its own behind the sums, so that one all_reduce carries them all.
All collectives are called as attributes of torch.distributed.
"""

import datetime
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import STEPS, PendingSum, Tag, mismatch

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SLICE = datetime.timedelta(seconds=0.2)  # of waiting, between looks at signals
_TAG = len(Tag._fields)


class Collective:
    """Statistics over a process group of any size, on one host or many.

    A rank that dies or never calls makes the others raise within the group's timeout. Gloo closes its
    connections then: that group cannot be used again. After tags that differ it can.
    """

    name = "Collective"

    def __init__(self, group: "dist.ProcessGroup", device: torch.device, describe: Callable[[Tag, str], str]):
        self._group = weakref.ref(group)
        self._describe = describe
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._channels, self._dtype = 0, torch.float32
        self._later = _Later(device) if device.type == "cuda" else None
        self._step = 0

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Makes room for a layer; called by all ranks between the same exchanges."""
        self._channels = max(self._channels, channels)
        self._dtype = torch.promote_types(self._dtype, dtype)
        return True

    def next_step(self) -> int:
        self._step = (self._step + 1) % STEPS
        return self._step

    def gather(self, moments: Tensor, tag: Tag) -> Tensor:
        """The moments of all ranks, `(world_size, 2C + 2)`, in rank order."""
        payload = moments.view(torch.int32)
        words = (2 * self._channels + 2) * (self._dtype.itemsize // 4)
        message = payload.new_zeros(_TAG + words)
        _write(message, tag)
        message[_TAG : _TAG + payload.numel()] = payload
        rows = message.new_empty(self._world * message.numel())
        _wait(getattr(dist, ALL_GATHER)(rows, message, group=self._group(), async_op=True), rows)
        rows = rows.view(self._world, -1)
        moments = rows[:, _TAG : _TAG + payload.numel()].contiguous().view(moments.dtype)
        return self._checked(moments, rows[:, :_TAG], tag, "forward")

    def start_sum(self, sums: Tensor, tag: Tag) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks; the argument itself stays local."""
        message = sums.new_zeros(2 * self._channels + _TAG * self._world, dtype=self._dtype)
        message[: sums.numel()] = sums
        tags = message[2 * self._channels :].view(self._world, _TAG)
        _write(tags[self._rank], tag)
        work = dist.all_reduce(message, group=self._group(), async_op=True)

        def finish() -> Tensor:
            _wait(work, message)
            return self._checked(message[: sums.numel()].to(sums.dtype), tags, tag, "backward")

        return PendingSum(finish)

    def _checked(self, result: Tensor, tags: Tensor, mine: Tag, direction: str) -> Tensor:
        """`result` if all ranks had the same tag; else raises, on a GPU at a later call (NaN meanwhile)."""
        if self._later is not None:
            return self._later.checked(
                result, (tags == tags[self._rank]).all(), self._describe(mine, direction)
            )
        theirs = [Tag(*map(int, tag)) for tag in tags.tolist()]
        if all(tag == mine for tag in theirs):
            return result
        self._step = max(tag.step for tag in theirs)  # so that the next exchange fits
        others = [(rank, self._describe(tag, direction)) for rank, tag in enumerate(theirs) if tag != mine]
        raise mismatch(self._rank, self._describe(mine, direction), others)


class _Later:
    """Checks on a GPU that the host does not wait for: the flag of a failed one is read at the next call."""

    def __init__(self, device: torch.device):
        self._failed = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")

    def checked(self, result: Tensor, good: Tensor, description: str) -> Tensor:
        if self._seen:
            self._failed.zero_()
            self._seen.zero_()
            raise RuntimeError(
                f"in or before {description}, ranks of the group were in different layers: they must run the "
                "same layers in the same order; did one of them skip a layer?"
            )
        self._failed.logical_or_(~good)
        self._seen.copy_(self._failed, non_blocking=True)
        return torch.where(good, result, torch.nan)


def _write(place: Tensor, tag: Tag) -> None:
    for i, number in enumerate(tag):  # fills: a tensor made on the host would make a GPU wait for it
        place[i] = number


def _wait(work: "dist.Work", result: Tensor) -> None:
    """Waits; in slices where that blocks the host, as gloo's does on a CPU, so that Ctrl-C is seen."""
    if result.is_cuda:
        work.wait()
        return
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                raise
