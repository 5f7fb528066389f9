"""The values and slopes of activations at their kinks, at the ends of the range, and in the last places."""

import pytest
import torch
from ops.matrix import ACTIVATIONS, DTYPES
from ops.tolerances import assert_close_enough
from torch import nn
from torch.nn import functional as F

from fastvit import BatchNormAct, _checks, functional
from fastvit._formulas import apply_activation
from layers.pairs import name_dtype

KINKS = {"relu": [0.0], "relu6": [0.0, 6.0], "leaky_relu": [0.0], "elu": [0.0], "hardswish": [-3.0, 0.0, 3.0]}


def apply_alone(v: torch.Tensor, activation: str) -> torch.Tensor:
    """Returns the activation of `(N, C, *)` values, by a batch norm that changes nothing."""
    parameters = torch.float64 if v.dtype == torch.float64 else torch.float32
    mean, var = (torch.full((v.shape[1],), k, dtype=parameters, device=v.device) for k in (0.0, 1.0))
    options = {"training": False, "eps": 0.0, "activation": activation}
    return functional.batch_norm_act(v, None, None, mean, var, **options)


def compute_slopes(y, v):
    return torch.autograd.grad(y.nan_to_num(0.0).sum(), v)[0]


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_slopes_at_kinks_and_ends_of_the_range_are_torchs(activation, device):
    """Values are exact if torch's are; the derivative at a kink is torch's; NaN stays NaN."""
    for dtype in DTYPES:
        largest = min(torch.finfo(dtype).max, 1e100)  # torch itself overflows in float64 past that
        points = [*KINKS.get(activation, []), 1e-6, -1e-6, 50.0, -50.0, largest, float("nan")]
        v = torch.tensor([points], dtype=dtype, device=device).repeat(3, 1).requires_grad_()
        torch_v = v.detach().double().requires_grad_()
        y = apply_alone(v, activation)
        param = _checks.resolve_activation_param("act", activation, None)
        torch_y = apply_activation(torch_v, activation, param)
        slopes = compute_slopes(y, v), compute_slopes(torch_y, torch_v)
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
        for actual, expected in ((y, torch_y), slopes):
            expected = expected.to(dtype)  # In float16 the far ends overflow alike.
            torch.testing.assert_close(actual[:, :-1], expected[:, :-1], **tolerance)
        assert y[:, -1].isnan().all()


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_dtype)
@pytest.mark.parametrize("activation", ["elu", "gelu", "gelu_tanh", "silu"])
def test_smooth_activations_are_right_to_a_few_units_in_the_last_place(activation, dtype, device):
    """The formulas have no cancellation: the normal distribution by erfc, sigmoids from both sides."""
    v = torch.linspace(-5, 12, 1009, dtype=torch.float64).to(dtype)
    wide = v.double()
    gate = {
        "gelu": lambda: torch.special.erfc(-wide * 0.5**0.5) / 2,
        "gelu_tanh": lambda: torch.sigmoid(wide * (8 / torch.pi) ** 0.5 * (1 + 0.044715 * wide * wide)),
        "silu": lambda: torch.sigmoid(wide),
        "elu": lambda: torch.where(wide > 0, 1.0, torch.expm1(wide) / wide),
    }[activation]()
    y = apply_alone(v.reshape(1, 1, -1).to(device), activation).flatten().cpu().double()
    error = ((y - wide * gate) / (wide * gate)).abs().nan_to_num(0.0).max().item()
    # exp(v^2 / 2) makes the rounding of v^2 some v^2 / 2 times larger
    units = {"gelu": 16, "gelu_tanh": 40}.get(activation, 3)
    assert error < units * torch.finfo(dtype).eps


def test_default_parameters_are_torchs_and_slopes_need_not_be_invertible():
    assert BatchNormAct(3, activation="leaky_relu").activation_param == nn.LeakyReLU().negative_slope
    assert BatchNormAct(3, activation="elu").activation_param == nn.ELU().alpha
    x = torch.randn(5, 3)
    for slope in (0.0, -0.5):
        layer = BatchNormAct(3, activation="leaky_relu", activation_param=slope)
        expected = F.leaky_relu(F.batch_norm(x, None, None, training=True), slope)
        assert_close_enough(layer(x), expected, row="layer")
