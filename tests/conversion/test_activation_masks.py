"""A mask of an activation is the comparison of the activation's own backward, and obeys `skip`."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.cases import add_in_turn, select_each_value
from conversion.models import (
    FunctionModel,
    assert_eager_bits,
    leave_unconverted,
    make_autocast,
    make_images,
    make_step,
    make_tokens,
)
from conversion.vit_models import measure_kept_bytes

C = 32
DTYPES = ["bfloat16", "float16", "float32", "float64"]
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
# Layers whose backward reads only the sizes of their input.
READERS = {
    "max_pool": lambda: nn.MaxPool2d(2),
    "frozen conv": lambda: nn.Conv2d(C, C, 3).requires_grad_(False),
    "frozen linear": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(196, 196).requires_grad_(False)),
    "frozen norm": lambda: nn.BatchNorm2d(C).requires_grad_(False).eval(),
}


@pytest.mark.parametrize(
    ("reader", "memory", "dtype", "bounds"),
    add_in_turn(itertools.product(READERS, ["in place", "out of place"]), DTYPES, BOUNDS),
    ids=str,
)
def test_a_mask_serves_each_layer_that_reads_only_sizes(reader, memory, dtype, bounds):
    dtype = getattr(torch, dtype)

    def make():
        activation = nn.Hardtanh(*bounds, inplace=memory == "in place")
        return nn.Sequential(nn.Conv2d(3, C, 3), activation, READERS[reader]()).to(dtype)

    assert_eager_bits(make_step(make, make_images().to(dtype)))


@pytest.mark.parametrize(("dtype", "bounds"), [("bfloat16", BOUNDS[0]), ("float16", BOUNDS[1])], ids=str)
def test_a_mask_has_eager_bits_under_autocast(dtype, bounds):
    def make():
        return nn.Sequential(nn.Conv2d(3, C, 3), nn.Hardtanh(*bounds), nn.MaxPool2d(2), nn.Conv2d(C, 4, 1))

    assert_eager_bits(make_step(make, make_images(), make_autocast(getattr(torch, dtype))))


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


@pytest.mark.parametrize(
    ("activation", "numbers", "dtype", "bounds"),
    [
        *(("hardtanh", "no NaN", DTYPES[i % 4], BOUNDS[i % 8]) for i in range(8)),
        *(("hardtanh", "no NaN", DTYPES[(i + 2) % 4], BOUNDS[i % 8]) for i in range(8)),
        *add_in_turn(itertools.product(["hardtanh_"], ["no NaN"], DTYPES), BOUNDS),
        *add_in_turn(itertools.product(ACTIVATIONS, ["NaN"], ["bfloat16", "float32"]), BOUNDS),
    ],
    ids=str,
)
def test_numbers_beside_the_bounds_have_eager_gradients(activation, numbers, dtype, bounds):
    """The input has the bounds as the dtype has them, their neighbours, infinities, and ordinary numbers."""
    dtype = getattr(torch, dtype)
    edges = torch.tensor([*bounds, 0.0, 6.0], dtype=dtype)
    infinity = torch.tensor([torch.inf], dtype=dtype)
    near = [edges, torch.nextafter(edges, infinity), torch.nextafter(edges, -infinity)]
    others = torch.tensor([-0.0, 1e-5, torch.nan if numbers == "NaN" else 1e-4], dtype=dtype)
    values = torch.cat([*near, infinity, -infinity, others])
    x = values.repeat(C * 256 // len(values) + 1)[: C * 256].view(1, C, 16, 16)
    frozen = nn.Conv2d(C, C, 1).to(dtype).requires_grad_(False)

    def activate(m, x):
        return m.frozen(ACTIVATIONS[activation](x * 1, *bounds))

    def run(convert):
        leaf = x.clone().requires_grad_()
        y = convert(FunctionModel(activate, frozen=frozen))(leaf)
        return torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_eager_bits(run)


# --- skip

# Layers with a mask, and the ops that skip= may name for the mask.
SKIPS = {
    "relu": (lambda: nn.ReLU(), ["relu"]),
    "relu in place": (lambda: nn.ReLU(True), ["relu"]),
    "leaky_relu in place": (lambda: nn.LeakyReLU(0.1, True), ["leaky_relu"]),
    "hardtanh": (lambda: nn.Hardtanh(), ["hardtanh", "convolution"]),
    "leaky_relu": (lambda: nn.LeakyReLU(0.1), ["leaky_relu", "convolution"]),
}


def measure_kept_with_and_without_mask(make, x, ops):
    """Returns the kept bytes of the model, of its converted copy, and of a copy that skips `ops`."""
    skip = [("", op) for op in ops]
    conversions = leave_unconverted, fastvit.convert, lambda model: fastvit.convert(model, skip=skip)
    return [measure_kept_bytes(convert(make()), x) for convert in conversions]


@pytest.mark.parametrize("name", SKIPS)
def test_a_mask_that_is_skipped_is_not_made(name):
    make_activation, ops = SKIPS[name]

    def make():
        return nn.Sequential(nn.Conv2d(3, C, 3), make_activation(), nn.MaxPool2d(2))

    eager, masked, skipped = measure_kept_with_and_without_mask(make, make_images(), ops)
    assert masked < skipped <= eager
    assert_eager_bits(make_step(make, make_images()), skip=[("", op) for op in ops])


def test_a_mask_of_dropout_that_is_skipped_is_kept_whole():
    eager, masked, skipped = measure_kept_with_and_without_mask(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3)), make_tokens(), ["dropout", "mul"]
    )
    assert masked < eager == skipped


# --- writes after a mask was made, which autograd does not notice

UNNOTICED_WRITES = {
    "data": lambda y: y.data.clamp_(max=0.0),
    "numpy": lambda y: y.detach().numpy().fill(0.0),
    "data is replaced": lambda y: setattr(y, "data", y.data * 0),
    "foreach": lambda y: torch._foreach_mul_([y.data], 0.0),
}


@pytest.mark.parametrize(
    ("reader", "write"), select_each_value(["max_pool", "frozen conv"], UNNOTICED_WRITES)
)
def test_a_write_to_an_activation_after_its_mask_leaves_eager_bits(reader, write):
    """Eager's backward reads what was written, if it was written to the memory that eager has saved."""

    def function(m, x):
        y = torch.relu(m.first(x))
        z = m.reader(y)
        UNNOTICED_WRITES[write](y)
        return m.head(z)

    def make():
        parts = {"reader": READERS[reader](), "head": nn.Conv2d(C, 4, 1)}
        return FunctionModel(function, first=nn.Conv2d(3, C, 3), **parts)

    assert_eager_bits(make_step(make, make_images()))
