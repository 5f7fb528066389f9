"""Layers under autograd: saved tensors, single gradients, second derivatives, transforms."""

import contextlib

import pytest
import torch
from ops.inputs import LayerInputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import BatchNormAct, InPlaceABN, SyncBatchNorm, functional
from layers.pairs import each_layer, make_pair


@pytest.mark.parametrize(
    "kind,activation",
    [
        ("InPlaceABN", "identity"),
        ("SyncBatchNorm", "relu"),
        ("BatchNormAct", "identity"),
        ("BatchNormAct", "relu"),
    ],
)
def test_each_gradient_is_the_same_when_all_others_are_frozen(kind, activation, device):
    inputs = LayerInputs("nchw", torch.float32, device)
    layer, _ = make_pair(kind, inputs, activation)
    residual = [] if kind == "InPlaceABN" else [inputs.residual]
    leaves = [inputs.x, *residual, layer.weight, layer.bias]

    def compute_gradients(chosen):
        for leaf in leaves:
            leaf.requires_grad_(any(leaf is one for one in chosen))
        return torch.autograd.grad(layer(inputs.x.clone(), *residual), chosen, inputs.dy)

    for leaf, expected in zip(leaves, compute_gradients(leaves), strict=True):
        assert torch.equal(*compute_gradients([leaf]), expected)


@pytest.mark.parametrize("kind", ["InPlaceABN", "SyncBatchNorm"])
def test_one_activation_is_saved_for_backward_which_allocates_little(kind):
    layer = InPlaceABN(64) if kind == "InPlaceABN" else SyncBatchNorm(64, fuse_relu=True)
    x = torch.randn(8, 64, 16, 16, requires_grad=True).clone()
    saved_bytes = {}

    def pack(tensor):
        saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    parameter_bytes = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    assert sum(saved_bytes.values()) == x.nbytes + (2 * 64 + 2) * 4 + parameter_bytes
    with torch.profiler.profile(profile_memory=True) as profile:
        y.backward(torch.ones_like(y))
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages())
    assert allocated <= 3 * x.nbytes + 16384  # dy, dx, and the clone's gradient, which is dx


def test_double_backward_is_refused():
    x = torch.randn(4, 3, requires_grad=True)
    for layer in (InPlaceABN(3), SyncBatchNorm(3), BatchNormAct(3), fastvit.LayerNorm(3), functional.act):
        for power in (1, 3):  # With 1 the gradient of the layer's result has no graph.
            (grad,) = torch.autograd.grad(layer(x.clone()).pow(power).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="Backward: fastvit's layers are differentiable once"):
                (grad.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("layer_class", [InPlaceABN, SyncBatchNorm, BatchNormAct, fastvit.LayerNorm])
def test_a_graph_of_the_backward_unpacks_once_and_leaves_gradients_writable(layer_class):
    layer, x = layer_class(3), torch.randn(4, 3, requires_grad=True)
    leaves, unpacked = (x, *layer.parameters()), []

    def run(x):
        return layer(x.clone())

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    expected = torch.autograd.grad(run(x).sin().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = run(x)
    torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    num_unpacked = len(unpacked)
    torch.autograd.grad(y.sum(), leaves, create_graph=True)
    assert len(unpacked) == 2 * num_unpacked
    for forward in (run, lambda x: checkpoint(run, x, use_reentrant=False)):
        gradients = torch.autograd.grad(forward(x).sin().sum(), leaves, create_graph=True)
        assert all(map(torch.equal, gradients, expected))
        for gradient in gradients:
            gradient.mul_(2)


def test_torch_func_is_refused_and_a_tensor_that_outlived_it_is_unwrapped():
    layer, outlived = SyncBatchNorm(3), []

    def compute_loss(x):
        outlived.append(x * 2)
        return outlived[0].sum()

    x = torch.randn(4, 3)
    torch.func.grad(compute_loss)(x)
    y = layer(outlived[0])
    assert torch.equal(y, layer(x * 2)) and y.grad_fn.next_functions[0][0] is None
    message = "BatchNormFunction: fastvit's layers have no rules for torch.func"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: layer(x * 2).sum())(x)


@each_layer
def test_meta_and_fake_tensors_train(layer_class):
    for device, mode in (("meta", contextlib.nullcontext()), ("cpu", FakeTensorMode())):
        with mode, torch.device(device):
            layer, leaf = layer_class(3), torch.randn(4, 3, requires_grad=True)
            layer(leaf * 1).sum().backward()
        assert leaf.grad.shape == (4, 3) and layer.weight.grad.shape == (3,)


@pytest.mark.parametrize("layer_class", [InPlaceABN, BatchNormAct, SyncBatchNorm])
def test_inference_mode_gives_the_same_bits(layer_class):
    layer, x = layer_class(3).eval(), torch.randn(4, 3)
    expected = layer(x.clone()).detach()
    with torch.inference_mode():  # Its tensors have no version counter.
        assert torch.equal(layer(x.clone()), expected)
