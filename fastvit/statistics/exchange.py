"""What an exchange is called, what it takes, and what is said when ranks meet in different ones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# csrc/peer.h, Kind
MOMENTS, SUMS = range(2)
LEAST_PACKETS = 2049  # room for float32 moments of 2048 channels
STEPS = 2**24  # steps wrap here: float32 holds such numbers exactly


class Tag(NamedTuple):
    """What ranks compare in every exchange, so that different layers are never mixed."""

    layer: int  # order in which the group first saw the layer
    step: int  # count of the group's forward exchanges; a backward has that of its forward


def packets(channels: int, dtype: torch.dtype) -> int:
    """Packets that the moments of a layer take."""
    return (channels + 1) * dtype.itemsize // 4


class PendingSum:
    """A sum over ranks that is under way; `wait()` gives it, or raises."""

    def __init__(self, wait: Callable[[], Tensor]):
        self.wait = wait


def mismatch(rank: int, mine: str, others: list[tuple[int, str]]) -> RuntimeError:
    theirs = ", ".join(f"rank {peer} in {text}" for peer, text in others)
    return RuntimeError(
        f"rank {rank} is in {mine}, but {theirs}: the ranks of a group must run the same layers in the same "
        "order; did one of them skip a layer?"
    )
