"""Frozen convolutions and BatchNorms: inputs are not kept, nor what only they read; gradients are eager's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conversion.vit_models import DIM, TOKENS, Block, compare_and_measure_kept, measure_kept_bytes
from torch import nn

import fastvit
from recompute.models import compare_and_measure_freed

C, SIZE = 16, 24


def chain(act, conv=lambda: nn.Conv2d(C, C, 3, padding=1), depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(depth) for part in (conv(), act()))).requires_grad_(False)


def normalised(act, depth=4):
    """The same with BatchNorms in evaluation."""
    parts = list(chain(act, depth=depth))
    for i in range(0, 2 * depth, 2):
        norm = nn.BatchNorm2d(C)
        nn.init.normal_(norm.weight)
        norm.running_mean.normal_()
        parts[i] = nn.Sequential(parts[i], norm)
    return nn.Sequential(*parts).requires_grad_(False).eval()


class Perceptual(nn.Module):
    """A trained layer before frozen ones, whose features a loss reads."""

    def __init__(self, frozen, taps=()):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.frozen, self.taps = nn.Conv2d(3, C, 3, padding=1), frozen, taps

    def forward(self, x):
        x, seen = self.first(x), []
        for i, layer in enumerate(self.frozen):
            x = layer(x)
            if i in self.taps:
                seen.append(x.flatten(1))
        return torch.cat([*(one * one for one in seen), x.flatten(1)], 1)


def images(grad=False):
    x = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_(grad)


def gradients(model, x, second=False):
    y = model(x).square().sum()
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    got = torch.autograd.grad(y, inputs, create_graph=second)
    if second:
        got += torch.autograd.grad(got[0].square().sum(), inputs, allow_unused=True)
    return [one for one in got if one is not None]


ACTIVATIONS = {  # and the most that is kept of eager's bytes
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


@pytest.mark.parametrize("second", [False, True], ids=["", "second derivatives"])
@pytest.mark.parametrize("taps", [(), (3,)], ids=["", "a tap"])
@pytest.mark.parametrize("parts", [chain, normalised])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_frozen_chain_keeps_masks_and_eager_gradients(act, parts, taps, second):
    eager = Perceptual(parts(ACTIVATIONS[act][0]), taps)
    model = fastvit.convert(copy.deepcopy(eager))
    for _ in range(2):
        want, got = (gradients(one, images(True), second) for one in (eager, model))
        assert len(got) == len(want) and all(map(torch.equal, got, want))
    if not taps:
        assert measure_kept_bytes(model, images()) <= ACTIVATIONS[act][1] * measure_kept_bytes(
            eager, images()
        )


@pytest.mark.parametrize(
    "kind", ["conv1d", "conv3d", "transposed", "channels_last", "autocast", "padding same"]
)
def test_kinds_of_convolutions(kind):
    conv, shape = {
        "conv1d": (lambda: nn.Conv1d(C, C, 3, padding=1), (4, C, 300)),
        "conv3d": (lambda: nn.Conv3d(C, C, 3, padding=1), (2, C, 6, 8, 8)),
        "transposed": (lambda: nn.ConvTranspose2d(C, C, 3, padding=1), (4, C, SIZE, SIZE)),
        "padding same": (lambda: nn.Conv2d(C, C, 4, padding="same"), (4, C, SIZE, SIZE)),
    }.get(kind, (lambda: nn.Conv2d(C, C, 3, padding=1), (4, C, SIZE, SIZE)))
    chained, layout = chain(nn.ReLU, conv), torch.contiguous_format
    if kind == "channels_last":
        chained, layout = chained.to(memory_format=torch.channels_last), torch.channels_last
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return chained(x * 1)

    assert compare_and_measure_freed(forward, [x]) > 0


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), lambda x: torch.max_pool2d(x, 2)])
@pytest.mark.parametrize("skip", [False, True])
def test_max_pooling_keeps_the_mask_of_its_input(pool, skip):
    """Its backward reads indices. A trained convolution that reads the ReLU's result too keeps that."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = (nn.Conv2d(c, C, 3, padding=1) for c in (3, C, C))

        def forward(self, x):
            x = F.relu(self.first(x))
            y = self.second(pool(x))
            return y.mean((2, 3)) + self.third(x).mean((2, 3)) if skip else self.third(y)

    before, after = compare_and_measure_kept(Net(), images())
    assert after <= (1.0 if skip else 0.65) * before


def test_a_write_to_a_result_of_which_a_mask_was_left():
    """After the scope a mask still knows the result as it was; before, eager's error is raised."""
    frozen, trained = (nn.Conv2d(C, C, 3, padding=1) for _ in range(2))
    frozen.requires_grad_(False)
    leaf = torch.randn(4, C, SIZE, SIZE).requires_grad_()
    y = F.relu(leaf.sin())
    want = torch.autograd.grad(frozen(y).square().sum(), leaf)[0]
    with fastvit.recompute_scope():
        y = F.relu(leaf.sin())
        loss = frozen(y).square().sum()
    with torch.no_grad():
        y.neg_()
    assert torch.equal(torch.autograd.grad(loss, leaf, retain_graph=True)[0], want)
    with fastvit.recompute_scope():
        y = F.relu(leaf.sin())
        frozen(y)
        other = trained(y)
        with torch.no_grad():
            y.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


def test_a_result_with_another_reader_is_kept_whole():
    """A ReLU's result that a trained layer, a recipe or a later op reads too is whole."""
    torch.manual_seed(0)
    frozen, trained = (nn.Conv2d(C, C, 3, padding=1) for _ in range(2))
    frozen.requires_grad_(False)
    norm = nn.BatchNorm2d(C)
    readers = [
        lambda y: frozen(y) + trained(y),
        lambda y: trained(y) + frozen(y),
        lambda y: frozen(y) * y,
        lambda y: y * y + frozen(y),
        lambda y: frozen(y[:2]) + frozen(F.max_pool2d(y, 3, 1, 1))[:2],
        lambda y: frozen(y) + norm(y),
        lambda y: trained((y + 1).sigmoid()) + frozen(y),
    ]
    leaf = torch.randn(4, C, SIZE, SIZE, requires_grad=True)
    for reader in readers:
        compare_and_measure_freed(lambda: reader(F.relu(leaf.cumsum(0))), [leaf, *trained.parameters()])  # noqa: B023


class Ends(nn.Module):
    """A block that ends with an activation."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, C, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv(self.norm(x)))


def test_an_activation_at_the_end_of_a_block():
    """The tensor that the activation saves becomes a mask when the next block reads the tensor's sizes."""
    before, after = compare_and_measure_kept(nn.Sequential(Ends(), chain(nn.Identity, depth=1)), images())
    assert after <= before - 4 * C * SIZE**2 * 4 * 7 // 8


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_infinities_and_nans(act):
    frozen, results = chain(nn.Identity, depth=1), []
    numbers = [0.0, -0.0, 1.0, -1.0, 6.0, 0.1, 0.25, -0.5, torch.inf, -torch.inf, torch.nan, 1e-40]
    x = torch.tensor(numbers).repeat(SIZE**2 * 4 // 3)
    for context in (torch.enable_grad, fastvit.recompute_scope):
        leaf = x.view(1, C, SIZE, SIZE).clone().requires_grad_()
        with context():
            y = frozen(ACTIVATIONS[act][0]()(leaf * 1))
        results.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0])
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


def test_a_frozen_linear_reads_its_input_in_forward_alone():
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).requires_grad_(False)
    x = torch.randn(37, 64, requires_grad=True)
    assert compare_and_measure_freed(lambda: layers(x * 1), [x]) >= 37 * 256 * 4 * 7 // 8


def test_the_input_of_a_frozen_batch_norm_is_kept_where_it_costs_less_than_the_output():
    """Concatenations are made of what is kept; each result of a BatchNorm would be a tensor of its own."""

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norms = nn.ModuleList(nn.BatchNorm2d(C * (i + 1)) for i in range(4))
            self.convs = nn.ModuleList(nn.Conv2d(C * (i + 1), C, 3, padding=1) for i in range(4))

        def forward(self, x):
            features = [x.sigmoid()]
            for norm, conv in zip(self.norms, self.convs, strict=True):
                features.append(conv(F.relu(norm(torch.cat(features, 1)))).sigmoid())
            return features[-1]

    eager, x = Dense().eval(), torch.randn(2, C, SIZE, SIZE)
    eager.norms.requires_grad_(False)
    before, after = compare_and_measure_kept(eager, x, call=lambda model: lambda x: model(x.requires_grad_()))
    assert after < 0.4 * before


def test_the_report_names_masks():
    model = fastvit.convert(Perceptual(chain(nn.ReLU)))
    assert "where an activation passes the gradient on" in str(fastvit.report(model, images()))
    assert not fastvit.verify(model, images()).skip


@pytest.mark.parametrize("size", [4096, 4099, 5000])
def test_a_boolean_mask_of_dropout_takes_bits(size):
    """torch.native_dropout is what dropout runs on CUDA; it saves its mask."""
    leaf = torch.ones(3, size, requires_grad=True)
    assert (
        compare_and_measure_freed(lambda: torch.native_dropout(leaf, 0.25, True)[0], [leaf])
        >= 3 * size * 7 // 8 - 8
    )


def test_products_of_frozen_weights():
    """Adapters in a frozen ViT: a frozen bias is neither saved nor in the graph."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.adapters = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
            self.blocks = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

        def forward(self, x):
            for adapter, block in zip(self.adapters, self.blocks, strict=True):
                x = block(x + adapter(x))
            return x

    eager, x = Adapted(), torch.randn(4, TOKENS, DIM)
    (before, some), (_, most) = (
        compare_and_measure_kept(eager, x, matmuls=products) for products in (False, True)
    )
    assert most < 0.6 * before and most < 0.8 * some
