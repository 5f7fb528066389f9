"""Casts of a model's weights for the duration of a forward. At rest there is one copy of them, in float32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from .._fused_optimizer import update_master_

HALF_DTYPES = (torch.float16, torch.bfloat16)

WeightSwap = tuple[dict[str, Any], str, Any, Any]
"""A dict of a module, a name in it, and the value of that name at rest and during the forward."""


def is_batchnorm(module: nn.Module) -> bool:
    """Returns whether `module` is torch's or fastvit's BatchNorm, fused, in place or synchronised."""
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


class _SparseGradientCast(torch.autograd.Function):
    """Runs `Tensor.to` for a weight whose gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_weights(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool | None) -> list[WeightSwap]:
    """Swaps floating-point parameters and buffers for their casts, until `restore_weights`.

    Gradients pass through the casts to the parameters.

    Args:
        keep_batchnorm_fp32: do not cast BatchNorm layers that have a weight.
    """
    casts: dict[int, Tensor] = {}  # tied weights are cast once
    swaps: list[WeightSwap] = []
    for module in model.modules():
        if keep_batchnorm_fp32 and is_batchnorm(module) and module.affine:
            continue
        attributes = vars(module)
        entries: list[tuple[dict[str, Any], Any]] = [
            (module._parameters, module._parameters),
            (module._buffers, module._buffers),
            (attributes, attributes.get("_former_parameters", ())),  # a replica of DataParallel has these
        ]
        for owner, names in entries:
            for name in list(names):
                tensor = owner[name]
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if (cast := casts.get(id(tensor))) is None:
                    is_sparse = attributes.get("sparse", False)
                    cast = _SparseGradientCast.apply(tensor, dtype) if is_sparse else tensor.to(dtype)
                    casts[id(tensor)] = cast
                swaps.append((owner, name, tensor, cast))
                owner[name] = cast
        if flat_weights := attributes.get("_flat_weights"):  # recurrent networks have these
            flat_casts = attributes["_flat_weights"] = [casts.get(id(w), w) for w in flat_weights]
            swaps.append((attributes, "_flat_weights", flat_weights, flat_casts))
    return swaps


@torch.no_grad()
def restore_weights(swaps: list[WeightSwap], keeps_parameter_writes: bool) -> None:
    """Undoes `cast_weights`.

    Writes of forward to buffers are kept. With `keeps_parameter_writes` writes to parameters are kept too.
    """
    for owner, name, tensor, cast in reversed(swaps):
        current_value, owner[name] = owner.get(name), tensor
        if current_value is not cast and not isinstance(tensor, list):  # the forward assigned a value
            owner[name] = current_value.to(tensor.dtype) if type(current_value) is Tensor else current_value
        elif isinstance(cast, Tensor) and (keeps_parameter_writes or not isinstance(tensor, nn.Parameter)):
            update_master_(tensor.data, cast.data)
