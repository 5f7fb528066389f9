"""mapillary's inplace_abn under its names, with its effective weight `|weight| + eps`.

The in-place activations are leaky_relu, elu and identity; `ABN` also has relu. mapillary's gradients of
leaky_relu with slope 0 are wrong. Here such a layer is a relu that saves its input, and its output is
recomputed inside `fastvit.recompute_scope()` or a converted model. A negative slope raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from fastvit import functional
from fastvit.batch_norm_act import BatchNormAct
from fastvit.inplace_abn import InPlaceABN as _InPlaceABN
from fastvit.inplace_abn import InPlaceABNSync as _InPlaceABNSync

from ._import_hook import set_up_package

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

    repr_options = (*_InPlaceABN.repr_options, "abs_weight")

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
        base_args = ("identity", 0.01) if self._is_relu else (activation, activation_param)
        # Only the base class of InPlaceABNSync takes process_group.
        options: dict[str, Any] = {} if group is None else {"process_group": group}
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, *base_args, abs_weight=True, **options
        )
        self.activation, self.activation_param = activation, activation_param

    def forward(self, x: Tensor) -> Tensor:  # mapillary's name of the argument
        return self._forward_batch_norm(x, activation="relu") if self._is_relu else super().forward(x)


class InPlaceABNSync(InPlaceABN, _InPlaceABNSync):
    """`fastvit.InPlaceABNSync` with mapillary's arguments, such as `group`, and `|weight| + eps`."""

    # These are mapillary's names. They do not warn, unlike those of the base class.
    group = property(
        lambda self: self.process_group, lambda self, group: setattr(self, "process_group", group)
    )
    set_group = _InPlaceABNSync.set_process_group


def inplace_abn(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Calls `fastvit.functional.inplace_abn` with `|weight| + eps`, which overwrites x."""
    _set_default_param(arguments, options)
    return functional.inplace_abn(x, *arguments, **options, abs_weight=True)


def inplace_abn_sync(
    x: Tensor, *arguments: Any, group: dist.ProcessGroup | None = None, **options: Any
) -> Tensor:
    """Calls `inplace_abn` with statistics over the ranks of `group`, or of all ranks if `group` is None.

    `group` may also be the 11th positional argument, as in mapillary's function.
    """
    if len(arguments) == 10:  # x is the first positional argument
        *arguments, group = arguments  # type: ignore[assignment]
    _set_default_param(arguments, options)
    return functional.inplace_abn_sync(x, *arguments, process_group=group, **options, abs_weight=True)


def _set_default_param(arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Sets mapillary's `activation_param`, the 9th argument after x, if the caller leaves it out."""
    if len(arguments) < 9:
        options.setdefault("activation_param", 0.01)


_group_cache: WeakKeyDictionary = WeakKeyDictionary()  # maps a world group to {ranks: group}


def active_group(active: bool) -> dist.ProcessGroup | None:
    """Returns the process group of the ranks that pass True, or None if no rank does.

    Every rank must call this function. The groups are cached.
    """
    world = dist.group.WORLD
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, bool(active))
    ranks = tuple(rank for rank, flag in enumerate(flags) if flag)
    if not ranks or len(ranks) == len(flags):
        return world if ranks else None
    groups = _group_cache.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks))
    return groups[ranks]


def set_active_group(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Sets the process group of every layer in `module` that has `set_process_group` or `set_group`."""
    for layer in module.modules():
        set_process_group = getattr(layer, "set_process_group", None) or getattr(layer, "set_group", None)
        if callable(set_process_group):
            set_process_group(group)


set_up_package(__name__)
