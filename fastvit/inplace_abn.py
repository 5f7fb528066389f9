"""InPlaceABN: BatchNorm and activation in one layer that overwrites its input.

Source: Rota Bulò, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs",
CVPR 2018, arXiv:1712.02616.
"""

import warnings

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from . import _norm, functional

_UNSAFE = 0.05  # the share of error in the recovered xhat that is worth a warning
_CHECK_EVERY = 1024  # forwards; each check reads one number on the host


class InPlaceABN(_NormBase):
    """BatchNorm + activation, written over the input; saves its own output for backward and nothing else.

    The input must be nobody else's: not a leaf that requires grad, not saved by the op that made it (conv and
    linear do not save their output; relu, sigmoid and pooling do), not read again later (a residual, a hook).

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d; momentum=None averages
            cumulatively.
        activation: "leaky_relu", "elu" or "identity": one that can be inverted.
        activation_param: slope of leaky_relu or alpha of elu, > 0.
        channel_last: the input is (N, *, C), as tokens (N, L, C) are. Tensors in torch's channels_last
            memory format need no flag.
        abs_weight: take gamma as |weight| + eps, as mapillary's inplace_abn does; otherwise as it is,
            kept a small floor away from 0 (1e-7; 1e-4 in float16).

    Shape: (N, C, *) with 2 to 5 dimensions, float16, bfloat16, float32 or float64; returned as it came.
    The state_dict is BatchNorm's. Weights trained with BatchNorm give the same outputs, negative ones too.

    Backward recovers the normalised input with a relative error of about u * sqrt(1 + (bias / weight)^2),
    u the rounding of the storage type. A layer where that passes 5% says so once.

    Raises:
        ValueError: at construction, for an activation or slope that cannot be inverted; in forward, for a
            wrong rank or channel count, or one value per channel in training.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        channel_last: bool = False,
        abs_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        _norm.check_num_features(type(self).__name__, num_features)
        functional.check_in_place_activation(activation, activation_param)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation
        self.activation_param = activation_param
        self.channel_last = channel_last
        self.abs_weight = abs_weight
        self._forwards_to_check = 0

    def forward(self, x: Tensor) -> Tensor:
        _norm.check_channels(self, x, self.channel_last)
        if self.training and self.weight is not None and self.bias is not None:
            self._check_conditioning(x)
        return self._normalise(x, **_norm.forward_state(self))

    def _normalise(self, x: Tensor, **state) -> Tensor:
        return functional.inplace_abn(x, self.weight, self.bias, **state, **self._options())

    def _options(self) -> dict:
        return {
            "eps": self.eps,
            "activation": self.activation,
            "activation_param": self.activation_param,
            "channel_last": self.channel_last,
            "abs_weight": self.abs_weight,
        }

    def _check_conditioning(self, x: Tensor) -> None:
        """Says once when |bias| / |weight| leaves the stored output too few digits to recover xhat from."""
        if self._forwards_to_check < 0 or _norm.cannot_read_values(x):
            return
        self._forwards_to_check -= 1
        if self._forwards_to_check >= 0:
            return
        self._forwards_to_check = _CHECK_EVERY
        with torch.no_grad():
            gamma = self.weight.detach().double().abs().clamp_min(1e-30)
            ratio = (self.bias.detach().double().abs() / gamma).max().item()
        error = torch.finfo(x.dtype).eps / 4 * (1 + ratio**2) ** 0.5  # a quarter is rounding's mean
        if error > _UNSAFE:
            self._forwards_to_check = -1
            warnings.warn(
                f"InPlaceABN({self.num_features}): |bias| / |weight| is up to {ratio:.3g}, so in {x.dtype} "
                f"the input recovered in backward is off by about {min(error, 1):.0%} in that channel; "
                "keep this layer in a wider dtype, or use one that keeps its input (SyncBatchNorm)",
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, activation={self.activation}"
        if self.activation != "identity":
            text += f"[{self.activation_param}]"
        return text + (", channel_last=True" if self.channel_last else "")


class InPlaceABNSync(_norm.SharesGroup, InPlaceABN):
    """InPlaceABN with statistics over the ranks of a process group.

    Args:
        group: None is the default group (this process alone when torch.distributed is not initialised).

    One exchange in each direction in training, none in evaluation, made and checked as in SyncBatchNorm.
    Ranks may hold different numbers of samples, or none. In training every rank of the group must run the
    layer. Copies share the group; pickles leave it behind (a group exists in its process alone).
    """

    group_attribute = "group"

    def __init__(self, *args, group: "torch.distributed.ProcessGroup | None" = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.set_group(group)

    def _normalise(self, x: Tensor, **state) -> Tensor:
        return functional.inplace_abn_sync(
            x, self.weight, self.bias, **state, **self._options(), group=self.group, layer=self.layer_number
        )
