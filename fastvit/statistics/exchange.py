"""What an exchange is called, what it takes, and what is said when ranks meet in different ones."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# csrc/peer.h: Kind, Fault, and how many words a Report is
MOMENTS, SUMS = range(2)
PENDING, DONE, MISMATCH, GAVE_UP, TIMEOUT = range(5)
_REPORT_WORDS = 12
LEAST_PACKETS = 2049  # room for float32 moments of 2048 channels
STEPS = 2**24  # steps wrap here: float32 holds such numbers exactly


class Tag(NamedTuple):
    """What ranks compare in every exchange, so that different layers are never mixed."""

    layer: int  # order in which the group first saw the layer
    step: int  # count of the group's forward exchanges; a backward has that of its forward


def packets(channels: int, dtype: torch.dtype) -> int:
    """Packets that the moments of a layer take."""
    return (channels + 1) * dtype.itemsize // 4


def room(channels: int, dtype: torch.dtype) -> int:
    """Packets that memory in common is made for when this layer asks: most layers fit that come later."""
    return max(LEAST_PACKETS, packets(channels, dtype))


class PendingSum:
    """A sum over ranks that is under way; `wait()` gives it, or raises."""

    def __init__(self, wait: Callable[[], Tensor]):
        self.wait = wait


class Report:
    """What an op says about an exchange that failed: csrc/peer.h, Report, in memory that GPUs can write to.

    The host looks at it without waiting for the GPU, so it may see a fault late, and never half of one.
    """

    _all: list[Tensor] = []  # never freed: a kernel that is under way when its group ends may still write

    def __init__(self, on_gpu: bool):
        self.memory = torch.zeros(_REPORT_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._all.append(self.memory)
        self._words = (ctypes.c_uint32 * _REPORT_WORDS).from_address(self.memory.data_ptr())

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._words[0] != 0

    @property
    def fault(self) -> int:
        return self._words[0]

    @property
    def peer(self) -> int:
        return self._words[2]

    @property
    def epoch(self) -> int:
        return self._words[3]

    def mine(self, describe: Callable[["Tag", str], str]) -> str:
        return self._text(4, describe)

    def theirs(self, describe: Callable[["Tag", str], str]) -> str:
        return self._text(8, describe)

    def _text(self, at: int, describe: Callable[["Tag", str], str]) -> str:
        layer, step, _, kind = self._words[at : at + 4]
        return describe(Tag(layer, step), direction(kind))

    def clear(self) -> None:
        self._words[0] = 0


def direction(kind: int) -> str:
    return "backward" if kind & SUMS else "forward"


def mismatch(rank: int, mine: str, others: list[tuple[int, str]]) -> RuntimeError:
    theirs = ", ".join(f"rank {peer} in {text}" for peer, text in others)
    return RuntimeError(
        f"rank {rank} is in {mine}, but {theirs}: the ranks of a group must run the same layers in the same "
        "order; did one of them skip a layer, or begin anew after an error of its own?"
    )


def never_ended(rank: int, what: str) -> RuntimeError:
    return RuntimeError(f"rank {rank}: an exchange was begun and, after an error, never ended: {what}")
