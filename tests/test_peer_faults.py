"""Faults of apex SyncBatchNorm and of inplace_abn that a successor must not have, one test each."""

import copy
import math

import pytest
import torch
from tolerances import check
from torch import nn
from torch.nn import functional as F

from fastvit import InPlaceABN, SyncBatchNorm, convert_syncbn_model, functional, ops


@pytest.mark.parametrize("channels", [96, 192, 384, 768, 3, 5, 1000])
def test_channel_last_skips_no_channel(channels, device):
    """apex #1768: its NHWC kernels skip channels when ceil(C / block) is no power of two."""
    x = torch.randn(4, 3, 5, channels, device=device)
    layer = SyncBatchNorm(channels, channel_last=True).to(device)
    check("layer", layer(x), F.batch_norm(x.movedim(3, 1).double(), None, None, training=True).movedim(1, 3))


@pytest.mark.parametrize("shape,channel_last", [((4, 6, 5, 5), False), ((4, 5, 5, 6), True), ((4, 6), False)])
def test_eval_with_every_option(shape, channel_last, device):
    """apex #913, #1206: UnboundLocalError in evaluation with channel_last, fuse_relu, z or 2-D input."""
    layer = SyncBatchNorm(6, channel_last=channel_last, fuse_relu=True).to(device).eval()
    layer.running_mean.uniform_(), layer.running_var.uniform_(0.5, 1)
    x, z = torch.randn(2, *shape, device=device)
    dim = len(shape) - 1 if channel_last else 1
    plain = F.batch_norm(x.movedim(dim, 1), layer.running_mean, layer.running_var).movedim(1, dim)
    check("layer", layer(x), plain.relu())
    check("layer", layer(x, z), (plain + z).relu())


def test_relu_and_residual_act_in_forward_and_backward(device):
    """apex, NCHW: fuse_relu masks only the backward, and z is ignored in the forward."""
    x, z, dy = torch.randn(3, 4, 6, 5, 5, device=device).double()
    layer = SyncBatchNorm(6, fuse_relu=True).to(device).double()
    leaves = [t.clone().requires_grad_() for t in (x, z)]
    y = layer(*leaves)
    y.backward(dy)
    wanted = [t.clone().requires_grad_() for t in (x, z)]
    want = (F.batch_norm(wanted[0], None, None, training=True) + wanted[1]).relu()
    want.backward(dy)
    check("layer", y, want)
    for got, expected in zip(leaves, wanted, strict=True):
        check("layer", got.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_dtypes_and_no_running_statistics(dtype, device):
    """apex: track_running_stats=False, bf16 and fp64 raise in training; half input comes back as fp32."""
    layer = SyncBatchNorm(6, track_running_stats=False, device=device)
    y = layer(torch.randn(4, 6, 5, device=device, dtype=dtype))
    assert y.dtype == dtype and y.isfinite().all()


def test_mean_1e3_deviation_1e_2(device):
    """apex's Python fallback: E[x^2] - E[x]^2 gives NaN."""
    x = torch.randn(64, 6, 16, device=device, dtype=torch.float64) * 1e-2 + 1e3
    layer = SyncBatchNorm(6, momentum=1.0, eps=0.0, device=device)
    y = layer(x.float())
    assert y.isfinite().all() and abs(y.std().item() - 1) < 0.01
    torch.testing.assert_close(layer.running_var.double(), x.float().double().var((0, 2)), rtol=1e-5, atol=0)


def test_running_statistics_stay_the_same_tensors(device):
    """apex rebinds running_*.data every step: aliases go stale."""
    for layer in (SyncBatchNorm(6, device=device), InPlaceABN(6, device=device)):
        aliases = layer.running_mean, layer.running_var.view(2, 3)
        pointers = [t.data_ptr() for t in layer.buffers()]
        layer(torch.randn(4, 6, device=device) + 5)
        assert [t.data_ptr() for t in layer.buffers()] == pointers
        assert aliases[0].abs().sum() > 0 and torch.equal(aliases[1].flatten(), layer.running_var)
        assert aliases[0]._version > 0


def test_conversion_keeps_parameters_frozen_flags_and_sharing():
    """apex clones parameters, thaws frozen ones, loses eval and converts a shared layer once."""
    shared = nn.BatchNorm1d(3).eval()
    shared.weight.requires_grad_(False)
    model = nn.ModuleList([shared, shared])
    weight = shared.weight
    convert_syncbn_model(model)
    assert model[0] is model[1] and model[1].weight is weight and not weight.requires_grad
    assert not model[0].training


def in_place_gradients(device, activation, param, dtype, scale=1.0, shift=0.0):
    """dx of InPlaceABN and, from torch in float64 on the stored pre-activation's sign, what it should be."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, 8, generator=g, dtype=torch.float64).to(dtype).to(device)
    dy = torch.randn(16, 4, 8, generator=g, dtype=torch.float64).to(dtype).to(device)
    weight = torch.full((4,), scale, device=device, dtype=torch.float32 if dtype != torch.float64 else dtype)
    bias = torch.full_like(weight, shift)
    leaf = x.clone().requires_grad_()
    y = functional.inplace_abn(
        leaf.clone(), weight, bias, None, None, activation=activation, activation_param=param
    )
    y.backward(dy)
    double = x.double().requires_grad_()
    v = F.batch_norm(double, None, None, weight.double(), bias.double(), True)
    (F.leaky_relu(v, param) if activation == "leaky_relu" else F.elu(v, param)).backward(dy.double())
    return leaf.grad, double.grad


def test_slopes_that_cannot_be_inverted_are_refused():
    """inplace_abn: slope 0 (dx wrong by 97%) and negative slopes (107%) are accepted in silence."""
    x = torch.randn(4, 3)
    for slope in (0.0, -0.0, -0.2):
        with pytest.raises(ValueError, match="activation_param"):
            functional.inplace_abn(x.clone(), None, None, None, None, activation_param=slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_elu_saturation_gives_no_nan(dtype, device):
    """inplace_abn #70: y rounds to -1, and log1p(-1) turns the channel's gradients into NaN."""
    got, want = in_place_gradients(device, "elu", 1.0, dtype, scale=12.0, shift=-6.0)
    assert got.isfinite().all()
    # What saturates has no gradient of its own; the rest loses digits that the storage does not hold.
    assert (got.double() - want).norm() / want.norm() < {torch.float32: 0.06}.get(dtype, 0.25)
    frozen = InPlaceABN(4, activation="elu", activation_param=1.0).to(device).eval()
    x = (torch.randn(16, 4, device=device) * 30).to(dtype).requires_grad_()
    frozen(x.clone()).sum().backward()
    assert x.grad.isfinite().all() and frozen.weight.grad.isfinite().all()


def test_underflow_keeps_the_negative_side(device):
    """inplace_abn, fp16: slope * y underflows to -0, and -0 >= 0 takes the positive branch."""
    x = torch.tensor([[-1e-3], [1e-3], [-1e-3], [1e-3]], dtype=torch.float16, device=device)
    saved = torch.tensor([0.0, 1.0, 0.0, 4.0], device=device)
    y = x.clone()
    running = torch.zeros(1, device=device), torch.ones(1, device=device)
    ops.abn_forward_(y, None, None, None, *running, eps=0.0, activation_param=1e-5, training=False)
    assert y[0].item() == 0 and math.copysign(1, y[0].item()) == -1
    dx, _ = ops.abn_backward(y, torch.ones_like(y), saved, activation_param=0.25, training=False)
    assert dx.flatten().tolist() == [0.25, 1.0, 0.25, 1.0]


def test_bfloat16_and_autocast(device):
    """inplace_abn: no bf16 path, and CPU bf16 autocast fails."""
    got, want = in_place_gradients(device, "leaky_relu", 0.2, torch.bfloat16)
    check("in_place_layer", got, want)


def test_transposed_and_cropped_inputs(device):
    """inplace_abn raises for them."""
    base = torch.randn(6, 9, 7, 8, device=device)
    for view in (lambda t: t.transpose(0, 1), lambda t: t[:, 1:7, 1:-1, 2:], lambda t: t.permute(3, 2, 0, 1)):
        x = view(base.clone())
        want = F.leaky_relu(F.batch_norm(x.double(), None, None, training=True))
        untouched = base.clone()
        inside = torch.zeros_like(base)
        view(inside).fill_(1)
        storage = base.clone()
        y = functional.inplace_abn(view(storage), None, None, None, None)
        check("layer", y, want)
        assert torch.equal(storage[inside == 0], untouched[inside == 0])


def test_double_backward_says_no(device):
    """inplace_abn: silently absent."""
    x = torch.randn(4, 3, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(InPlaceABN(3).to(device)(x.clone()).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice|once_differentiable"):
        dx.sum().backward()


def test_state_dict_version_and_deepcopy_of_a_used_layer(device):
    layer = InPlaceABN(3).to(device)
    layer(torch.randn(4, 3, device=device))
    assert copy.deepcopy(layer).state_dict()._metadata[""]["version"] == 2
