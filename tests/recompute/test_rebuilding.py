"""recompute_scope: outputs are recomputed bit for bit, for all readers and after writes."""

import contextlib
import gc

import pytest
import torch
from ops.inputs import ACTIVATIONS
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fastvit
from fastvit import BatchNormAct, recompute_scope
from fastvit.memory import live_bytes
from fastvit.recompute import norm_rules
from fastvit.recompute.packed_tensor import PackedTensor
from recompute.models import (
    READERS,
    ReaderModel,
    RecomputationCounter,
    assert_same_bits,
    compare_and_measure_freed,
    make_conv_stack,
    measure_forward,
    run_step,
)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("reader", READERS)
def test_recomputed_outputs_give_the_gradients_of_kept_ones(reader, channels_last, device):
    read, num_recomputations = READERS[reader]
    x = torch.randn(4, 3, 11, 13, device=device)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    want = run_step(ReaderModel(read, "keep").to(device), x)
    with RecomputationCounter() as recomputations:
        assert_same_bits(run_step(ReaderModel(read, "recompute").to(device), x), want)
    assert num_recomputations is None or recomputations.count == num_recomputations, recomputations.count
    assert_same_bits(run_step(ReaderModel(read, "recompute").to(device), x, contextlib.nullcontext), want)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_stats", "cumulative"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recomputed_outputs_give_the_gradients_of_kept_ones_in_every_mode(activation, mode, residual, device):
    """Running statistics change between forward and backward; recomputed outputs do not depend on them."""
    inputs = [torch.randn(6, 5, 70, device=device) for _ in range(1 + residual)]
    results = []
    with RecomputationCounter() as recomputations:
        for memory in ("keep", "recompute"):
            layer = BatchNormAct(
                5, activation=activation, memory=memory, device=device,
                track_running_stats=mode != "no_stats", momentum=None if mode == "cumulative" else 0.1,
            ).train(mode != "eval")  # fmt: skip
            leaves = [t.clone().requires_grad_() for t in inputs]
            with recompute_scope():
                y = layer(*(t * 1 for t in leaves))
                loss = (y * y.detach().clone().requires_grad_()).exp().mean()
            with torch.no_grad():
                for name, buffer in layer.named_buffers():
                    if "running" in name:
                        buffer.add_(1)
            results.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
    assert_same_bits(*results)
    # A residual that nothing else has saved is saved by the layer where it has an activation.
    assert recomputations.count == (0 if residual and activation == "identity" else 1)


def test_live_bytes_of_a_forward(device):
    """Per layer: torch saves x, the normalised x and y, of which a scope keeps x; keep x and y."""
    x = torch.randn(4, 8, 48, 48, device=device)
    rest = 0.02 if device == "cpu" else 0.03  # a GPU's allocator rounds to 512 bytes
    for kind, want in (("torch", 4), ("keep", 8), ("recompute", 4)):
        assert abs(measure_forward(make_conv_stack(kind).to(device), x)[0] - want) < rest
    assert abs(measure_forward(make_conv_stack("torch").to(device), x, contextlib.nullcontext)[0] - 12) < rest
    net = make_conv_stack("recompute").to(device)
    assert abs(measure_forward(net, x, contextlib.nullcontext)[0] - 8) < rest, "without a scope it is keep"


def test_live_bytes_of_a_step(device):
    """The graph is held by its result, what it saved is gone."""
    x, net = torch.randn(4, 8, 48, 48, device=device), make_conv_stack("recompute").to(device)

    def step():
        with recompute_scope():
            loss = net(x).sum()
        loss.backward()
        return loss

    step()
    assert live_bytes(step, device)[0] < 0.02 * x.nbytes


def test_readers_that_outlive_the_layers_graph(device):
    """A reader of y.detach() backpropagates after the layer's own graph is spent: x lives as long as it."""
    x = torch.randn(4, 3, 9, 9, device=device)
    results = []
    for memory in ("keep", "recompute"):
        net = ReaderModel(None, memory).to(device)
        with recompute_scope():
            y = net.norm(net.first(x))
            one, two = net.a(y).sum(), net.b(y.detach()).square().sum()
        del y
        one.backward()
        del one
        gc.collect()
        two.backward()
        results.append([net.a.weight.grad, net.b.weight.grad, net.first.weight.grad])
    assert_same_bits(*results)


def test_written_after_it_was_saved(device):
    """Autograd refuses it; the recomputed tensor has the saved values, so the gradient is correct."""
    x = torch.randn(4, 3, 9, 9, device=device)
    want = run_step(ReaderModel(READERS["conv"].read, "keep").to(device), x)
    for alive in (True, False):
        net = ReaderModel(None, "recompute").to(device)
        leaf = x.clone().requires_grad_()
        with recompute_scope():
            y = net.norm(net.first(leaf))
            out = net.a(y)
        with torch.no_grad():
            y.mul_(3)
        if not alive:
            del y
        out.square().sum().backward()
        assert_same_bits(
            [out.detach(), leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)], want
        )


@pytest.mark.parametrize("what", ["x", "weight", "other"])
def test_writes_that_make_the_gradient_wrong_are_refused(what, device):
    """The writes are to x, from which y would be recomputed, to a parameter, and to a tensor of no layer."""
    net = ReaderModel(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        other = x.detach() + 1
        out = net.a(net.norm(x)).sum() + (other * net.b.weight.sum()).sum()
    with torch.no_grad():
        {"x": x, "weight": net.norm.weight, "other": other}[what].add_(1)
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation.* is at version .; expected version ."
    ):
        out.backward()


def test_x_written_before_y_is_saved(device):
    """y cannot be recomputed then, and is kept; only the layer's own backward raises."""
    net = ReaderModel(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        y = net.norm(x)
        with torch.no_grad():
            x.add_(1)
        out = net.a(y).sum()
    del y
    with RecomputationCounter() as recomputations:
        torch.autograd.grad(out, net.a.weight, retain_graph=True)
    assert recomputations.count == 0
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.backward()


class SavesItsResult(torch.autograd.Function):
    """With nodes of other graphs between its own and the result."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            x.detach().requires_grad_().sin().sum().backward()
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


OWN_RESULTS = {
    "exp": torch.exp, "softmax": lambda x: x.softmax(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1), "std": lambda x: x.std(-1), "cumprod": lambda x: x.cumprod(-1),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "relu in place": lambda x: torch.relu_(x * 1), "elu in place": lambda x: nn.functional.elu_(x * 1),
    "a view in place": lambda x: (y := x * 1, y[:, :8].sigmoid_())[0],
    "expanded": lambda x: x.sum(-1, keepdim=True).expand_as(x).exp(), "function": SavesItsResult.apply,
    "layer": lambda x: BatchNormAct(40, device=x.device)(x),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_RESULTS)
def test_results_that_their_op_saves_are_freed(name, device):
    """A saved tensor that refers to the node that saves it would never be: no collector sees the cycle."""
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            leaf = (torch.rand(8, 40, 32, device=device) + 0.1).requires_grad_()
            with recompute_scope():
                x = leaf * 1
                y = OWN_RESULTS[name](x)
                gone = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
                loss = (y * y.exp()).tanh().sum()
                del x, y
            if backward:
                loss.backward()
            del loss, leaf
            assert all(reference.expired() for reference in gone)
    finally:
        gc.enable()


def test_a_scope_around_a_whole_loop_forgets(device, monkeypatch):
    def records():
        gc.collect()
        return sum(type(one) is PackedTensor for one in gc.get_objects())

    monkeypatch.setattr(fastvit.recompute.scope, "MAX_PENDING", 64)
    layer, before = BatchNormAct(4, device=device), records()  # other tests may hold some
    with recompute_scope():
        for _ in range(500):
            layer(torch.randn(2, 4, device=device)).square().sum().backward()
        assert len(fastvit.recompute.active_scope()._pending) <= 64
        assert records() - before <= 70


def test_cudnn_repeats_its_evaluation(monkeypatch):
    """Its kernel rounds otherwise than torch's, which is told apart by a function in its place."""
    norm, x, calls = nn.BatchNorm2d(8), torch.randn(4, 8, 6, 6), []
    monkeypatch.setattr(torch, "cudnn_batch_norm", lambda *given: (calls.append(given), given)[1])
    w, b, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    for training, running in ((False, (mean, var)), (True, (None, None))):
        assert norm_rules._cudnn_batch_norm(x, w, b, mean, var, training, 1e-5) is x
        assert calls.pop() == (x, w, b, *running, training, 0.0, 1e-5)


LAYERS = {  # each between two convolutions: the layer, and how many tensors of x's size a scope does not keep
    "SyncBatchNorm": (lambda: nn.Sequential(fastvit.SyncBatchNorm(8), nn.SiLU()), 2),
    "with ReLU": (lambda: fastvit.SyncBatchNorm(8, fuse_relu=True), 1),
    "BatchNormActSync": (lambda: fastvit.BatchNormActSync(8), 1),
    "InPlaceABN": (lambda: nn.Sequential(fastvit.InPlaceABN(8), nn.MaxPool2d(3, 1, 1)), 1),
    "InPlaceABNSync": (lambda: nn.Sequential(fastvit.InPlaceABNSync(8), nn.SiLU()), 1),
    "torch's": (lambda: nn.Sequential(nn.BatchNorm2d(8), nn.SiLU()), 2),
    "converted": (lambda: fastvit.convert_syncbn_model(LAYERS["torch's"][0]()), 2),
    "fused": (lambda: fastvit.fuse(LAYERS["torch's"][0]()), 1),
    "keep": (lambda: BatchNormAct(8, memory="keep"), 0),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_what_the_layers_free(name, train, device):
    layer, count = LAYERS[name]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), layer(), nn.Conv2d(8, 8, 1)).train(train).to(device)
    x = torch.randn(4, 3, 24, 24, device=device)
    less = compare_and_measure_freed(lambda: net(x), [p for p in net.parameters() if p.requires_grad])
    rest = 0.01 if device == "cpu" else 0.08  # up to four vectors are copied, into 512 bytes each on a GPU
    assert abs(less / x.nbytes - count * 8 / 3) < rest


def test_a_residual_without_an_activation(device):
    """It is no tensor that the layer saves; the recipe takes it where another op has."""
    x, first, last = torch.randn(4, 3, 24, 24), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
    for norm in (fastvit.SyncBatchNorm(8), BatchNormAct(8, activation="identity")):
        net = nn.ModuleList([first, norm, last]).to(device)
        x = x.to(device)

        def forward(norm=norm, x=x):
            y = first(x).sigmoid()
            return last(norm(y, y))

        assert abs(compare_and_measure_freed(forward, list(net.parameters())) / x.nbytes - 8 / 3) < 0.05
