"""Casts of a model's weights for the duration of a forward. At rest there is one copy of them, in float32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from .._fused import follow_

HALF_TYPES = (torch.float16, torch.bfloat16)

Swap = tuple[dict[str, Any], str, Any, Any]
"""A dict of a module and a name there; its value at rest and during the forward."""


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` is torch's or fastvit's BatchNorm, fused, in place or synchronised."""
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


class _Cast(torch.autograd.Function):
    """`Tensor.to`, whose gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_weights(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool | None) -> list[Swap]:
    """Swaps floating-point parameters and buffers for their casts, until `swap_back`.

    A gradient passes through the cast to the parameter.

    Args:
        keep_batchnorm_fp32: do not cast BatchNorm layers that have a weight.
    """
    casts: dict[int, Tensor] = {}  # tied weights are cast once
    swaps: list[Swap] = []
    for module in model.modules():
        if keep_batchnorm_fp32 and is_batchnorm(module) and module.affine:
            continue
        attributes = vars(module)
        entries: list[tuple[dict[str, Any], Any]] = [
            (module._parameters, module._parameters),
            (module._buffers, module._buffers),
            (attributes, attributes.get("_former_parameters", ())),  # of a replica of DataParallel
        ]
        for owner, names in entries:
            for name in list(names):
                tensor = owner[name]
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if (cast := casts.get(id(tensor))) is None:
                    sparse = attributes.get("sparse", False)
                    cast = casts[id(tensor)] = _Cast.apply(tensor, dtype) if sparse else tensor.to(dtype)
                swaps.append((owner, name, tensor, cast))
                owner[name] = cast
        if flat := attributes.get("_flat_weights"):  # of recurrent networks
            swaps.append((attributes, "_flat_weights", flat, [casts.get(id(w), w) for w in flat]))
            attributes["_flat_weights"] = swaps[-1][3]
    return swaps


@torch.no_grad()
def swap_back(swaps: list[Swap], follow_parameters: bool) -> None:
    """Undoes `cast_weights`. What forward has written to buffers, and with `follow_parameters` to parameters,
    is kept.
    """
    for owner, name, tensor, cast in reversed(swaps):
        now, owner[name] = owner.get(name), tensor
        if now is not cast and not isinstance(tensor, list):  # assigned by the script
            owner[name] = now.to(tensor.dtype) if type(now) is Tensor else now
        elif isinstance(cast, Tensor) and (follow_parameters or not isinstance(tensor, nn.Parameter)):
            follow_(tensor.data, cast.data)
