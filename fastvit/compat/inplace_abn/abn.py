"""mapillary's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastvit import _norm, functional
from fastvit.inplace_abn import InPlaceABN as _InPlaceABN
from fastvit.inplace_abn import InPlaceABNSync as _InPlaceABNSync

if TYPE_CHECKING:  # the base of the classes that use the mixin below
    _Layer = _InPlaceABN
else:
    _Layer = object
_ACTIVATIONS = ("relu", "leaky_relu", "elu", "identity")


class ABN(nn.modules.batchnorm._NormBase):
    """BatchNorm, then the activation; not in place, and with the signed weight.

    Args:
        activation: "relu", "leaky_relu", "elu" or "identity".
        activation_param: slope of leaky_relu, alpha of elu.
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
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"ABN: activation is {activation!r}; one of {', '.join(_ACTIVATIONS)} expected")
        self.activation = activation
        self.activation_param = activation_param

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"ABN: an input (N, C, *) expected, got {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        x = nn.modules.batchnorm._BatchNorm.forward(self, x)  # type: ignore[arg-type]  # a _NormBase suffices
        if self.activation == "relu":
            return F.relu(x, inplace=True)
        if self.activation == "leaky_relu":
            return F.leaky_relu(x, self.activation_param, inplace=True)
        if self.activation == "elu":
            return F.elu(x, self.activation_param, inplace=True)
        return x

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, activation={self.activation}"
        return f"{text}[{self.activation_param}]" if self.activation in ("leaky_relu", "elu") else text


class _SlopeZero(_Layer):
    """leaky_relu with slope 0 is relu, which cannot be inverted: the layer saves its input instead."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._is_relu = activation == "leaky_relu" and activation_param == 0
        # The base class refuses a slope of 0.
        invertible = ("identity", 0.01) if self._is_relu else (activation, activation_param)
        of_group: dict[str, Any] = {} if group is None else {"group": group}  # InPlaceABN has none
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, *invertible, abs_weight=True, **of_group
        )
        if self._is_relu:
            self.activation, self.activation_param = activation, activation_param

    def check_conditioning(self, x: Tensor) -> None:
        if not self._is_relu:
            super().check_conditioning(x)

    def _normalise(self, x: Tensor) -> Tensor:
        if not self._is_relu:
            return super()._normalise(x)
        weight, bias, running_mean, running_var, tracked, training, momentum = _norm.forward_state(self)
        if weight is not None:
            weight = functional.absolute_weight(weight, self.eps)
        process_group, layer = self._statistics_group()
        return functional.batch_norm_act(
            x, weight, bias, running_mean, running_var, None, training, momentum, self.eps, "relu",
            num_batches_tracked=tracked, recompute=True, process_group=process_group, layer=layer,
        )  # fmt: skip


class InPlaceABN(_SlopeZero, _InPlaceABN):
    """`fastvit.InPlaceABN` with mapillary's arguments and `|weight| + eps`."""


class InPlaceABNSync(_SlopeZero, _InPlaceABNSync):
    """`fastvit.InPlaceABNSync` with mapillary's arguments, `group` among them, and `|weight| + eps`."""
