"""mapillary's layers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastvit import _norm, functional
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


class InPlaceABNSync(InPlaceABN, _InPlaceABNSync):
    """`fastvit.InPlaceABNSync` with mapillary's arguments, `group` among them, and `|weight| + eps`."""
