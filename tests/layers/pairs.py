"""Pairs of a layer and torch's BatchNorm with the same parameters, and comparisons of their steps."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from ops.inputs import LayerInputs, run_layer_step
from ops.matrix import ACTIVATION_PARAM, ACTIVATIONS, INVERTIBLE
from ops.tolerances import assert_close_enough
from torch import nn

from fastvit import BatchNormAct, BatchNormActSync, InPlaceABN, InPlaceABNSync, SyncBatchNorm
from fastvit._formulas import apply_activation

LAYERS = (InPlaceABN, InPlaceABNSync, SyncBatchNorm, BatchNormAct, BatchNormActSync)
each_layer = pytest.mark.parametrize("layer_class", LAYERS)
PARAMETERS = ("weight", "bias")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
TORCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def name_dtype(dtype: torch.dtype) -> str:
    """Returns the id of a dtype in the names of tests."""
    return str(dtype).removeprefix("torch.")


class Kind(NamedTuple):
    """A kind of layer."""

    make: Callable[..., nn.Module]  # takes the channels and the options of BatchNormAct
    activations: list[str]
    usual_activation: str
    is_in_place: bool


def _make_sync_batch_norm(channels: int, activation: str, activation_param: float, **options) -> nn.Module:
    return SyncBatchNorm(channels, fuse_relu=activation == "relu", **options)


KINDS = {
    "InPlaceABN": Kind(InPlaceABN, INVERTIBLE, "leaky_relu", is_in_place=True),
    "SyncBatchNorm": Kind(_make_sync_batch_norm, ["identity", "relu"], "relu", is_in_place=False),
    "BatchNormAct": Kind(BatchNormAct, ACTIVATIONS, "gelu", is_in_place=False),
    "BatchNormAct_inplace": Kind(
        functools.partial(BatchNormAct, memory="inplace"), INVERTIBLE, "leaky_relu", is_in_place=True
    ),
}


class TorchLayer(nn.Module):
    """torch's BatchNorm, a residual and an activation, with the channels in any dimension."""

    def __init__(self, channels: int, dims: int, activation: str, channel_dim: int = 1, **options):
        super().__init__()
        self.norm = TORCH_NORMS[dims](channels, **options)
        self.activation, self.channel_dim = activation, channel_dim

    def forward(self, x, residual=None):
        y = self.norm(x.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)
        return apply_activation(y if residual is None else y + residual, self.activation, ACTIVATION_PARAM)


def make_pair(kind: str, inputs: LayerInputs, activation: str, **options) -> tuple[nn.Module, TorchLayer]:
    """Returns a layer with the parameters and running statistics of `inputs`, and torch's in float64."""
    layer = KINDS[kind].make(
        inputs.channels,
        activation=activation,
        activation_param=ACTIVATION_PARAM,
        channel_last=inputs.channel_dim == inputs.x.dim() - 1 and inputs.x.dim() > 2,
        dtype=inputs.weight.dtype,
        device=inputs.x.device,
        **options,
    )
    torch_layer = TorchLayer(inputs.channels, inputs.x.dim(), activation, inputs.channel_dim, **options)
    torch_layer = torch_layer.to(inputs.x.device).double()
    torch_layer.norm.eps = max(torch_layer.norm.eps, 1e-300)  # torch refuses 0
    with torch.no_grad():
        for name in (*PARAMETERS, *BUFFERS[:2]):
            if getattr(layer, name) is not None:
                getattr(layer, name).copy_(getattr(inputs, name))
    torch_layer.norm.load_state_dict(layer.state_dict())
    return layer, torch_layer


def assert_same_step(
    kind: str, layer: nn.Module, torch_layer: TorchLayer, inputs: LayerInputs, *residual: torch.Tensor
) -> None:
    """Raises unless a step of both layers gives the same output, gradients and running statistics."""
    actual = run_layer_step(layer, inputs.x, inputs.dy, *residual)
    expected = run_layer_step(
        torch_layer, inputs.x.double(), inputs.dy.double(), *(t.double() for t in residual)
    )
    row = "in_place_layer" if KINDS[kind].is_in_place else "layer"
    # A parameter's gradient sums one term per value, of either sign.
    scale_of_sums = inputs.dy.double().norm().item() / inputs.channels**0.5
    for a, b in zip(actual, expected, strict=True):
        least_scale = scale_of_sums if a.dim() == 1 else 1e-30
        assert_close_enough(a, b, row=row, dtype=inputs.x.dtype, least_scale=least_scale)
    y, dx = actual[:2]
    assert y.dtype == dx.dtype == inputs.x.dtype
    for name, buffer in torch_layer.norm.named_buffers():
        if name == "num_batches_tracked":
            assert layer.num_batches_tracked == buffer
        else:
            assert_close_enough(layer.get_buffer(name), buffer, row="running")
