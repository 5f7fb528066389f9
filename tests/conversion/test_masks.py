"""A mask is the comparison of the activation's own backward, in its arithmetic, and obeys a policy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.models import FunctionModel, assert_eager_bits, make_images, make_step, make_tokens
from conversion.vit_models import measure_kept_bytes

C = 32
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BOUNDS = [
    (-0.7, 0.7),
    (-0.1, 0.1),
    (-1.0, 1.0),
    (0.0, 6.0),
    (0.1, 0.3),
    (-1e-3, 3.3),
    (-6e4, 1e-7),
    (0.3, 3e4),
]
READERS = {  # ops that read sizes of their input alone in backward
    "max_pool": lambda: nn.MaxPool2d(2),
    "frozen conv": lambda: nn.Conv2d(C, C, 3).requires_grad_(False),
    "frozen linear": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(196, 196).requires_grad_(False)),
    "frozen norm": lambda: nn.BatchNorm2d(C).requires_grad_(False).eval(),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_in_every_dtype(dtype, bounds, reader, inplace):
    def make():
        return nn.Sequential(nn.Conv2d(3, C, 3), nn.Hardtanh(*bounds, inplace), READERS[reader]()).to(dtype)

    assert_eager_bits(make_step(make, make_images().to(dtype)))


@pytest.mark.parametrize("bounds", BOUNDS[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_bounds_under_autocast(dtype, bounds):
    def make():
        return nn.Sequential(nn.Conv2d(3, C, 3), nn.Hardtanh(*bounds), nn.MaxPool2d(2), nn.Conv2d(C, 4, 1))

    assert_eager_bits(make_step(make, make_images(), lambda: torch.autocast("cpu", dtype)))


ACTIVATIONS = {
    "hardtanh": lambda x, low, high: F.hardtanh(x, low, high),
    "hardtanh_": lambda x, low, high: F.hardtanh_(x, low, high),
    "relu6": lambda x, low, high: F.relu6(x),
    "relu": lambda x, low, high: F.relu(x),
    "leaky_relu": lambda x, low, high: F.leaky_relu(x, 0.3),
    "leaky_relu_": lambda x, low, high: F.leaky_relu_(x, 0.3),
    "clamp": lambda x, low, high: x.clamp(low, high),
    "threshold": lambda x, low, high: F.threshold(x, low, high),
}


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_beside_the_bounds(dtype, activation, bounds):
    """The bounds as the dtype has them, their neighbours, infinities and NaN, each among ordinary numbers."""
    edges = torch.tensor([*bounds, 0.0, 6.0], dtype=dtype)
    ends = torch.tensor([torch.inf], dtype=dtype)
    near = [edges, torch.nextafter(edges, ends), torch.nextafter(edges, -ends)]
    numbers = torch.cat([*near, ends, -ends, torch.tensor([-0.0, torch.nan, 1e-5], dtype=dtype)])
    x = numbers.repeat(C * 256 // len(numbers) + 1)[: C * 256].view(1, C, 16, 16)
    frozen = nn.Conv2d(C, C, 1).to(dtype).requires_grad_(False)

    def run(convert):
        leaf = x.clone().requires_grad_()
        model = convert(
            FunctionModel(lambda m, x: m.frozen(ACTIVATIONS[activation](x * 1, *bounds)), frozen=frozen)
        )
        y = model(leaf)
        return torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_eager_bits(run)


# --- policies

SKIPS = {  # an activation, and the ops that skip= may name for its mask
    "relu": (lambda: nn.ReLU(), ["relu"]),
    "relu in place": (lambda: nn.ReLU(True), ["relu"]),
    "leaky_relu in place": (lambda: nn.LeakyReLU(0.1, True), ["leaky_relu"]),
    "hardtanh": (lambda: nn.Hardtanh(), ["hardtanh", "convolution"]),
    "leaky_relu": (lambda: nn.LeakyReLU(0.1), ["leaky_relu", "convolution"]),
}


@pytest.mark.parametrize("name", SKIPS)
def test_a_mask_that_is_skipped(name):
    activation, ops = SKIPS[name]
    make = lambda: nn.Sequential(nn.Conv2d(3, C, 3), activation(), nn.MaxPool2d(2))  # noqa: E731
    before, masked, skipped = (
        measure_kept_bytes(convert(make()), make_images())
        for convert in (
            lambda model: model,
            fastvit.convert,
            lambda model: fastvit.convert(model, skip=[("", op) for op in ops]),
        )
    )
    assert masked < skipped <= before
    assert_eager_bits(make_step(make, make_images()), skip=[("", op) for op in ops])


def test_a_mask_of_dropout_that_is_skipped():
    make = lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3))  # noqa: E731
    before, masked, skipped = (
        measure_kept_bytes(convert(make()), make_tokens())
        for convert in (
            lambda model: model,
            fastvit.convert,
            lambda model: fastvit.convert(model, skip=[("", "dropout"), ("", "mul")]),
        )
    )
    assert masked < before == skipped


# --- writes after a mask was made, which autograd does not notice


@pytest.mark.parametrize("reader", ["max_pool", "frozen conv"])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.data.clamp_(max=0.0),
        lambda y: y.detach().numpy().fill(0.0),
        lambda y: setattr(y, "data", y.data * 0),
        lambda y: torch._foreach_mul_([y.data], 0.0),
    ],
    ids=["data", "numpy", "data is replaced", "foreach"],
)
def test_an_activation_that_is_written_to_after_its_mask(write, reader):
    """Eager's backward reads what was written, where that is the memory that it has saved."""

    def function(m, x):
        y = torch.relu(m.first(x))
        z = m.reader(y)
        write(y)
        return m.head(z)

    def make():
        parts = {"reader": READERS[reader](), "head": nn.Conv2d(C, 4, 1)}
        return FunctionModel(function, first=nn.Conv2d(3, C, 3), **parts)

    assert_eager_bits(make_step(make, make_images()))
