"""fastvit.compat.apex.fp16_utils and normalization, fastvit.compat.inplace_abn."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit.compat import inplace_abn
from fastvit.compat.apex import amp, fp16_utils, normalization
from fastvit.compat.apex._notices import warn_once

# fp16_utils


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), fastvit.InPlaceABN(4), nn.Flatten(), nn.Linear(144, 2)
    )


IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_network_to_half():
    model = fp16_utils.network_to_half(network())
    assert model(IMAGES).dtype == torch.bfloat16
    assert [p.dtype == torch.float32 for p in model.parameters()] == [False] * 2 + [True] * 4 + [False] * 2
    model(IMAGES).float().sum().backward()
    assert fp16_utils.clip_grad_norm(model.parameters(), 0.5) > 0.5
    assert fp16_utils.BN_convert_float(network().half())[2].weight.dtype == torch.float32
    with pytest.raises(AttributeError, match="use fp16_utils.network_to_half, see docs"):
        _ = fp16_utils.FP16Model


def fp16_step(model, optimizer, infinite=False):
    loss = F.cross_entropy(model(IMAGES).float(), torch.tensor([0, 1, 1, 0]))
    optimizer.zero_grad()
    optimizer.backward(loss, update_master_grads=False)
    if infinite:
        model[1][0].weight.grad[0] = float("inf")
    optimizer.update_master_grads()
    norm = optimizer.clip_master_grads(10.0)
    optimizer.step()
    return norm


def fp16_start(seed=0, **options):
    model = fp16_utils.network_to_half(network())
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, fp16_utils.FP16_Optimizer(sgd, **options)


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_fp16_optimizer_follows_float32(options):
    model, optimizer = fp16_start(**options)
    plain = network()
    reference = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
    for _ in range(5):
        fp16_step(model, optimizer)
        reference.zero_grad()
        F.cross_entropy(plain(IMAGES), torch.tensor([0, 1, 1, 0])).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 10.0)
        reference.step()
    masters = iter(optimizer.state_dict()["fp32_from_fp16"][0])
    for parameter, want in zip(model.parameters(), plain.parameters(), strict=True):
        master = parameter if parameter.dtype == torch.float32 else next(masters)
        assert master.dtype == torch.float32 and torch.equal(master.to(parameter.dtype), parameter)
        torch.testing.assert_close(master, want, rtol=0.05, atol=0.02)
    assert next(masters, None) is None


def test_fp16_optimizer_overflow(capsys):
    model, optimizer = fp16_start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    fp16_step(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    assert fp16_step(model, optimizer, infinite=True) == -1
    assert torch.equal(model.state_dict()["1.0.weight"], before["1.0.weight"])
    assert (
        "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0" in capsys.readouterr().out
    )
    fp16_step(model, optimizer)
    assert not torch.equal(model.state_dict()["1.0.weight"], before["1.0.weight"])
    assert optimizer.loss_scale == 512.0
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: 0)


def test_two_losses_add_up():
    grads = []
    for split in (False, True):
        model, optimizer = fp16_start(static_loss_scale=64.0)
        optimizer.zero_grad()
        loss = model(IMAGES).float()
        if split:
            optimizer.backward(loss[0].sum(), retain_graph=True)
            optimizer.backward(loss[1:].sum())
        else:
            optimizer.backward(loss.sum())
        grads.append([p.grad for group in optimizer.param_groups for p in group["params"]])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.1)


def test_dynamic_loss_scaler():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=3)
    for _ in range(4):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    for _ in range(3):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5


# normalization


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_norms(weight, given):
    x = torch.randn(3, 5, 8, dtype=given)
    for ours, theirs, result in (
        (normalization.FusedLayerNorm, nn.LayerNorm, given),
        (normalization.MixedFusedLayerNorm, nn.LayerNorm, weight),
        (normalization.FusedRMSNorm, nn.RMSNorm, given),
        (normalization.MixedFusedRMSNorm, nn.RMSNorm, weight),
    ):
        layer, want = ours((5, 8)), theirs((5, 8), eps=1e-5)
        nn.init.normal_(layer.weight)
        want.load_state_dict(layer.state_dict())
        got = layer.to(weight)(x)
        assert got.dtype == result
        rounded = copy.deepcopy(want).to(weight).double()(x.double())
        torch.testing.assert_close(
            got.double(), rounded, rtol=2e-2, atol=2e-2 if torch.bfloat16 in (weight, given) else 1e-5
        )


def test_memory_efficient_says_that_it_has_no_effect():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="memory_efficient has no effect"):
        normalization.FusedLayerNorm(4, memory_efficient=True)


def test_norm_functions():
    x, w, b = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    n = normalization.fused_layer_norm  # the module, as with apex
    assert torch.equal(n.fused_layer_norm(x, 8), F.layer_norm(x, (8,), eps=1e-6))
    assert torch.equal(n.fused_layer_norm_affine(x, w, b, (8,)), F.layer_norm(x, (8,), w, b, 1e-6))
    assert torch.equal(n.fused_rms_norm(x, 8), F.rms_norm(x, (8,), eps=1e-6))
    assert torch.equal(n.fused_rms_norm_affine(x, w, (8,)), F.rms_norm(x, (8,), w, 1e-6))
    assert n.mixed_dtype_fused_layer_norm_affine(x.half(), w, b, (8,)).dtype == torch.float32
    assert n.mixed_dtype_fused_rms_norm_affine(x.half(), w, (8,)).dtype == torch.float32


def test_norms_as_autograd_functions():
    """`apply`, which extensions of apex call, and `forward`, whose arguments Megatron-LM looks at."""
    module = normalization.fused_layer_norm
    x, w, b = (torch.randn(size, requires_grad=True) for size in ((3, 8), (8,), (8,)))
    for name, args, want in (
        ("FusedLayerNormAffineFunction", (x, w, b), F.layer_norm(x, (8,), w, b, 1e-3)),
        ("FusedLayerNormAffineMixedDtypesFunction", (x, w, b), F.layer_norm(x, (8,), w, b, 1e-3)),
        ("FusedLayerNormFunction", (x,), F.layer_norm(x, (8,), eps=1e-3)),
        ("FusedRMSNormAffineFunction", (x, w), F.rms_norm(x, (8,), w, 1e-3)),
        ("FusedRMSNormAffineMixedDtypesFunction", (x, w), F.rms_norm(x, (8,), w, 1e-3)),
        ("FusedRMSNormFunction", (x,), F.rms_norm(x, (8,), eps=1e-3)),
    ):
        function = getattr(module, name)
        arguments = inspect.getfullargspec(function.forward).args
        assert arguments[:2] == ["ctx", "input"] and arguments[-1] == "memory_efficient"
        got = function.apply(*args, (8,), 1e-3, False)
        assert torch.equal(function.forward(None, *args, (8,), 1e-3), got)
        dy = torch.randn_like(got)
        assert torch.equal(got, want), name
        for mine, theirs in zip(
            torch.autograd.grad(got, args, dy), torch.autograd.grad(want, args, dy), strict=True
        ):
            assert torch.equal(mine, theirs), name
    mixed = module.FusedLayerNormAffineMixedDtypesFunction.apply(x.half(), w, b, (8,), 1e-3)
    assert mixed.dtype == torch.float32
    assert normalization.FusedLayerNormAffineFunction is module.FusedLayerNormAffineFunction


@pytest.mark.parametrize("norm", [normalization.FusedLayerNorm, normalization.MixedFusedRMSNorm])
def test_norms_under_autocast(norm):
    """They compute in autocast's dtype; under O1, which is not autocast in apex, in the input's dtype."""
    layer, x = norm(8), torch.randn(3, 8)
    want = layer.bfloat16()(x.bfloat16())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), want) and want.dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64
    layer.float()
    model = nn.Sequential(layer)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(x)
    amp.initialize(model, enabled=False)
    assert torch.equal(seen[0], layer(x)) and seen[0].dtype == torch.float32
    assert layer.to("meta")(x.to("meta")).is_meta


# inplace_abn


def test_mapillary_layers():
    x = torch.randn(4, 3, 5)
    for layer in (inplace_abn.InPlaceABN(3), inplace_abn.InPlaceABNSync(3)):
        nn.init.constant_(layer.weight, -1.5)
        want = F.leaky_relu(F.batch_norm(x, None, None, layer.weight.abs() + 1e-5, layer.bias, True), 0.01)
        torch.testing.assert_close(layer(x.clone()), want)
        assert layer.state_dict().keys() == nn.BatchNorm1d(3).state_dict().keys()
        with pytest.raises(ValueError, match="activation_param"):
            type(layer)(3, activation_param=-0.1)
    for name, activation in {
        "relu": F.relu,
        "elu": lambda t: F.elu(t, 0.01),
        "identity": lambda t: t,
    }.items():
        abn = inplace_abn.ABN(3, activation=name)
        nn.init.constant_(abn.weight, -1.5)
        want = activation(F.batch_norm(x, None, None, abn.weight, abn.bias, True))
        torch.testing.assert_close(abn(x.clone()), want)  # the signed weight, as mapillary's
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        inplace_abn.ABN(3, activation="tanh")


def test_set_active_group_reaches_every_layer():
    model = nn.Sequential(inplace_abn.InPlaceABN(3), nn.Sequential(inplace_abn.InPlaceABNSync(3)))
    marker = object()
    inplace_abn.set_active_group(model, marker)
    assert model[1][0].group is marker and not hasattr(model[0], "group")


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
