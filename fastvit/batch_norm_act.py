"""BatchNormAct: BatchNorm, an optional residual and any activation in one layer that saves one tensor."""

import torch
from torch import Tensor

from . import _checks, _norm_base

__all__ = ["BatchNormAct", "BatchNormActSync"]

MEMORY_MODES = ("recompute", "inplace", "keep")


class BatchNormAct(_norm_base.BatchNormBase):
    """BatchNorm + residual + activation in one pass, with a choice of what is kept for backward.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d; momentum=None averages
            cumulatively.
        activation: "identity", "relu", "relu6", "leaky_relu", "elu", "gelu" (by erf), "gelu_tanh", "silu" or
            "hardswish".
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.
        memory: what is kept for backward.
            "recompute": the input. If a later layer saves the output, the output is recomputed in one pass
            when that layer's backward needs it, bit for bit. This needs an open
            `fastvit.recompute_scope()` around the forward; without one the layer works as with "keep".
            "inplace": the output, which is written over the input, with the conditions of `InPlaceABN` on
            input and activation; takes no residual.
            "keep": the input, and the output where a later layer saves it.
        channel_last: the input is (N, *, C), as tokens (N, L, C) are. Tensors in torch's channels_last
            memory format need no flag.
        bias: False for no bias, as in torch.nn.BatchNorm2d.

    `forward(input, residual=None)`: input (N, C, *) with 2 to 5 dimensions, float16, bfloat16, float32 or
    float64; a residual of the same shape is added before the activation. The state_dict is BatchNorm's. Not
    differentiable twice, and not inside torch.func's transforms. torch.compile traces it as plain torch ops
    where they compute the same (a momentum, all parameters of x's dtype or, of a half x, float32, one
    process), and its partitioner chooses what is recomputed.

    Raises:
        ValueError: at construction, for an unknown activation or memory, or an activation that cannot be
            inverted with memory="inplace"; in forward, for a wrong rank or channel count, one value per
            channel in training, or a residual in place.
    """

    repr_options = ("activation", "memory", "channel_last")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "relu",
        activation_param: float | None = None,
        *,
        memory: str = "recompute",
        channel_last: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        name = type(self).__name__
        if memory not in MEMORY_MODES:
            raise ValueError(f"{name}: memory is {memory!r}; one of {', '.join(MEMORY_MODES)} expected")
        activation_param = _checks.resolve_activation_param(name, activation, activation_param)
        if memory == "inplace":
            activation_param = _checks.resolve_invertible_param(name, activation, activation_param)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, bias=bias, device=device, dtype=dtype
        )
        self.activation = activation
        self.activation_param = activation_param
        self.memory = memory
        self.channel_last = channel_last

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        activation, param = self.activation, self.activation_param
        return self._forward_batch_norm(
            input, residual, self.memory, activation=activation, activation_param=param
        )


class BatchNormActSync(_norm_base.ProcessGroupMixin, BatchNormAct):
    """BatchNormAct with statistics over the ranks of a process group.

    Args:
        process_group: the ranks that share statistics, by keyword; None is the default group, or this process
            alone when torch.distributed is not initialised.

    There is one exchange in each direction in training, and none in evaluation or when an output is
    recomputed. Ranks, errors, copies and pickles are as in `SyncBatchNorm`.
    """
