"""Casts networks to half, without amp."""

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ..amp.forward import device_type, half_type
from ..amp.weights import is_batchnorm
from .loss_scaler import to_python_float

__all__ = ["BN_convert_float", "clip_grad_norm", "network_to_half", "to_python_float", "tofp16"]


class tofp16(nn.Module):
    """Casts its input to float16 (bfloat16 on the CPU)."""

    def forward(self, input: Tensor) -> Tensor:
        return input.to(half_type(input.device))


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts the BatchNorm layers in `module` that have a weight to float32, in place."""
    for layer in module.modules():
        if is_batchnorm(layer) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in half behind a cast of its input; BatchNorm stays float32, outputs are half."""
    return nn.Sequential(tofp16(), BN_convert_float(network.to(half_type(device_type(network)))))
