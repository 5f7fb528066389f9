"""Layers of fastvit.compat.apex: normalization, mlp, fused_dense and contrib, against torch's functions."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import call_under_o1
from fastvit.compat.apex import amp, contrib, fused_dense, mlp, normalization
from fastvit.compat.apex._warn_once import warn_once

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_norms_give_torchs_results(weight, given):
    x = torch.randn(3, 5, 8, dtype=given)
    for ours, theirs, result in (
        (normalization.FusedLayerNorm, nn.LayerNorm, given),
        (normalization.MixedFusedLayerNorm, nn.LayerNorm, weight),
        (normalization.FusedRMSNorm, nn.RMSNorm, given),
        (normalization.MixedFusedRMSNorm, nn.RMSNorm, weight),
    ):
        warn_once.cache_clear()
        with pytest.warns(UserWarning, match="memory_efficient has no effect"):
            layer, expected = ours((5, 8), memory_efficient=True), theirs((5, 8), eps=1e-5)
        nn.init.normal_(layer.weight)
        expected.load_state_dict(layer.state_dict())
        actual = layer.to(weight)(x)
        assert actual.dtype == result
        rounded = copy.deepcopy(expected).to(weight).double()(x.double())
        torch.testing.assert_close(
            actual.double(), rounded, rtol=2e-2, atol=2e-2 if torch.bfloat16 in (weight, given) else 1e-5
        )


def test_norms_are_autograd_functions_too():
    """`apply`, which extensions of apex call, and `forward`, whose arguments Megatron-LM looks at."""
    module = normalization.fused_layer_norm
    x, w, b = (torch.randn(size, requires_grad=True) for size in ((3, 8), (8,), (8,)))
    for kind, name, parameters in (("LayerNorm", "layer_norm", (w, b)), ("RMSNorm", "rms_norm", (w,))):
        torchs = getattr(F, name)
        for ending in ("AffineFunction", "AffineMixedDtypesFunction", "Function"):
            function = getattr(module, f"Fused{kind}{ending}")
            arguments = inspect.getfullargspec(function.forward).args
            assert arguments[:2] == ["ctx", "input"] and arguments[-1] == "memory_efficient"
            args = (x,) if ending == "Function" else (x, *parameters)
            expected, actual = torchs(x, (8,), *args[1:], eps=1e-3), function.apply(*args, (8,), 1e-3, False)
            assert torch.equal(actual, expected) and torch.equal(
                function.forward(None, *args, (8,), 1e-3), actual
            )
            dy = torch.randn_like(actual)
            for mine, theirs in zip(
                *(torch.autograd.grad(y, args, dy) for y in (actual, expected)), strict=True
            ):
                assert torch.equal(mine, theirs), function
        mixed = getattr(module, f"mixed_dtype_fused_{name}_affine")
        assert mixed(x.half(), *parameters, (8,)).dtype == torch.float32
        assert torch.equal(getattr(module, f"fused_{name}")(x, 8), torchs(x, (8,), eps=1e-6))


@pytest.mark.parametrize("norm", [normalization.FusedLayerNorm, normalization.MixedFusedRMSNorm])
def test_norms_compute_in_the_dtype_of_autocast(norm, amp_off):
    """Under O1, which is not autocast in apex, they compute in the input's dtype."""
    layer, x = norm(8), torch.randn(3, 8)
    expected = layer.bfloat16()(x.bfloat16())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected) and expected.dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64
    layer.float()
    actual = call_under_o1(layer, x)
    assert torch.equal(actual, layer(x)) and actual.dtype == torch.float32
    assert layer.to("meta")(x.to("meta")).is_meta


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_fast_layer_norm_rounds_to_the_dtype_of_its_weight(dtype):
    x = torch.randn(3, 5, 48, dtype=torch.float32)
    layer = contrib.layer_norm.FastLayerNorm(48, eps=1e-3).to(dtype)
    nn.init.uniform_(layer.weight), nn.init.uniform_(layer.bias)
    y = contrib.layer_norm.layer_norm.FastLayerNormFN.apply(x, layer.weight, layer.bias, layer.epsilon)
    assert y.dtype == dtype and torch.equal(layer(x), y)
    torch.testing.assert_close(
        y, F.layer_norm(x, (48,), layer.weight.float(), layer.bias.float(), 1e-3).to(dtype)
    )


ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "sigmoid": F.sigmoid}


def assert_same_with_gradients(actual, expected, inputs):
    near = {"rtol": 3e-2, "atol": 3e-2} if actual.dtype in HALF else {}
    torch.testing.assert_close(actual, expected, **near)
    dy = torch.ones_like(expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(y, inputs, dy, retain_graph=True) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **near)


@pytest.mark.parametrize(
    ("bias", "activation", "dtype"),
    [
        (True, "none", torch.float64),
        (False, "relu", torch.float32),
        (True, "relu", torch.bfloat16),
        (False, "sigmoid", torch.float16),
    ],
    ids=str,
)
def test_mlp_gives_the_results_of_torchs_products(bias, activation, dtype):
    """The function takes apex's list of arguments."""
    torch.manual_seed(0)
    model = mlp.MLP([6, 5, 3], bias, activation).to(dtype)
    names = ["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]
    assert list(model.state_dict()) == names
    expected = x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    for layer in range(model.num_layers):
        expected = expected @ model.weights[layer].T + (model.biases[layer] if bias else 0)
        expected = ACTIVATIONS[activation](expected)
    parameters = *model.weights, *model.biases
    for actual in (model(x), mlp.MlpFunction.apply(model.bias, model.activation, x, *parameters)):
        assert actual.dtype == dtype and actual.shape == (4, 3)
        assert_same_with_gradients(actual, expected, [x, *model.parameters()])
    assert (model.bias, list(ACTIVATIONS)[model.activation]) == (int(bias), activation)


def test_mlp_draws_weights_as_apex_does():
    model = mlp.MLP(sizes := [3000, 2000, 1000])
    for layer, (width, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        weight, bias = model.weights[layer], model.biases[layer]
        assert weight.std().item() == pytest.approx((2 / (width + out)) ** 0.5, rel=0.01)
        assert bias.std().item() == pytest.approx(out**-0.5, rel=0.1)
    with pytest.raises(TypeError, match="activation takes none, relu, sigmoid, got 'gelu'"):
        mlp.MLP(sizes, activation="gelu")
    copied = copy.deepcopy(model)
    copied.weight_0.data.zero_()
    assert copied.weights[0] is copied.weight_0 and model.weights[0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dense_layers_give_the_results_of_torchs_products(dtype):
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    for layer in (fused_dense.FusedDense(6, 5).to(dtype), fused_dense.FusedDense(6, 5, bias=False).to(dtype)):
        expected = x @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        assert_same_with_gradients(layer(x), expected, [x, *layer.parameters()])
        function = fused_dense.DenseNoBiasFunc if layer.bias is None else fused_dense.FusedDenseFunc
        assert torch.equal(function.apply(x, *layer.parameters()), layer(x))
    layer = fused_dense.FusedDenseGeluDense(6, 5, 4).to(dtype)
    shapes = {"weight1": (5, 6), "bias1": (5,), "weight2": (4, 5), "bias2": (4,)}
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == shapes
    y = x @ layer.weight1.T + layer.bias1
    y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    expected, actual = y @ layer.weight2.T + layer.bias2, layer(x)
    assert_same_with_gradients(actual, expected, [x, *layer.parameters()])
    assert torch.equal(fused_dense.FusedDenseGeluDenseFunc.apply(x, *layer.parameters()), actual)
    with pytest.raises(ValueError, match="bias takes True, got False"):
        fused_dense.FusedDenseGeluDense(6, 5, 4, bias=False)


@pytest.mark.parametrize(
    "model",
    [
        mlp.MLP([6, 5, 3], activation="sigmoid"),
        fused_dense.FusedDense(6, 3),
        fused_dense.FusedDenseGeluDense(6, 5, 3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_dense_layers_compute_in_half_under_casts(model, amp_off):
    """Autocast, O1 and O2 cast. The output is that of the half layer. Autocast leaves float64."""
    x = torch.randn(4, 6)
    expected = copy.deepcopy(model).bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)
        assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    assert torch.equal(call_under_o1(copy.deepcopy(model), x), expected.float())
    halved = amp.initialize(copy.deepcopy(model), opt_level="O2", verbosity=0)
    assert torch.equal(halved(x), expected.float())


def test_functions_refuse_a_backward_that_a_script_calls():
    for function in (
        mlp.MlpFunction,
        fused_dense.FusedDenseFunc,
        contrib.layer_norm.FastLayerNormFN,
        contrib.xentropy.SoftmaxCrossEntropyLoss,
        normalization.fused_layer_norm.FusedRMSNormAffineFunction,
    ):
        assert inspect.getfullargspec(function.forward).args[0] == "ctx"
        with pytest.raises(NotImplementedError, match="backward of the output"):
            function.backward(None, torch.ones(1))


@pytest.mark.parametrize(
    ("dtype", "smoothing"), [(torch.float32, 0.0), (torch.float16, 0.1), (torch.bfloat16, 0.1)], ids=str
)
def test_cross_entropy_smooths_labels_and_skips_padding(dtype, smoothing):
    logits = torch.randn(12, 9).to(dtype).requires_grad_()
    labels = torch.arange(12) % 9
    losses = contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3, True)
    logs = F.log_softmax(logits, -1, dtype=torch.float32)
    expected = (smoothing - 1.0) * logs[torch.arange(12), labels] - smoothing * logs.mean(-1)
    expected = expected.masked_fill(labels == 3, 0.0)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        torch.autograd.grad(losses.sum(), logits), torch.autograd.grad(expected.sum(), logits)
    )
    short = contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3)
    assert short.dtype == dtype and torch.equal(short, losses.to(dtype))
