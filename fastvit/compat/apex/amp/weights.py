"""Casts a model's weights to half; its checkpoints have them in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.weak import WeakTensorKeyDictionary

HALF_TYPES = (torch.float16, torch.bfloat16)

masters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Half parameter -> the float32 master that an optimizer steps for it."""


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` is torch's or fastvit's BatchNorm, fused, in place or synchronised."""
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


@torch.no_grad()
def cast_weights(
    model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool | None
) -> dict[nn.Parameter, Tensor]:
    """Casts floating-point parameters, their gradients and buffers to `dtype`. Parameters stay the same
    objects, so optimizers built before stay valid.

    Args:
        keep_batchnorm_fp32: do not cast BatchNorm layers that have a weight.

    Returns:
        The earlier values of each cast parameter.
    """
    before: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        if keep_batchnorm_fp32 and is_batchnorm(module) and module.affine:
            continue
        cast = module.__dict__.setdefault("_amp_cast", set())  # another model may have the module too
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            cast.add(name)
            before[parameter] = parameter.data
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            if gradient is not None:
                parameter.grad = gradient.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                cast.add(name)
                module._buffers[name] = buffer.to(dtype)
    if dtype in HALF_TYPES:
        for module in model.modules():
            if not module.__dict__.get("_amp_checkpoints_float32"):
                module.register_state_dict_post_hook(_save_in_float32)
                module.register_load_state_dict_pre_hook(_load_masters)
                module.__dict__["_amp_checkpoints_float32"] = True
    return before


@torch.no_grad()
def restore_weights(model: nn.Module) -> None:
    """Undoes `cast_weights`: what it cast becomes float32, parameters with the values of their masters."""
    for module in model.modules():
        for name in module.__dict__.pop("_amp_cast", ()):
            if (parameter := module._parameters.get(name)) is not None:
                master = masters.get(parameter)
                parameter.grad = None
                parameter.data = parameter.data.float() if master is None else master.detach().clone()
            elif (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = buffer.float()


def _save_in_float32(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    # The masters and not the rounded half copies, so that a checkpoint restores exactly.
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.dtype in HALF_TYPES and prefix + name in state:
            master = masters.get(tensor)
            state[prefix + name] = tensor.detach().float() if master is None else master.detach()


@torch.no_grad()
def _load_masters(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name, parameter in module._parameters.items():
        master = None if parameter is None else masters.get(parameter)
        value = state.get(prefix + name)
        if master is not None and isinstance(value, Tensor) and value.shape == master.shape:
            master.copy_(value)
