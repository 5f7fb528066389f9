"""torch.compile: one graph, and the same outputs, gradients and running statistics as eager."""

import pytest
import torch
from ops.tolerances import assert_close_enough
from torch import nn

import fastvit
from fastvit import functional


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = fastvit.SyncBatchNorm(channels, fuse_relu=True)

    def forward(self, x):
        return self.norm(x, x.sigmoid())


class Tokens(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = fastvit.InPlaceABN(channels, activation="elu", activation_param=1.0, channel_last=True)

    def forward(self, x):
        return self.norm(x.flatten(2).transpose(1, 2).contiguous()).transpose(1, 2).unflatten(2, x.shape[2:])


LAYERS = {
    "abn": lambda: fastvit.InPlaceABN(6, momentum=None),
    "abn without bias": lambda: fastvit.InPlaceABN(6, bias=False),
    "sbn": lambda: fastvit.SyncBatchNorm(6, fuse_relu=True),
    "residual": lambda: Residual(6),
    "tokens": lambda: Tokens(6),
}


def net(name, channels_last, device):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for module in layer.modules():
        if getattr(module, "weight", None) is not None:
            nn.init.normal_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
    # no bias before the norm: its gradient is zero but for rounding
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), layer, nn.Conv2d(6, 4, 3))
    return model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)


def results(model, run, x):
    model.zero_grad()
    for buffer, value in zip(model.buffers(), [0, 1, 0], strict=True):
        buffer.fill_(value)
    y = run(x)
    if y.requires_grad:
        y.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_fullgraph(name, backend, training, device):
    torch._dynamo.reset()
    channels_last = training == (backend == "inductor")  # compiling takes seconds: each layout once
    model = net(name, channels_last, device).train(training)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=backend == "aot_eager")
    for samples in (4, 7) if backend == "aot_eager" else (4, 4):
        x = torch.randn(samples, 3, 9, 10, device=device)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        for got, want in zip(results(model, compiled, x), results(model, model, x), strict=True):
            assert_close_enough(got.double(), want.double(), row="in_place_layer", dtype=torch.float32)
    with torch.no_grad():
        assert_close_enough(compiled(x), model(x), row="layer")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "call,shape,autocast",
    [
        (lambda x, w, b: functional.layer_norm(x, (4, 6), w, b), (4, 6), False),
        (lambda x, w, b: functional.layer_norm(x, (4, 6), w, b), (4, 6), True),
        (lambda x, *_: functional.act(x, "gelu_tanh"), (5, 4, 6), False),
        (lambda a, b, _: functional.gated_act(a, b), (5, 4, 6), False),
    ],
    ids=["layer_norm", "layer_norm_autocast", "act", "glu"],
)
def test_functions_in_one_graph(call, shape, autocast, backend, device):
    torch._dynamo.reset()
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((5, 4, 6), shape, shape)]
    made = []
    for run in (torch.compile(call, fullgraph=True, backend=backend), call):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = run(*leaves)
        made.append([y, *torch.autograd.grad(y.float().square().sum(), leaves, materialize_grads=True)])
    for got, want in zip(*made, strict=True):
        assert got.dtype == want.dtype
        assert_close_enough(got, want, row="layer", dtype=torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("name", ["abn", "tokens"])
def test_a_layer_compiled_alone(name, device):
    """Its input is then an input of the graph, which torch 2.13 gets wrong for mark_dirty."""
    torch._dynamo.reset()
    model = net(name, False, device)
    x = torch.randn(4, 3, 9, 10, device=device)
    eager = results(model, model, x)
    first, layer, last = model
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(results(model, lambda x: last(compiled(first(x))), x), eager, strict=True):
        assert_close_enough(got.double(), want.double(), row="in_place_layer", dtype=torch.float32)


def test_the_input_is_overwritten_when_compiled_too(device):
    torch._dynamo.reset()
    layer = fastvit.InPlaceABN(6, device=device)
    for requires_grad in (True, False):
        x = torch.randn(4, 6, 5, device=device, requires_grad=requires_grad).clone()
        want = layer(x.clone())
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert_close_enough(y, want, row="layer")
        assert_close_enough(x, want, row="layer")
