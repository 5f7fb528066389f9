"""The options and scalers of the last `amp.initialize`, shared by the whole process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .scaler import LossScaler


@dataclass(frozen=True)
class Properties:
    """The options of one `amp.initialize`. None means that the level does not use the option."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0


@dataclass
class AmpState:
    """The chosen options (None before the first `initialize`), one scaler per loss, the verbosity.

    `handle` is None but under O1, which does no casts while its `_is_active` is False. With
    `allow_incoming_model_not_fp32` True `initialize` takes models with half weights.
    """

    opt_properties: Properties | None = None
    loss_scalers: list[LossScaler] = field(default_factory=list)
    verbosity: int = 1
    handle: Any = None
    allow_incoming_model_not_fp32: bool = False


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0` only on rank 0."""
    elsewhere = rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank()
    if _amp_state.verbosity and not elsewhere:
        print(msg, flush=True)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters that `optimizer` steps, in order: the model's own, which are float32 at every level."""
    for group in optimizer.param_groups:
        yield from group["params"]
