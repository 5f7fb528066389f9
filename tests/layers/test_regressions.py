"""Faults of apex's SyncBatchNorm and of inplace_abn that fastvit must not have, and no other test finds."""

import math

import pytest
import torch
from torch.nn import functional as F

from fastvit import InPlaceABN, SyncBatchNorm, functional, ops
from layers.pairs import name_dtype

pytestmark = pytest.mark.cuda_model


def test_running_statistics_stay_the_same_tensors(device):
    """Aliases go stale in apex, which rebinds running_*.data every step."""
    for layer in (SyncBatchNorm(6, device=device), InPlaceABN(6, device=device)):
        aliases = layer.running_mean, layer.running_var.view(2, 3)
        pointers = [t.data_ptr() for t in layer.buffers()]
        layer(torch.randn(4, 6, device=device) + 5)
        assert [t.data_ptr() for t in layer.buffers()] == pointers
        assert aliases[0].abs().sum() > 0 and torch.equal(aliases[1].flatten(), layer.running_var)
        assert aliases[0]._version > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=name_dtype)
def test_elu_saturation_gives_no_nan(dtype, device):
    """inplace_abn #70: y rounds to -1, and log1p(-1) turns the channel's gradients into NaN."""
    x, dy = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    weight, bias = (torch.full((4,), value, device=device) for value in (12.0, -6.0))
    leaf, torch_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
    y = functional.inplace_abn(leaf.clone(), weight, bias, None, None, activation="elu", activation_param=1.0)
    y.backward(dy)
    F.elu(F.batch_norm(torch_leaf, None, None, weight.double(), bias.double(), True)).backward(dy.double())
    assert leaf.grad.isfinite().all()
    # Saturated elements have no gradient; the others lose digits that the storage does not hold.
    difference = (leaf.grad.double() - torch_leaf.grad).norm() / torch_leaf.grad.norm()
    assert difference < {torch.float32: 0.06}.get(dtype, 0.25)
    frozen = InPlaceABN(4, activation="elu", activation_param=1.0).to(device).eval()
    x = (torch.randn(16, 4, device=device) * 30).to(dtype).requires_grad_()
    frozen(x.clone()).sum().backward()
    assert x.grad.isfinite().all() and frozen.weight.grad.isfinite().all()


def test_underflow_keeps_the_negative_side(device):
    """inplace_abn, fp16: slope * y underflows to -0, and -0 >= 0 takes the positive branch."""
    x = torch.tensor([[-1e-3], [1e-3], [-1e-3], [1e-3]], dtype=torch.float16, device=device)
    saved = torch.tensor([0.0, 1.0, 0.0, 4.0], device=device)
    y = x.clone()
    running = {"running_mean": torch.zeros(1, device=device), "running_var": torch.ones(1, device=device)}
    options = {"activation": "leaky_relu", "training": False}
    ops.bn_forward_inplace(y, activation_param=1e-5, **running, eps=0.0, **options)
    assert y[0].item() == 0 and math.copysign(1, y[0].item()) == -1
    dx, *_ = ops.bn_backward(y, torch.ones_like(y), saved, activation_param=0.25, from_output=True, **options)
    assert dx.flatten().tolist() == [0.25, 1.0, 0.25, 1.0]


def test_memory_between_the_values_of_an_input_stays(device):
    """inplace_abn raises for transposed and cropped inputs."""
    base = torch.randn(6, 9, 7, 8, device=device)
    for view in (lambda t: t.transpose(0, 1), lambda t: t[:, 1:7, 1:-1, 2:], lambda t: t.permute(3, 2, 0, 1)):
        written, inside = base.clone(), torch.zeros_like(base)
        view(inside).fill_(1)
        functional.inplace_abn(view(written), None, None, None, None)
        assert torch.equal(written != base, inside == 1)
