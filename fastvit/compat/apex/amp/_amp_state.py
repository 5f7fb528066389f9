"""What the last `amp.initialize` decided, shared by the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .handle import AmpHandle, NoOpHandle
    from .opt_levels import Properties
    from .scaler import LossScaler

__all__ = ["AmpState", "master_params", "maybe_print"]


class AmpState:
    """The chosen options (None before the first `initialize`), one scaler per loss, how much to print.

    `handle` is what `init`, or `initialize` for O1, has switched on (None before); with its `_is_active`
    False nothing is cast. With `allow_incoming_model_not_fp32` True `initialize` takes models with half
    weights.
    """

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1
        self.handle: AmpHandle | NoOpHandle | None = None
        self.allow_incoming_model_not_fp32 = False


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print, with `rank0` on rank 0 alone, unless verbosity is 0."""
    elsewhere = rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank()
    if _amp_state.verbosity and not elsewhere:
        print(msg, flush=True)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters that `optimizer` steps, in order: float32 masters under O2, the model's own otherwise.

    Their gradients are unscaled when `scale_loss` has been left, so these are the ones to clip.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
