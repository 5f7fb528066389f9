"""mapillary's inplace_abn under its names, with its effective weight `|weight| + eps`.

In place: leaky_relu, elu and identity; relu only in `ABN`. leaky_relu with a slope of 0, with which
mapillary's gradients are wrong, is relu here: the layer saves its input, and its output is rebuilt inside
`fastvit.recompute_scope()` or a converted model. Negative slopes are refused.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from fastvit import functional
from fastvit.batch_norm_act import BatchNormAct
from fastvit.inplace_abn import InPlaceABN as _InPlaceABN
from fastvit.inplace_abn import InPlaceABNSync as _InPlaceABNSync

from ._finder import finish

__all__ = [
    "ABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "active_group",
    "inplace_abn",
    "inplace_abn_sync",
    "set_active_group",
]


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
        of_group: dict[str, Any] = (
            {} if group is None else {"process_group": group}
        )  # for InPlaceABNSync alone
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, *invertible, abs_weight=True, **of_group
        )
        self.activation, self.activation_param = activation, activation_param

    def forward(self, input: Tensor) -> Tensor:
        return self._forward_batch_norm(input, activation="relu") if self._is_relu else super().forward(input)


class InPlaceABNSync(InPlaceABN, _InPlaceABNSync):
    """`fastvit.InPlaceABNSync` with mapillary's arguments, `group` among them, and `|weight| + eps`."""

    group = property(
        lambda self: self.process_group, lambda self, group: setattr(self, "process_group", group)
    )
    set_group = _InPlaceABNSync.set_process_group


def inplace_abn(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`fastvit.functional.inplace_abn` with `|weight| + eps`; overwrites x."""
    if len(arguments) < 9:
        options.setdefault("activation_param", 0.01)
    return functional.inplace_abn(x, *arguments, **options, abs_weight=True)


def inplace_abn_sync(
    x: Tensor, *arguments: Any, group: dist.ProcessGroup | None = None, **options: Any
) -> Tensor:
    """`inplace_abn` with statistics over the ranks of `group` (None: all), by name or as 11th argument."""
    if len(arguments) == 10:
        *arguments, group = arguments  # type: ignore[assignment]
    if len(arguments) < 9:
        options.setdefault("activation_param", 0.01)
    return functional.inplace_abn_sync(x, *arguments, process_group=group, **options, abs_weight=True)


_groups: WeakKeyDictionary = WeakKeyDictionary()


def active_group(active: bool) -> dist.ProcessGroup | None:
    """The group of the ranks that passed True, or None. Every rank calls it; each group is made once."""
    world = dist.group.WORLD
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, bool(active))
    ranks = tuple(rank for rank, flag in enumerate(flags) if flag)
    if not ranks or len(ranks) == len(flags):
        return world if ranks else None
    known = _groups.setdefault(world, {})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks))
    return known[ranks]


def set_active_group(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Calls `set_process_group(group)`, or `set_group(group)`, of every layer in `module` that has it."""
    for layer in module.modules():
        set_group = getattr(layer, "set_process_group", None) or getattr(layer, "set_group", None)
        if callable(set_group):
            set_group(group)


finish(__name__)
