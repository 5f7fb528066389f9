"""Ops that make the statistics that they use: the bits of two ops, by one call."""

import pytest
import torch
from cases import DTYPES, INVERTIBLE, LAYOUTS, PARAM, Case, fresh

from fastvit import ops


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bn_local_ops(layout, dtype, residual, device):
    case = Case(layout, dtype, device)
    z, ours, theirs = case.z if residual else None, case.buffers(), case.buffers()
    given = {"weight": case.weight, "bias": case.bias, "activation": "relu", "channel_dim": case.channel_dim}
    y, saved = ops.bn_forward(case.x, z=z, **given, **ours)
    moments = ops.bn_stats(case.x, case.channel_dim)
    same((y, saved), ops.bn_forward(case.x, moments, z=z, **given, **theirs))
    same(ours.values(), theirs.values())

    (want,) = ops.bn_reduce(case.x, case.dy, z, saved, **given)
    dx, dz, _ = ops.bn_backward(case.x, case.dy, z, saved, want, **given)
    same(ops.bn_backward(case.x, case.dy, z, saved, **given), (dx, dz, want))


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_abn_local_ops(layout, dtype, activation, device):
    case = Case(layout, dtype, device)
    ours, theirs = case.buffers(), case.buffers()
    given = {"weight": case.weight, "bias": case.bias, "channel_dim": case.channel_dim}
    given |= {"activation": activation, "activation_param": PARAM}
    y, want_y = fresh(case.x), fresh(case.x)
    saved = ops.abn_forward_(y, **given, **ours)
    want_saved = ops.abn_forward_(want_y, ops.bn_stats(case.x, case.channel_dim), **given, **theirs)
    same((y, saved, *ours.values()), (want_y, want_saved, *theirs.values()))
    new = ops.abn_forward(case.x, **given, **case.buffers())
    assert torch.equal(new[0], y) and torch.equal(new[1], saved)  # y may have other strides

    (want,) = ops.abn_reduce(y, case.dy, saved, **given)
    dx, _ = ops.abn_backward(y, case.dy, saved, want, **given)
    same(ops.abn_backward(y, case.dy, saved, **given), (dx, want))


@pytest.mark.parametrize("momentum", [0.0, 1.0, None])
def test_running_statistics(momentum, device):
    case = Case("nchw", torch.float32, device)
    ours, theirs = case.buffers(), case.buffers()
    ops.bn_forward(case.x, momentum=momentum, **ours)
    ops.bn_forward(case.x, ops.bn_stats(case.x), momentum=momentum, **theirs)
    same(ours.values(), theirs.values())
    version = ours["running_mean"]._version
    ops.bn_forward(case.x, momentum=momentum, **ours)
    assert ours["running_mean"]._version > version


@pytest.mark.parametrize("shape", [(0, 5, 3, 3), (4, 5, 0)])
def test_empty(shape, device):
    x = torch.zeros(shape, device=device)
    mean, var = torch.zeros(5, device=device), torch.full((5,), 2.0, device=device)
    tracked = torch.tensor(0, device=device)
    y, saved = ops.bn_forward(x, None, None, None, None, mean, var, tracked)
    dx, dz, sums = ops.bn_backward(x, x, None, saved)
    assert y.shape == dx.shape == x.shape and dz.numel() == 0
    assert saved[10:].tolist() == [0, 0] and sums.tolist() == [0] * 10
    assert mean.tolist() == [0] * 5 and var.tolist() == [2] * 5 and tracked == 1
