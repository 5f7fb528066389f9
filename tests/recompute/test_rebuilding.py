"""recompute_scope: outputs are recomputed bit for bit, for all readers and after writes."""

import contextlib
import gc

import pytest
import torch
from ops.matrix import ACTIVATIONS
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fastvit
from fastvit import BatchNormAct, recompute_scope
from fastvit.memory import live_bytes
from fastvit.recompute import norm_rules
from fastvit.recompute.packed_tensor import PackedTensor
from fastvit.recompute.policy import RecomputeLevel
from fastvit.recompute.recompute_rules import RECOMPUTE_RULES
from recompute.models import (
    READERS,
    ReaderModel,
    SavesItsOutput,
    assert_same_bits,
    compare_and_measure_freed,
    count_recomputations,
    list_gradients,
    make_conv_stack,
    measure_forward,
    step_in_scope,
)


@pytest.mark.parametrize("reader", READERS)
def test_recomputed_outputs_give_the_gradients_of_kept_ones(reader, device):
    read, num_recomputations = READERS[reader]
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 11, 13, device=device).contiguous(memory_format=layout)
        expected = step_in_scope(ReaderModel(read, "keep").to(device), x)
        net = ReaderModel(read, "recompute").to(device)
        with count_recomputations() as bn_apply:
            assert_same_bits(step_in_scope(net, x), expected)
        assert num_recomputations in (None, bn_apply.call_count)
        net = ReaderModel(read, "recompute").to(device)
        assert_same_bits(step_in_scope(net, x, contextlib.nullcontext), expected)


MODES = ("train", "eval", "no_stats", "cumulative")


@pytest.mark.parametrize(
    "activation,mode,residual",
    [
        *((activation, "train", "no residual") for activation in ACTIVATIONS),
        *(("silu", mode, "no residual") for mode in MODES[1:]),
        *(("silu", mode, "residual") for mode in MODES),
        ("identity", "train", "residual"),
    ],
)
def test_recomputed_outputs_give_the_gradients_of_kept_ones_in_every_mode(activation, mode, residual, device):
    """Running statistics change between forward and backward; recomputed outputs do not depend on them."""
    inputs = [torch.randn(6, 5, 70, device=device) for _ in range(1 + (residual == "residual"))]
    momentum, has_statistics = None if mode == "cumulative" else 0.1, mode != "no_stats"
    results = []
    with count_recomputations() as bn_apply:
        for memory in ("keep", "recompute"):
            options = {"activation": activation, "momentum": momentum, "track_running_stats": has_statistics}
            layer = BatchNormAct(5, memory=memory, device=device, **options).train(mode != "eval")
            leaves = [t.clone().requires_grad_() for t in inputs]
            with recompute_scope():
                y = layer(*(t * 1 for t in leaves))
                loss = (y * y.detach().clone().requires_grad_()).exp().mean()
            if has_statistics:
                with torch.no_grad():
                    layer.running_mean.add_(1)
                    layer.running_var.add_(1)
            results.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
    assert_same_bits(*results)
    # A residual that nothing else has saved is saved by the layer where it has an activation.
    is_kept = residual == "residual" and activation == "identity"
    assert bn_apply.call_count == (0 if is_kept else 1)


def test_live_bytes_of_a_forward(device):
    """Per layer: torch saves x, the normalised x and y, of which a scope keeps x; keep x and y."""
    x = torch.randn(4, 8, 48, 48, device=device)
    tolerance = 0.02 if device == "cpu" else 0.03  # a GPU's allocator rounds to 512 bytes
    for kind, scope, expected in (
        ("torch", recompute_scope, 4),
        ("keep", recompute_scope, 8),
        ("recompute", recompute_scope, 4),
        ("torch", contextlib.nullcontext, 12),
        ("recompute", contextlib.nullcontext, 8),  # as with keep
    ):
        nbytes = measure_forward(make_conv_stack(kind).to(device), x, scope)
        assert abs(nbytes - expected) < tolerance, (kind, scope)


def test_the_loss_of_a_step_holds_its_graph_but_no_saved_tensor(device):
    x, net = torch.randn(4, 8, 48, 48, device=device), make_conv_stack("recompute").to(device)

    def step():
        with recompute_scope():
            loss = net(x).sum()
        loss.backward()
        return loss

    step()
    assert live_bytes(step, device)[0] < 0.02 * x.nbytes


def test_readers_that_outlive_the_layers_graph_recompute_its_output(device):
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


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "deleted"])
def test_an_output_written_after_it_was_saved_is_recomputed_as_it_was(is_alive, device):
    """Autograd refuses it; the recomputed tensor has the saved values, so the gradient is correct."""
    x = torch.randn(4, 3, 9, 9, device=device)
    expected = step_in_scope(ReaderModel(READERS["conv"].read, "keep").to(device), x)
    net, leaf = ReaderModel(None, "recompute").to(device), x.clone().requires_grad_()
    with recompute_scope():
        y = net.norm(net.first(leaf))
        out = net.a(y)
    with torch.no_grad():
        y.mul_(3)
    if not is_alive:
        del y
    out.square().sum().backward()
    assert_same_bits([out.detach(), leaf.grad, *list_gradients(net)], expected)


@pytest.mark.parametrize("target", ["x", "weight", "other"])
def test_writes_that_make_the_gradient_wrong_are_refused(target, device):
    """The writes are to x, from which y would be recomputed, to a parameter, and to a tensor of no layer."""
    net = ReaderModel(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        other = x.detach() + 1
        out = net.a(net.norm(x)).sum() + (other * net.b.weight.sum()).sum()
    with torch.no_grad():
        {"x": x, "weight": net.norm.weight, "other": other}[target].add_(1)
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation.* is at version .; expected version ."
    ):
        out.backward()


def test_a_rule_that_gives_another_shape_is_an_error_in_the_backward(monkeypatch, device):
    """Both shapes are broadcast where they are read: the second has the strides of the output, too."""
    x = torch.randn(64, 64, device=device)
    for recompute in (lambda t: t[:, 0], lambda t: t[:1]):
        rule = (RecomputeLevel.CHEAP, lambda reader, f=recompute: (f, (reader.saved_operand("self"),)))
        monkeypatch.setitem(RECOMPUTE_RULES, "SiluBackward0", rule)
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        with recompute_scope():
            loss = (nn.functional.silu(x * weight) * weight).sum()
        with pytest.raises(RuntimeError, match=r"recomputing the output of silu gave the shape \(.*64, 64"):
            loss.backward()


def test_an_output_whose_input_is_written_before_it_is_saved_is_kept(device):
    """Only the layer's own backward raises."""
    net = ReaderModel(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        y = net.norm(x)
        with torch.no_grad():
            x.add_(1)
        out = net.a(y).sum()
    del y
    with count_recomputations() as bn_apply:
        torch.autograd.grad(out, net.a.weight, retain_graph=True)
    assert bn_apply.call_count == 0
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.backward()


OWN_RESULTS = {
    "exp": torch.exp, "softmax": lambda x: x.softmax(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1), "std": lambda x: x.std(-1), "cumprod": lambda x: x.cumprod(-1),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "relu in place": lambda x: torch.relu_(x * 1), "elu in place": lambda x: nn.functional.elu_(x * 1),
    "a view in place": lambda x: (y := x * 1, y[:, :8].sigmoid_())[0],
    "expanded": lambda x: x.sum(-1, keepdim=True).expand_as(x).exp(), "function": SavesItsOutput.apply,
    "layer": lambda x: BatchNormAct(40, device=x.device)(x),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_RESULTS)
def test_results_that_their_op_saves_are_freed(name, device):
    """A saved tensor that refers to the node that saves it would never be: no collector sees the cycle."""
    gc.collect()
    gc.disable()
    try:
        for has_backward in (True, False):
            leaf = (torch.rand(8, 40, 32, device=device) + 0.1).requires_grad_()
            with recompute_scope():
                x = leaf * 1
                y = OWN_RESULTS[name](x)
                references = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
                loss = (y * y.exp()).tanh().sum()
                del x, y
            if has_backward:
                loss.backward()
            del loss, leaf
            assert all(reference.expired() for reference in references)
    finally:
        gc.enable()


def test_a_scope_around_a_whole_loop_forgets_its_old_steps(device, monkeypatch):
    def count_packed_tensors():
        gc.collect()
        return sum(type(one) is PackedTensor for one in gc.get_objects())

    monkeypatch.setattr(fastvit.recompute.scope, "MAX_PENDING", 64)
    layer, num_before = BatchNormAct(4, device=device), count_packed_tensors()  # of other tests
    with recompute_scope():
        for _ in range(500):
            layer(torch.randn(2, 4, device=device)).square().sum().backward()
        assert len(fastvit.recompute.active_scope()._pending) <= 64
        assert count_packed_tensors() - num_before <= 70


def test_the_rule_of_cudnns_batch_norm_repeats_its_evaluation(monkeypatch):
    """Its kernel rounds otherwise than torch's, which is told apart by a function in its place."""
    norm, x, calls = nn.BatchNorm2d(8), torch.randn(4, 8, 6, 6), []
    monkeypatch.setattr(torch, "cudnn_batch_norm", lambda *given: (calls.append(given), given)[1])
    w, b, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    for training, running in ((False, (mean, var)), (True, (None, None))):
        assert norm_rules._cudnn_batch_norm(x, w, b, mean, var, training, 1e-5) is x
        assert calls.pop() == (x, w, b, *running, training, 0.0, 1e-5)


# A layer between two convolutions, and how many tensors of its input's size a scope does not keep.
LAYERS = {
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


@pytest.mark.parametrize("name", LAYERS)
def test_a_scope_frees_what_each_layer_can_recompute(name, device):
    make_layer, num_freed = LAYERS[name]
    x = torch.randn(4, 3, 24, 24, device=device)
    tolerance = 0.01 if device == "cpu" else 0.08  # up to four vectors are copied, on a GPU into 512 bytes
    for is_training in (True, False):
        net = nn.Sequential(nn.Conv2d(3, 8, 1), make_layer(), nn.Conv2d(8, 8, 1)).train(is_training)
        parameters = list(net.to(device).parameters())
        freed_bytes = compare_and_measure_freed(lambda: net(x), parameters)  # noqa: B023
        assert abs(freed_bytes / x.nbytes - num_freed * 8 / 3) < tolerance, is_training


def test_a_residual_without_an_activation_is_read_where_another_op_saved_it(device):
    """The layer does not save the residual; the recipe takes it from the other op."""
    x = torch.randn(4, 3, 24, 24, device=device)
    for norm in (fastvit.SyncBatchNorm(8), BatchNormAct(8, activation="identity")):
        net = nn.ModuleList([nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 8, 1)]).to(device)

        def forward(net=net):
            first, norm, last = net
            y = first(x).sigmoid()
            return last(norm(y, y))

        freed_bytes = compare_and_measure_freed(forward, list(net.parameters()))
        assert abs(freed_bytes / x.nbytes - 8 / 3) < 0.05
