"""Casts networks to half and makes float32 masters of their parameters, without amp."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ...apex_C import flatten, unflatten
from ..amp.forward import half_dtype, model_device_type
from ..amp.weights import is_batchnorm
from .loss_scaler import to_python_float

__all__ = [
    "BN_convert_float",
    "clip_grad_norm",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

TORCH_MAJOR, TORCH_MINOR = map(int, torch.__version__.split(".")[:2])


class tofp16(nn.Module):
    """Casts its input to float16 (bfloat16 on the CPU)."""

    def forward(self, input: Tensor) -> Tensor:
        return input.to(half_dtype(input.device))


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts the BatchNorm layers in `module` that have a weight to float32, in place."""
    for layer in module.modules():
        if is_batchnorm(layer) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Returns `network` in half behind a cast of its input; BatchNorm stays float32, outputs are half."""
    return nn.Sequential(tofp16(), BN_convert_float(network.to(half_dtype(model_device_type(network)))))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Returns the parameters that require gradients, and their float32 masters, which an optimizer steps.

    Args:
        flat_master: return one flat master for all parameters, which must have one dtype.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    values = [p.detach().to(torch.float32, copy=True) for p in parameters]
    dtypes = {str(p.dtype) for p in parameters}
    if flat_master and len(dtypes) != 1:
        raise ValueError(f"prep_param_lists: flat_master takes one dtype of parameters, got {sorted(dtypes)}")
    masters: list[Tensor] = [nn.Parameter(v) for v in ([flatten(values)] if flat_master else values)]
    if flat_master:
        masters[0].grad = torch.zeros_like(masters[0])
    return parameters, masters


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies gradients, or None, to the masters; a flat master gets zeros for None."""
    gradients = [p.grad for p in model_params]
    if flat_master:
        gradients_or_zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        gradients = [flatten(gradients_or_zeros)]
    for master, gradient in zip(master_params, gradients, strict=True):
        master.grad = None if gradient is None else gradient.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the masters to the parameters of the model."""
    masters = unflatten(master_params[0], model_params) if flat_master else master_params
    for parameter, master in zip(model_params, masters, strict=True):
        parameter.copy_(master)
