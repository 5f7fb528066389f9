"""mapillary's layers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastvit.batch_norm_act import BatchNormAct
from fastvit.inplace_abn import InPlaceABN as _InPlaceABN
from fastvit.inplace_abn import InPlaceABNSync as _InPlaceABNSync


class ABN(BatchNormAct):
    """`fastvit.BatchNormAct` with mapillary's arguments: not in place, and with the signed weight.

    Args:
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
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param
        )


class InPlaceABN(_InPlaceABN):
    """`fastvit.InPlaceABN` with mapillary's arguments and `|weight| + eps`.

    leaky_relu with slope 0 is relu, which cannot be inverted: the layer saves its input instead.
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._is_relu = activation == "leaky_relu" and activation_param == 0
        # The base class refuses a slope of 0.
        invertible = ("identity", 0.01) if self._is_relu else (activation, activation_param)
        of_group: dict[str, Any] = {} if group is None else {"group": group}  # for InPlaceABNSync alone
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, *invertible, abs_weight=True, **of_group
        )
        if self._is_relu:
            self.activation, self.activation_param = activation, activation_param

    def forward(self, x: Tensor) -> Tensor:
        return self._normalise(x, None, "relu") if self._is_relu else super().forward(x)


class InPlaceABNSync(InPlaceABN, _InPlaceABNSync):
    """`fastvit.InPlaceABNSync` with mapillary's arguments, `group` among them, and `|weight| + eps`."""
