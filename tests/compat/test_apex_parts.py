"""fastvit.compat: fp16_utils, normalization, contrib, amp_C and apex_C, inplace_abn."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import call_under_o1, data, network
from fastvit.compat import amp_C, inplace_abn
from fastvit.compat.apex import amp, contrib, fp16_utils, fused_dense, mlp, normalization
from fastvit.compat.apex._warn_once import warn_once
from fastvit.compat.apex.multi_tensor_apply import multi_tensor_applier
from fastvit.compat.apex.optimizers import FusedLAMB


def test_network_to_half():
    model = fp16_utils.network_to_half(network())
    images, _ = data()
    assert model(images).dtype == torch.bfloat16
    layers = {name: p.dtype for name, p in model[1].named_parameters() if p.dtype == torch.float32}
    assert layers.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    model(images).float().sum().backward()
    assert fp16_utils.clip_grad_norm(model.parameters(), 0.5) > 0.5
    norms = nn.ModuleList([nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True)]).half()
    fp16_utils.BN_convert_float(norms)
    assert [norm.weight.dtype for norm in norms] == [torch.float32, torch.float16]
    with pytest.raises(AttributeError, match="use fp16_utils.network_to_half, see docs"):
        _ = fp16_utils.FP16Model


def test_dynamic_loss_scaler():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=3)
    for _ in range(4):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    for _ in range(3):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5


def test_scalers_look_at_gradients_and_scale_them():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    parameters = [parameter, nn.Parameter(torch.ones(1))]
    assert fp16_utils.DynamicLossScaler().has_overflow(parameters)
    assert not fp16_utils.LossScaler(8.0).has_overflow(parameters)
    parameter.grad = torch.ones(2)
    assert not fp16_utils.DynamicLossScaler().has_overflow(parameters)
    (scaled,) = fp16_utils.LossScaler(8.0).scale_gradient(None, (torch.ones(2),), None)
    assert torch.equal(scaled, torch.full((2,), 8.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat, dtype):
    """A loop without any optimizer wrapper: scaled loss, masters' gradients, step, and back to the model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype), torch.randn(3, 4)
    model[0].bias.requires_grad_(False)
    plain = copy.deepcopy(model).float()
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(parameters) == 3 and len(masters) == (1 if flat else 3)
    assert all(m.dtype == torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    optimizer, reference = torch.optim.SGD(masters, 1e-4), torch.optim.SGD(plain.parameters(), 1e-4)
    for unused in (False, True):
        model.zero_grad(), plain.zero_grad()
        for net in (model, plain):
            y = net[0](x.to(net[0].weight.dtype))
            (128.0 * (y if unused else net[1](y)).float().sum()).backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
        if not flat:
            assert [m.grad is None for m in masters] == [False, unused, unused]
        for gradient in (*(m.grad for m in masters), *(p.grad for p in plain.parameters())):
            if gradient is not None:
                gradient.div_(128.0)
        optimizer.step(), reference.step()
        fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
    want = torch.cat([p.detach().flatten() for p in plain.parameters() if p.requires_grad])
    got = torch.cat([m.detach().flatten() for m in masters])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)  # steps that half would round away
    assert torch.equal(torch.cat([p.detach().flatten() for p in parameters]), got.to(dtype))


def test_a_flat_master_has_one_dtype():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(
        ValueError, match=r"flat_master takes one dtype of parameters, got \['torch.float16', "
    ):
        fp16_utils.prep_param_lists(model, flat_master=True)
    assert len(fp16_utils.prep_param_lists(model)[1]) == 4
    with pytest.raises(ValueError, match=r"one dtype of parameters, got \[\]"):
        fp16_utils.prep_param_lists(nn.ReLU(), flat_master=True)


def test_fp16_optimizer_names_what_it_has_instead_of_lists():
    optimizer = fp16_utils.FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], 0.1))
    assert optimizer.param_groups and not hasattr(optimizer, "fp32_from_fp16_groups")
    with pytest.raises(
        AttributeError, match="no fp32_from_fp16_groups; use param_groups, loss_scaler, and the"
    ):
        _ = optimizer.fp32_from_fp16_groups


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
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
            layer, want = ours((5, 8), memory_efficient=True), theirs((5, 8), eps=1e-5)
        nn.init.normal_(layer.weight)
        want.load_state_dict(layer.state_dict())
        got = layer.to(weight)(x)
        assert got.dtype == result
        rounded = copy.deepcopy(want).to(weight).double()(x.double())
        torch.testing.assert_close(
            got.double(), rounded, rtol=2e-2, atol=2e-2 if torch.bfloat16 in (weight, given) else 1e-5
        )


def test_norms_as_autograd_functions():
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
            want, got = torchs(x, (8,), *args[1:], eps=1e-3), function.apply(*args, (8,), 1e-3, False)
            assert torch.equal(got, want) and torch.equal(function.forward(None, *args, (8,), 1e-3), got)
            dy = torch.randn_like(got)
            for mine, theirs in zip(*(torch.autograd.grad(y, args, dy) for y in (got, want)), strict=True):
                assert torch.equal(mine, theirs), function
        mixed = getattr(module, f"mixed_dtype_fused_{name}_affine")
        assert mixed(x.half(), *parameters, (8,)).dtype == torch.float32
        assert torch.equal(getattr(module, f"fused_{name}")(x, 8), torchs(x, (8,), eps=1e-6))


@pytest.mark.parametrize("norm", [normalization.FusedLayerNorm, normalization.MixedFusedRMSNorm])
def test_norms_under_autocast(norm, amp_off):
    """They compute in autocast's dtype; under O1, which is not autocast in apex, in the input's dtype."""
    layer, x = norm(8), torch.randn(3, 8)
    want = layer.bfloat16()(x.bfloat16())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), want) and want.dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64
    layer.float()
    got = call_under_o1(layer, x)
    assert torch.equal(got, layer(x)) and got.dtype == torch.float32
    assert layer.to("meta")(x.to("meta")).is_meta


def test_mapillary_layers():
    x = torch.randn(4, 3, 5)
    for layer in (inplace_abn.InPlaceABN(3), inplace_abn.InPlaceABNSync(3)):
        nn.init.constant_(layer.weight, -1.5)
        want = F.leaky_relu(F.batch_norm(x, None, None, layer.weight.abs() + 1e-5, layer.bias, True), 0.01)
        torch.testing.assert_close(layer(x.clone()), want)
        torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2)))
        assert layer.state_dict().keys() == nn.BatchNorm1d(3).state_dict().keys()
        with pytest.raises(ValueError, match="activation_param"):
            type(layer)(3, activation_param=-0.1)
    y = F.batch_norm(x, None, None, torch.full((3,), -1.5), None, True)  # the signed weight, as mapillary's
    for name, want in {"relu": F.relu(y), "elu": F.elu(y, 0.01), "identity": y}.items():
        abn = inplace_abn.ABN(3, activation=name)
        nn.init.constant_(abn.weight, -1.5)
        torch.testing.assert_close(abn(x.clone()), want)
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        inplace_abn.ABN(3, activation="tanh")


def test_mapillarys_arguments_by_position():
    x, (bias, mean, var) = torch.randn(4, 3, 2, 2), torch.ones(3, 3).unbind()
    weight, rest = torch.tensor([-2.0, 0.5, 1.0]), (True, 0.1, 1e-5, "leaky_relu", 0.01)
    y = inplace_abn.inplace_abn(x.clone(), weight, bias, mean.clone(), var.clone(), *rest)
    torch.testing.assert_close(
        y, F.leaky_relu(F.batch_norm(x, None, None, weight.abs() + 1e-5, bias, True), 0.01)
    )
    assert torch.equal(inplace_abn.inplace_abn_sync(x.clone(), weight, bias, mean, var, *rest, None), y)
    layer = inplace_abn.InPlaceABNSync(3, 1e-5, 0.1, True, True, "leaky_relu", 0.01, None)
    assert layer(x).shape == x.shape
    model, marker = nn.Sequential(inplace_abn.InPlaceABN(3), nn.Sequential(layer)), object()
    inplace_abn.set_active_group(model, marker)
    assert layer.group is marker and not hasattr(model[0], "group")


HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int)


def tensors(*dtypes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 7, generator=draw).to(d) for n, d in zip((3, 1, 40_000), dtypes, strict=False)]


def test_amp_c_scale_scales_and_flags_overflow(flag):
    values = tensors(torch.float32, torch.float16, torch.bfloat16)
    outputs = [torch.empty_like(v, dtype=torch.float16) for v in values]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [values, outputs], 0.5)
    for value, output in zip(values, outputs, strict=True):
        assert torch.equal(output, (value.float() * 0.5).half())
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [[torch.empty(0)], [torch.empty(0)]], 0.5)
    assert flag.item() == 0
    amp_C.multi_tensor_scale(65536, flag, [values, values], 3.0)  # in place
    assert torch.equal(values[1], (outputs[1].float() * 6.0).half())
    for bad in (float("inf"), float("nan")):
        values[1][0, 3] = bad
        multi_tensor_applier(amp_C.multi_tensor_scale, flag.zero_(), [values, outputs], 0.0)
        assert flag.item() == 1


@pytest.mark.parametrize(
    ("check", "bad", "flagged"), [(-1, 0, 1), (-1, 1, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
)
def test_amp_c_axpby_adds_and_flags_overflow(flag, check, bad, flagged):
    x, y = tensors(*HALF), tensors(torch.float32, torch.float32, seed=1)
    outputs = [torch.empty_like(t) for t in y]
    amp_C.multi_tensor_axpby(65536, flag, [x, y, outputs], 2.0, -0.5, check)
    for one, other, output in zip(x, y, outputs, strict=True):
        torch.testing.assert_close(output, 2.0 * one.float() - 0.5 * other)
    assert flag.item() == 0
    (x, y)[bad][0][2, 1] = float("nan")
    amp_C.multi_tensor_axpby(65536, flag, [x, y, outputs], 2.0, -0.5, check)
    assert flag.item() == flagged


def test_amp_c_l2norm_does_not_overflow_in_half(flag):
    values = tensors(torch.float32, torch.float16, torch.bfloat16)
    values[1] *= 10000  # the square is beyond half
    wanted = torch.stack([v.double().norm() for v in values])
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values], True)
    torch.testing.assert_close(each.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), wanted.norm().reshape(1), rtol=1e-5, atol=0)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values])
    assert total.shape == (1,) and each.shape == (0,) and flag.item() == 0
    values[0][0] = float("nan")
    multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values], False)
    assert flag.item() == 1


@pytest.mark.parametrize("most", [0.0, 1.0])
@pytest.mark.parametrize("nvlamb", [False, True])
def test_amp_c_lamb_follows_fused_lamb(flag, nvlamb, most):
    """As a copy of FusedLAMB in a script calls it."""
    parameters = tensors(torch.float32, torch.float32)
    wanted = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = FusedLAMB(wanted, 0.1, max_grad_norm=most, use_nvlamb=nvlamb, weight_decay=0.0)
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    for step in (1, 2):
        gradients = tensors(torch.float32, torch.float32, seed=step)
        norm = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [gradients], False)[0]
        options = 0.1, 0.9, 0.999, 1e-6, step, 1, 0.0, 1, 1, norm, most, nvlamb
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag, [gradients, parameters, *moments], *options)
        for parameter, gradient in zip(wanted, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for got, want in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(got, want.detach())


ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "sigmoid": F.sigmoid}


def assert_same_with_gradients(got, want, inputs):
    near = {"rtol": 3e-2, "atol": 3e-2} if got.dtype in HALF else {}
    torch.testing.assert_close(got, want, **near)
    dy = torch.ones_like(want)
    for mine, theirs in zip(
        *(torch.autograd.grad(y, inputs, dy, retain_graph=True) for y in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(bias, activation, dtype):
    """Compares the layer, and the function with apex's list of arguments, with torch's products."""
    torch.manual_seed(0)
    model = mlp.MLP([6, 5, 3], bias, activation).to(dtype)
    names = ["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]
    assert list(model.state_dict()) == names
    want = x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    for layer in range(model.num_layers):
        want = want @ model.weights[layer].T + (model.biases[layer] if bias else 0)
        want = ACTIVATIONS[activation](want)
    parameters = *model.weights, *model.biases
    for got in (model(x), mlp.MlpFunction.apply(model.bias, model.activation, x, *parameters)):
        assert got.dtype == dtype and got.shape == (4, 3)
        assert_same_with_gradients(got, want, [x, *model.parameters()])
    assert (model.bias, list(ACTIVATIONS)[model.activation]) == (int(bias), activation)


def test_mlp_as_it_is_made():
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_fused_dense(dtype):
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    for layer in (fused_dense.FusedDense(6, 5).to(dtype), fused_dense.FusedDense(6, 5, bias=False).to(dtype)):
        want = x @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        assert_same_with_gradients(layer(x), want, [x, *layer.parameters()])
        function = fused_dense.DenseNoBiasFunc if layer.bias is None else fused_dense.FusedDenseFunc
        assert torch.equal(function.apply(x, *layer.parameters()), layer(x))
    layer = fused_dense.FusedDenseGeluDense(6, 5, 4).to(dtype)
    shapes = {"weight1": (5, 6), "bias1": (5,), "weight2": (4, 5), "bias2": (4,)}
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == shapes
    y = x @ layer.weight1.T + layer.bias1
    y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    want, got = y @ layer.weight2.T + layer.bias2, layer(x)
    assert_same_with_gradients(got, want, [x, *layer.parameters()])
    assert torch.equal(fused_dense.FusedDenseGeluDenseFunc.apply(x, *layer.parameters()), got)
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
def test_dense_layers_in_half(model, amp_off):
    """Under autocast, O1 and O2 the output is that of the half layer; float64 stays under autocast."""
    x = torch.randn(4, 6)
    want = copy.deepcopy(model).bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), want)
        assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    assert torch.equal(call_under_o1(copy.deepcopy(model), x), want.float())
    halved = amp.initialize(copy.deepcopy(model), opt_level="O2", verbosity=0)
    assert torch.equal(halved(x), want.float())


def test_functions_that_scripts_wrap():
    """`forward` and `backward` are there, and a backward that a script calls itself is refused in words."""
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


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_fast_layer_norm(dtype):
    x = torch.randn(3, 5, 48, dtype=torch.float32)
    layer = contrib.layer_norm.FastLayerNorm(48, eps=1e-3).to(dtype)
    nn.init.uniform_(layer.weight), nn.init.uniform_(layer.bias)
    y = contrib.layer_norm.layer_norm.FastLayerNormFN.apply(x, layer.weight, layer.bias, layer.epsilon)
    assert y.dtype == dtype and torch.equal(layer(x), y)
    torch.testing.assert_close(
        y, F.layer_norm(x, (48,), layer.weight.float(), layer.bias.float(), 1e-3).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(dtype, smoothing):
    logits = torch.randn(12, 9).to(dtype).requires_grad_()
    labels = torch.arange(12) % 9
    losses = contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3, True)
    logs = F.log_softmax(logits, -1, dtype=torch.float32)
    wanted = (smoothing - 1.0) * logs[torch.arange(12), labels] - smoothing * logs.mean(-1)
    wanted = wanted.masked_fill(labels == 3, 0.0)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(losses.sum(), logits), torch.autograd.grad(wanted.sum(), logits)
    )
    short = contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3)
    assert short.dtype == dtype and torch.equal(short, losses.to(dtype))
