"""Casts networks to half, without amp."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ..amp.forward import cast_floating, device_type, half_type
from ..amp.weights import is_batchnorm
from .loss_scaler import to_python_float

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "network_to_half",
    "to_python_float",
    "tofp16",
]


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


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters and buffers that `module` itself holds, in place."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts `network` in place, except BatchNorm layers that have a weight."""
    for module in network.modules():
        if not (is_batchnorm(module) and module.affine):
            convert_module(module, dtype)
    return network


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in half behind a cast of its input; BatchNorm stays float32, outputs are half."""
    return nn.Sequential(tofp16(), BN_convert_float(network.to(half_type(device_type(network)))))


class FP16Model(nn.Module):
    """`network`, cast in place to half except BatchNorm; inputs are cast too, outputs are half."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.dtype = half_type(device_type(network))
        self.network = convert_network(network, self.dtype)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*cast_floating(inputs, self.dtype))
