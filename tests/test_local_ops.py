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
    d, z = case.channel_dim, case.z if residual else None
    ours, theirs = case.buffers(), case.buffers()
    shared = {"weight": case.weight, "bias": case.bias, "activation": "relu", "channel_dim": d}
    y, saved = ops.bn_forward(case.x, z=z, **shared, **ours)
    same((y, saved), ops.bn_forward(case.x, ops.bn_stats(case.x, d), z=z, **shared, **theirs))
    same(ours.values(), theirs.values())

    dx, dz, sums = ops.bn_backward(case.x, case.dy, z, saved, **shared)
    (want,) = ops.bn_reduce(case.x, case.dy, z, saved, **shared)
    same((dx, dz), ops.bn_backward(case.x, case.dy, z, saved, want, **shared)[:2])
    same((sums,), (want,))


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_abn_local_ops(layout, dtype, activation, device):
    case = Case(layout, dtype, device)
    d = case.channel_dim
    ours, theirs = case.buffers(), case.buffers()
    shared = {"weight": case.weight, "bias": case.bias, "channel_dim": d}
    shared |= {"activation": activation, "activation_param": PARAM}
    y, want_y = fresh(case.x), fresh(case.x)
    saved = ops.abn_forward_(y, **shared, **ours)
    want_saved = ops.abn_forward_(want_y, ops.bn_stats(case.x, d), **shared, **theirs)
    same((y, saved, *ours.values()), (want_y, want_saved, *theirs.values()))
    new = ops.abn_forward(case.x, **shared, **case.buffers())
    assert torch.equal(new[0], y) and torch.equal(new[1], saved)

    dx, sums = ops.abn_backward(y, case.dy, saved, **shared)
    (want,) = ops.abn_reduce(y, case.dy, saved, **shared)
    same((dx, sums), (ops.abn_backward(y, case.dy, saved, want, **shared)[0], want))


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
