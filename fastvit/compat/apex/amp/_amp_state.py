"""What the last `amp.initialize` decided, shared by the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .opt_levels import Properties
    from .scaler import LossScaler

__all__ = ["AmpState", "master_params", "say"]


class AmpState:
    """The chosen options (None before the first `initialize`), one scaler per loss, how much to print."""

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1


_amp_state = AmpState()


def say(text: str) -> None:
    """Print on rank 0, unless verbosity is 0."""
    if _amp_state.verbosity and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        print(text, flush=True)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters that `optimizer` steps, in order: float32 masters under O2, the model's own otherwise.

    Their gradients are unscaled when `scale_loss` has been left, so these are the ones to clip.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
