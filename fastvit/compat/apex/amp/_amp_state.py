"""The options and scalers of the last `amp.initialize`, shared by the whole process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Properties:
    """The options of one `amp.initialize`; `options` is their dict. A level lacks options that are None."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    options = property(vars)


class AmpState:
    """The state of the process after `initialize`: opt_properties, loss_scalers and their limits.

    Only O1 sets `handle`, which does no casts while its `_is_active` is False.
    """

    hard_override = False  # has no effect: a contradiction is an error
    allow_incoming_model_not_fp32 = False  # `initialize` takes models with half weights
    verbosity = 1


_amp_state: Any = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints `msg` unless verbosity is 0; with `rank0` only on rank 0."""
    is_other_rank = rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank()
    if _amp_state.verbosity and not is_other_rank:
        print(msg, flush=True)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters that `optimizer` steps: the model's own, which are float32 at every level."""
    for group in optimizer.param_groups:
        yield from group["params"]
