"""Layers on a GPU: large inputs, mixed precision, several devices.

The tests of tests/ops and tests/layers show with `--device cuda` that ops and layers are right on a GPU.
"""

import pytest
import torch
from ops.inputs import LayerInputs
from ops.matrix import DTYPES, LAYOUTS, Layout, to_channels_last
from ops.tolerances import assert_close_enough
from torch import nn

from fastvit import InPlaceABN, SyncBatchNorm, functional
from gpu.stacks import DEVICE, make_images

pytestmark = pytest.mark.gpu

LARGE_LAYOUTS = {
    "large_planes": Layout(lambda r: r(32, 4, 56, 56), 1),
    "large_short_planes": Layout(lambda r: r(64, 64, 14, 14), 1),
    "large_rows": Layout(lambda r: to_channels_last(r(16, 64, 56, 56)), 1),
    "large_tokens": Layout(lambda r: r(32, 197, 96), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
@pytest.mark.parametrize("layer_class", [InPlaceABN, SyncBatchNorm])
def test_large_inputs_give_the_results_of_the_cpu(layer_class, layout, dtype, monkeypatch):
    monkeypatch.setitem(LAYOUTS, layout, LARGE_LAYOUTS[layout])
    is_in_place, results = layer_class is InPlaceABN, []
    options = {"activation": "elu", "activation_param": 0.5} if is_in_place else {"fuse_relu": True}
    for device in ("cpu", DEVICE):
        inputs = LayerInputs(layout, dtype, device)
        options |= {"channel_last": inputs.channel_dim != 1, "device": device, "dtype": inputs.weight.dtype}
        layer = layer_class(inputs.channels, **options)
        with torch.no_grad():
            layer.weight.copy_(inputs.weight)
            layer.bias.copy_(inputs.bias)
        leaf = inputs.x.detach().requires_grad_()
        y = layer(leaf.clone())
        gradients = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], inputs.dy)
        results.append([y, *gradients, layer.running_mean, layer.running_var])
    row = "in_place_layer" if is_in_place else "layer"
    for expected, actual in zip(*results, strict=True):
        assert actual.device.type == DEVICE and actual.dtype == expected.dtype
        assert_close_enough(actual, expected, row=row, dtype=dtype, least_scale=1.0)


@pytest.mark.parametrize("layer_class", [InPlaceABN, SyncBatchNorm])
def test_an_infinite_gradient_reaches_the_scaler(layer_class):
    layer = layer_class(8).to(DEVICE)
    conv = nn.Conv2d(8, 8, 1, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(conv.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**60)
    old_weight = conv.weight.detach().clone()
    with torch.autocast(DEVICE, torch.float16):
        loss = layer(conv(make_images("small"))).float().square().sum()
    scaler.scale(loss).backward()
    assert not layer.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**59 and torch.equal(conv.weight, old_weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one_gives_the_same_bits():
    """inplace_abn #176: without a device guard only cuda:0 works."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = LayerInputs("nchw", torch.float32, device)
        leaf = inputs.x.detach().requires_grad_()
        y = functional.inplace_abn(leaf.clone(), inputs.weight, inputs.bias, None, None)
        (dx,) = torch.autograd.grad(y, leaf, inputs.dy)
        assert torch.cuda.current_device() == 0 and y.device == dx.device == torch.device(device)
        results.append([y.cpu(), dx.cpu()])
    assert all(map(torch.equal, *results))
