"""Frozen convolutions and norms: inputs are not kept, nor what only they read; gradients are eager's."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from conversion.models import FunctionModel, make_images
from conversion.vit_models import DIM, TOKENS, Block, compare_and_measure_kept, measure_kept_bytes
from torch import nn

import fastvit
from recompute.models import assert_same_bits, compare_and_measure_freed

CHANNELS, SIZE = 16, 24


def make_conv(in_channels=CHANNELS):
    return nn.Conv2d(in_channels, CHANNELS, 3, padding=1)


def make_frozen_chain(make_activation, make_layer=make_conv, depth=4):
    torch.manual_seed(0)
    layers = (part for _ in range(depth) for part in (make_layer(), make_activation()))
    return nn.Sequential(*layers).requires_grad_(False)


def make_conv_and_norm():
    norm = nn.BatchNorm2d(CHANNELS).eval()
    nn.init.normal_(norm.weight)
    norm.running_mean.normal_()
    return nn.Sequential(make_conv(), norm)


def make_perceptual_model(frozen, taps=()):
    """Returns a trained layer before frozen ones, whose features after `taps` a loss reads."""

    def forward(model, x):
        x, features = model.first(x), []
        for i, layer in enumerate(model.frozen):
            x = layer(x)
            if i in taps:
                features.append(x.flatten(1).square())
        return torch.cat([*features, x.flatten(1)], 1)

    torch.manual_seed(1)
    return FunctionModel(forward, first=make_conv(3), frozen=frozen)


def differentiate(model, has_second_derivatives):
    x = make_images(size=SIZE).requires_grad_()
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(model(x).square().sum(), inputs, create_graph=has_second_derivatives)
    if has_second_derivatives:
        gradients += torch.autograd.grad(gradients[0].square().sum(), inputs, allow_unused=True)
    return [gradient for gradient in gradients if gradient is not None]


# A chain's activation, and the most that is kept of eager's bytes.
ACTIVATIONS = {
    "relu": (nn.ReLU, 0.4),
    "relu in place": (lambda: nn.ReLU(inplace=True), 0.4),
    "relu6": (nn.ReLU6, 0.4),
    "relu6 in place": (lambda: nn.ReLU6(inplace=True), 0.4),
    "leaky_relu": (nn.LeakyReLU, 0.4),
    "leaky_relu in place": (lambda: nn.LeakyReLU(inplace=True), 0.4),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 0.25), 0.4),
    "one-sided": (lambda: nn.Hardtanh(-float("inf"), 0.25), 0.6),
    "threshold": (lambda: nn.Threshold(0.1, -1), 0.6),
    "silu": (nn.SiLU, 0.6),
    "none": (nn.Identity, 0.25),
}


@pytest.mark.parametrize("norm", ["no norm", "norm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_frozen_chain_keeps_masks_and_eager_gradients(activation, norm):
    """A chain with norms has second derivatives, too. A mask or less is kept of what no loss reads."""
    make_activation, most_kept = ACTIVATIONS[activation]
    frozen = make_frozen_chain(make_activation, make_conv_and_norm if norm == "norm" else make_conv)
    for taps in ((), (3,)):
        eager = make_perceptual_model(frozen, taps)
        model = fastvit.convert(copy.deepcopy(eager))
        for _ in range(2):
            assert_same_bits(*(differentiate(net, norm == "norm") for net in (model, eager)))
        if not taps:
            eager_bytes = measure_kept_bytes(eager, make_images(size=SIZE))
            assert measure_kept_bytes(model, make_images(size=SIZE)) <= most_kept * eager_bytes


IMAGES = (4, CHANNELS, SIZE, SIZE)
LAYERS = {
    "conv1d": (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), (4, CHANNELS, 300)),
    "conv3d": (lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1), (2, CHANNELS, 6, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1), IMAGES),
    "padding same": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 4, padding="same"), IMAGES),
    "channels_last": (make_conv, IMAGES),
    "autocast": (make_conv, IMAGES),
    "linear": (lambda: nn.Linear(256, 256), (37, 256)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", LAYERS)
def test_every_frozen_layer_frees_its_input(kind):
    """In place of each of three inputs, a mask is kept."""
    make_layer, shape = LAYERS[kind]
    layout = torch.channels_last if kind == "channels_last" else torch.contiguous_format
    chain = make_frozen_chain(nn.ReLU, make_layer).to(memory_format=layout)
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return chain(x * 1)

    nbytes = x.nbytes // 2 if kind == "autocast" else x.nbytes
    assert compare_and_measure_freed(forward, [x]) >= 3 * nbytes * 7 // 8


POOLS = {
    "MaxPool2d": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "function": lambda x: torch.max_pool2d(x, 2),
}


@pytest.mark.parametrize("pool", POOLS)
def test_max_pooling_keeps_the_mask_of_its_input(pool):
    """Its backward reads indices. A trained convolution that reads the ReLU's result too keeps that."""
    for has_skip, most_kept in ((True, 1.0), (False, 0.65)):

        def forward(model, x, has_skip=has_skip):
            x = F.relu(model.first(x))
            y = model.second(POOLS[pool](x))
            return y.mean((2, 3)) + model.third(x).mean((2, 3)) if has_skip else model.third(y)

        model = FunctionModel(forward, first=make_conv(3), second=make_conv(), third=make_conv())
        before, after = compare_and_measure_kept(model, make_images(size=SIZE))
        assert after <= most_kept * before


def test_a_mask_holds_after_a_write_to_the_result_it_replaces():
    """A result that is kept is still guarded: eager's error is raised."""
    frozen, trained = make_conv().requires_grad_(False), make_conv()
    leaf = torch.randn(4, CHANNELS, SIZE, SIZE).requires_grad_()
    y = F.relu(leaf.sin())
    expected = torch.autograd.grad(frozen(y).square().sum(), leaf)[0]
    with fastvit.recompute_scope():
        y = F.relu(leaf.sin())
        loss = frozen(y).square().sum()
    with torch.no_grad():
        y.neg_()
    assert torch.equal(torch.autograd.grad(loss, leaf, retain_graph=True)[0], expected)
    with fastvit.recompute_scope():
        y = F.relu(leaf.sin())
        frozen(y)
        other = trained(y)
        with torch.no_grad():
            y.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


READERS = {
    "frozen, then trained": lambda y, frozen, trained: frozen(y) + trained(y),
    "trained, then frozen": lambda y, frozen, trained: trained(y) + frozen(y),
    "frozen times y": lambda y, frozen, trained: frozen(y) * y,
    "y times y": lambda y, frozen, trained: y * y + frozen(y),
    "pool": lambda y, frozen, trained: frozen(y[:2]) + frozen(F.max_pool2d(y, 3, 1, 1))[:2],
    "norm": lambda y, frozen, trained: frozen(y) + nn.BatchNorm2d(CHANNELS)(y),
    "recipe": lambda y, frozen, trained: trained((y + 1).sigmoid()) + frozen(y),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_result_with_another_reader_is_kept_whole(reader):
    frozen, trained = make_conv().requires_grad_(False), make_conv()
    leaf = torch.randn(4, CHANNELS, SIZE, SIZE, requires_grad=True)

    def forward():
        return READERS[reader](F.relu(leaf.cumsum(0)), frozen, trained)

    compare_and_measure_freed(forward, [leaf, *trained.parameters()])


def test_an_activation_at_the_end_of_a_block_leaves_a_mask():
    """The tensor that the activation saves becomes a mask when the next block reads the tensor's sizes."""
    block = FunctionModel(
        lambda model, x: F.relu(model.conv(model.norm(x))), norm=nn.BatchNorm2d(3), conv=make_conv(3)
    )
    model = nn.Sequential(block, make_frozen_chain(nn.Identity, depth=1))
    before, after = compare_and_measure_kept(model, make_images(size=SIZE))
    assert after <= before - 4 * CHANNELS * SIZE**2 * 4 * 7 // 8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_mask_of_infinities_and_nans_gives_eager_gradients(activation):
    make_activation, frozen, gradients = ACTIVATIONS[activation][0], make_conv().requires_grad_(False), []
    values = [0.0, -0.0, 1.0, -1.0, 6.0, 0.1, 0.25, -0.5, torch.inf, -torch.inf, torch.nan, 1e-40]
    x = torch.tensor(values).repeat(SIZE**2 * 4 // 3).view(1, CHANNELS, SIZE, SIZE)
    for context in (torch.enable_grad, fastvit.recompute_scope):
        leaf = x.clone().requires_grad_()
        with context():
            y = frozen(make_activation()(leaf * 1))
        gradients.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0].view(torch.int32))
    assert torch.equal(*gradients)


def test_the_input_of_a_frozen_batch_norm_is_kept_where_it_costs_less_than_the_output():
    """Concatenations are made of what is kept; each result of a BatchNorm would be a tensor of its own."""

    def forward(model, x):
        features = [x.sigmoid()]
        for norm, conv in zip(model.norms, model.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))).sigmoid())
        return features[-1]

    norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS * n) for n in range(1, 5)).requires_grad_(False)
    convs = nn.ModuleList(make_conv(CHANNELS * n) for n in range(1, 5))
    eager, x = FunctionModel(forward, norms=norms, convs=convs).eval(), torch.randn(2, CHANNELS, SIZE, SIZE)
    before, after = compare_and_measure_kept(eager, x, call=lambda model: lambda x: model(x.requires_grad_()))
    assert after < 0.4 * before


def test_the_report_names_masks():
    model = fastvit.convert(make_perceptual_model(make_frozen_chain(nn.ReLU)))
    assert "where an activation passes the gradient on" in str(fastvit.report(model, make_images(size=SIZE)))
    assert not fastvit.verify(model, make_images(size=SIZE)).skip


@pytest.mark.parametrize("size", [4096, 4099, 5000])
def test_a_boolean_mask_of_dropout_takes_bits(size):
    """torch.native_dropout is what dropout runs on CUDA; it saves its mask."""
    leaf = torch.ones(3, size, requires_grad=True)
    freed_bytes = compare_and_measure_freed(lambda: torch.native_dropout(leaf, 0.25, True)[0], [leaf])
    assert freed_bytes >= 3 * size * 7 // 8 - 8


def test_adapters_in_a_frozen_transformer_keep_less():
    """A frozen bias is neither saved nor in the graph."""

    def forward(model, x):
        for adapter, block in zip(model.adapters, model.blocks, strict=True):
            x = block(x + adapter(x))
        return x

    adapters = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    blocks = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
    eager, x = FunctionModel(forward, adapters=adapters, blocks=blocks), torch.randn(4, TOKENS, DIM)
    (before, after), (_, after_matmuls) = (
        compare_and_measure_kept(eager, x, matmuls=matmuls) for matmuls in (False, True)
    )
    assert after_matmuls < 0.6 * before and after_matmuls < 0.8 * after


@pytest.mark.parametrize("reader", [torch.mul, torch.matmul], ids=["mul", "matmul"])
def test_a_frozen_product_of_a_strided_input_is_not_in_the_graph_of_its_biased_sum(reader):
    """torch adds the trained bias in place to a product that no op of the graph can recompute."""
    x, weight, bias = torch.randn(8, 16, 6, 6), torch.randn(6, 6), torch.randn(6, requires_grad=True)
    leaf = torch.randn(8, 8, 6, 6, requires_grad=True)
    scope = functools.partial(fastvit.recompute_scope, matmuls=True)
    compare_and_measure_freed(lambda: reader(F.linear(x[:, 4:12], weight, bias), leaf), [bias, leaf], scope)
