"""Casts networks to half, and makes float32 masters, without amp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..amp.forward import cast_floating, half_type
from ..amp.weights import is_batchnorm
from .loss_scaler import to_python_float

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
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
            if tensor.grad is not None:
                tensor.grad = None


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts `network` in place, except BatchNorm layers that have a weight."""
    for module in network.modules():
        if not (is_batchnorm(module) and module.affine):
            convert_module(module, dtype)
    return network


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in half behind a cast of its input; BatchNorm stays float32, outputs are half."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    return nn.Sequential(tofp16(), BN_convert_float(network.to(half_type(device))))


class FP16Model(nn.Module):
    """`network`, cast in place to half except BatchNorm; inputs are cast too, outputs are half."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self.dtype = half_type(device)
        self.network = convert_network(network, self.dtype)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*cast_floating(inputs, self.dtype))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters of `model`, and float32 masters of them: one each, or one flat one for all.

    Raises:
        TypeError: flat_master with parameters of several dtypes.
    """
    model_params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in model_params]
    dtypes = {p.dtype for p in model_params}
    if len(dtypes) > 1:
        raise TypeError(f"prep_param_lists: flat_master=True takes parameters of one dtype, got {dtypes}")
    flat = nn.Parameter(parameters_to_vector(model_params).detach().to(torch.float32, copy=True))
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[nn.Parameter], master_params: Sequence[nn.Parameter], flat_master: bool = False
) -> None:
    """Copies gradients from the lists of `prep_param_lists`, the first to the second."""
    if flat_master:
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        assert master_params[0].grad is not None
        master_params[0].grad.copy_(parameters_to_vector(flat))
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[nn.Parameter], master_params: Sequence[nn.Parameter], flat_master: bool = False
) -> None:
    """Copies values from the lists of `prep_param_lists`, the second to the first."""
    if flat_master:
        vector = master_params[0].detach().to(model_params[0].dtype)
        values = [torch.empty_like(p) for p in model_params]
        vector_to_parameters(vector, values)
    else:
        values = [master.detach() for master in master_params]
    for model, value in zip(model_params, values, strict=True):
        model.copy_(value)
