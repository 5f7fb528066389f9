"""InPlaceABN: BatchNorm and activation in one layer that overwrites its input.

Source: Rota Bulò, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs",
CVPR 2018, arXiv:1712.02616.
"""

import torch
from torch import Tensor

from . import _checks, _norm_base
from ._deprecation import RenamedAttribute, renamed_arguments

__all__ = ["InPlaceABN", "InPlaceABNSync"]


class InPlaceABN(_norm_base.BatchNormBase):
    """BatchNorm + activation, written over the input; saves its output for backward, plus O(C) numbers.

    The input is always lost, in evaluation and without gradients too. It must not be a leaf that requires
    grad, must not be saved by the op that made it (conv and linear do not save their output; relu, sigmoid
    and pooling do), and must not be read again (by a residual or a hook).

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d; momentum=None averages
            cumulatively.
        activation: "leaky_relu", "elu" or "identity", which can be inverted.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1), > 0.
        channel_last: the input is (N, *, C), as tokens (N, L, C) are. Tensors in torch's channels_last
            memory format need no flag.
        abs_weight: gamma is |weight| + eps, as in mapillary's inplace_abn; otherwise the signed weight, at
            least a small floor away from 0.
        bias: False for no bias, as in torch.nn.BatchNorm2d.

    Shape: (N, C, *) with 2 to 5 dimensions, float16, bfloat16, float32 or float64; the output has the same.
    The state_dict is BatchNorm's. Weights trained with BatchNorm give the same outputs, negative ones too.

    Backward recovers the normalised input with a relative error of about u * sqrt(1 + (bias / weight)^2),
    u the rounding of the dtype. A layer where the error is above 5% warns once.

    The floor is the larger of 1e-7 and 2^-17 |bias| in float32 (float64: 1e-12 and 2^-46). At a weight below
    it the weight's gradient has an error of less than 1%, and y one of at most 2^-17 |bias| per unit of the
    normalised input. In bfloat16 the floor is 1e-7 and in float16 1e-4; the gradient of a weight below it is
    inaccurate there. The input's gradient has no floor.

    Raises:
        ValueError: at construction, for an activation or slope that cannot be inverted; in forward, for a
            wrong rank or channel count, or one value per channel in training.
    """

    repr_options: tuple[str, ...] = ("activation", "channel_last")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float | None = None,
        *,
        channel_last: bool = False,
        abs_weight: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        activation_param = _checks.resolve_invertible_param(type(self).__name__, activation, activation_param)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, bias=bias, device=device, dtype=dtype
        )
        self.activation = activation
        self.activation_param = activation_param
        self.channel_last = channel_last
        self.abs_weight = abs_weight

    @renamed_arguments(x="input")
    def forward(self, input: Tensor) -> Tensor:
        activation, param = self.activation, self.activation_param
        return self._forward_batch_norm(input, None, "inplace", activation=activation, activation_param=param)


class InPlaceABNSync(_norm_base.ProcessGroupMixin, InPlaceABN):
    """InPlaceABN with statistics over the ranks of a process group.

    Args:
        process_group: the ranks that share statistics, by keyword; None is the default group, or this process
            alone when torch.distributed is not initialised.

    There is one exchange in each direction in training, and none in evaluation. Ranks, errors, copies and
    pickles are as in `SyncBatchNorm`.
    """

    group = RenamedAttribute("process_group")

    @renamed_arguments(group="process_group")
    def __init__(self, *args, process_group: "torch.distributed.ProcessGroup | None" = None, **kwargs):
        super().__init__(*args, process_group=process_group, **kwargs)
