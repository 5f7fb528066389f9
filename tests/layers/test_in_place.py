"""Layers in place: what they overwrite, how they recover their input, and when they warn or refuse."""

import warnings

import pytest
import torch
from ops.inputs import LayerInputs, run_layer_step
from ops.matrix import ACTIVATION_PARAM, DTYPES, INVERTIBLE
from ops.tolerances import assert_close_enough, relative_error
from torch import nn
from torch.nn import functional as F

from fastvit import BatchNormAct, InPlaceABN
from layers.pairs import TorchLayer, make_pair, name_dtype


def make_batch_norm_act_in_place(channels: int) -> nn.Module:
    return BatchNormAct(channels, activation="leaky_relu", memory="inplace")


each_layer_in_place = pytest.mark.parametrize(
    "make_layer",
    [
        pytest.param(InPlaceABN, id="InPlaceABN"),
        pytest.param(make_batch_norm_act_in_place, id="BatchNormAct"),
    ],
)


@each_layer_in_place
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_input_is_overwritten_and_returned(make_layer, training, device):
    layer = make_layer(5).to(device).train(training)
    for requires_grad in (True, False):
        x = torch.randn(4, 5, 3, 3, device=device, requires_grad=requires_grad).clone()
        version = x._version
        with torch.set_grad_enabled(requires_grad):
            assert layer(x) is x and x._version == version + 1


def test_abs_weight_is_mapillarys_gamma():
    inputs = LayerInputs("nchw", torch.float64)
    layer, torch_layer = make_pair("InPlaceABN", inputs, "leaky_relu", eps=1e-3)
    layer.abs_weight = True
    with torch.no_grad():
        torch_layer.norm.weight.copy_(inputs.weight.abs() + 1e-3)
    actual = run_layer_step(layer, inputs.x, inputs.dy)
    y, dx, dweight, dbias = run_layer_step(torch_layer, inputs.x, inputs.dy)
    for a, b in zip(actual, (y, dx, dweight * inputs.weight.sign(), dbias), strict=True):
        assert_close_enough(a, b, row="in_place_layer")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_dtype)
def test_a_weight_of_zero_is_floored_in_y_and_gets_its_gradient(dtype):
    floor = {torch.float16: 1e-4, torch.float64: 1e-12}.get(dtype, 1e-7)
    inputs = LayerInputs("nchw", dtype)
    layer = InPlaceABN(5, activation="identity", dtype=inputs.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, -0.0, floor / 2, -floor / 2, 1.0]))
    old_weight = layer.weight.detach().clone()
    y, dx, dweight, dbias = run_layer_step(layer, inputs.x, inputs.dy)
    assert torch.equal(layer.weight, old_weight) and y[:, :4].abs().max() <= 5 * floor
    xhat, dy = F.batch_norm(inputs.x.double(), None, None, None, None, True), inputs.dy.double()
    limit = {torch.float16: 2e-2, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    assert relative_error(dweight, (xhat * dy).sum((0, 2, 3))) < limit
    assert torch.equal(y[:, 0].sign().double(), xhat[:, 0].sign()), "0 counts as positive"
    assert torch.equal(y[:, 1].sign().double(), -xhat[:, 1].sign()), "-0 counts as negative"
    assert relative_error(dbias, dy.sum((0, 2, 3))) < 1e-5


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_dtype)
def test_gradients_stay_right_while_weights_pass_through_zero(dtype, activation, device):
    """y is rounded at the size of bias; gradients equal torch's for any weight, however small."""
    channels = 60
    options = {"activation": activation, "activation_param": ACTIVATION_PARAM, "dtype": dtype}
    layer = InPlaceABN(channels, **options, device=device)
    torch_layer = TorchLayer(channels, 4, activation).to(device).double()
    signs = (-1) ** torch.arange(channels - 1)
    with torch.no_grad():
        sizes = torch.logspace(-14, -2, channels - 1, dtype=torch.float64)
        layer.weight.copy_(torch.cat([torch.zeros(1), sizes * signs]))
        layer.bias.copy_(torch.tensor([0.1, -1.0, 3.0, -0.3]).repeat(channels // 4))
        torch_layer.norm.load_state_dict(layer.state_dict())
    x, dy = (torch.randn(8, channels, 13, 11, device=device, dtype=dtype) for _ in range(2))
    y, dx, dweight, dbias = run_layer_step(layer, x, dy)
    torch_y, torch_dx, torch_dweight, torch_dbias = run_layer_step(torch_layer, x.double(), dy.double())
    u = torch.finfo(dtype).eps / 2
    xhat = F.batch_norm(x.double(), None, None, None, None, True)
    scale = layer.bias.detach().double().abs().view(1, -1, 1, 1)
    limit = 2**7 * u * scale * xhat.abs() + 8 * u * (scale + 0.1) + 1e-7 * xhat.abs()
    assert ((y - torch_y).abs() <= limit).all()
    for channel in range(channels):
        error, norm = (dx - torch_dx)[:, channel].norm(), torch_dx[:, channel].norm()
        assert error <= 0.01 * norm
    assert (dbias - torch_dbias).norm() <= 1e-4 * torch_dbias.norm()
    assert relative_error(dweight, torch_dweight) < 0.01
    # In each channel the bound of every xhat, 2^-7, and the slope's rounding allow no larger error.
    dv = dy.double() * torch.where(torch_y > 0, 1.0, 1.0 if activation == "identity" else ACTIVATION_PARAM)
    assert ((dweight - torch_dweight).abs() <= 3 * 2**-7 * dv.abs().sum((0, 2, 3))).all()


@each_layer_in_place
def test_an_unsafe_ratio_of_bias_and_weight_is_warned_of_once(make_layer):
    layer = make_layer(4)
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.fill_(2.0)
    message = rf"{type(layer).__name__}\(4\): \|bias\| / \|weight\| is up to 200, so in torch.bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 4))  # float32 has digits enough
        layer._forwards_until_check = 0
        with pytest.warns(UserWarning, match=message) as record:
            layer(torch.randn(3, 4).bfloat16())
        assert record[0].filename == __file__
        for _ in range(3):
            layer(torch.randn(3, 4).bfloat16())


def test_the_ratio_of_bias_and_weight_is_that_of_the_gamma_that_is_used():
    layer = InPlaceABN(2, abs_weight=True, eps=1e-2).half()
    nn.init.zeros_(layer.weight), nn.init.constant_(layer.bias, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 2).half())


def make_inference_tensor():
    with torch.inference_mode():
        return torch.randn(4, 3)


def test_an_input_that_cannot_be_overwritten_is_refused_before_it_is():
    def make_leaf():
        return torch.randn(4, 6, requires_grad=True)

    for x, problem in [
        (torch.randn(4, 3, requires_grad=True), "is a leaf that requires grad"),
        (make_leaf()[:, :3], "is a view of a leaf"),
        (make_leaf().clone().chunk(2, 1)[0], "is one of the views"),
        (make_inference_tensor(), "is an inference tensor"),
        (torch.randn(4, 3, dtype=torch.complex64).conj().imag, "is negated by a flag"),
    ]:
        layer, old_x = InPlaceABN(3), x.detach().clone()
        with pytest.raises(RuntimeError, match=problem):
            layer(x)
        assert torch.equal(x, old_x) and layer.num_batches_tracked == 0


def test_a_slice_of_a_result_may_be_overwritten():
    leaf = torch.randn(4, 6, requires_grad=True)
    InPlaceABN(3)(leaf.clone()[:, :3]).square().sum().backward()
    torch_leaf = leaf.detach().clone().requires_grad_()
    F.leaky_relu(F.batch_norm(torch_leaf[:, :3], None, None, training=True), 0.01).square().sum().backward()
    assert_close_enough(leaf.grad, torch_leaf.grad, row="in_place_layer", least_scale=1.0)
