"""fastvit.compat.amp_C, apex_C and apex.contrib, called as scripts for apex call them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastvit.compat import amp_C, apex_C
from fastvit.compat.apex import contrib
from fastvit.compat.apex.multi_tensor_apply import multi_tensor_applier
from fastvit.compat.apex.optimizers import FusedLAMB

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int)


def tensors(*dtypes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 7, generator=draw).to(d) for n, d in zip((3, 1, 40_000), dtypes, strict=False)]


def test_scale(flag):
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
def test_axpby(flag, check, bad, flagged):
    x, y = tensors(*HALF), tensors(torch.float32, torch.float32, seed=1)
    outputs = [torch.empty_like(t) for t in y]
    amp_C.multi_tensor_axpby(65536, flag, [x, y, outputs], 2.0, -0.5, check)
    for one, other, output in zip(x, y, outputs, strict=True):
        torch.testing.assert_close(output, 2.0 * one.float() - 0.5 * other)
    assert flag.item() == 0
    (x, y)[bad][0][2, 1] = float("nan")
    amp_C.multi_tensor_axpby(65536, flag, [x, y, outputs], 2.0, -0.5, check)
    assert flag.item() == flagged


def test_l2norm(flag):
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
def test_lamb(flag, nvlamb, most):
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


def test_names_that_are_not_there():
    assert not hasattr(amp_C, "multi_tensor_adam")
    with pytest.raises(AttributeError, match="multi_tensor_adam; see docs/migrating-from-apex.md"):
        _ = amp_C.multi_tensor_adam
    with pytest.raises(AttributeError, match="unscale_l2norm; use amp_C.multi_tensor_l2norm"):
        _ = amp_C.multi_tensor_unscale_l2norm


def test_flat_tensors():
    values = tensors(torch.float32, torch.float32)
    flat = apex_C.flatten(values)
    assert flat.shape == (28,) and all(map(torch.equal, apex_C.unflatten(flat, values), values))


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
