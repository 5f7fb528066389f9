"""A model whose forward is a function, writes to tensors, and comparisons with eager's bits."""

import contextlib
import re
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import fastvit
from fastvit.conversion.scope_hooks import add_scope_hooks
from fastvit.recompute import Policy, RecomputeLevel

DIM = 64  # features of a token
# The arguments of convert for each level of these tests.
LEVELS = {"default": {}, "products": {"matmuls": True}, "least": {"budget": "least"}}
IN_PLACE_ERROR = "modified by an inplace operation"  # in autograd's error if a saved tensor was written to


def convert_at(level, model):
    """Converts a model at a level of LEVELS. At `least` every op is recomputed, without a budget's plan."""
    if level == "least":
        return add_scope_hooks(model, Policy(RecomputeLevel.EVERY_OP))
    return fastvit.convert(model, **LEVELS[level])


def run_without_grad(write):
    """Returns `write` as a function that runs under `torch.no_grad()`."""

    def run(tensor):
        with torch.no_grad():
            write(tensor)

    return run


# Writes to a tensor. The first four raise the version counter.
WRITES = {
    "mul_": run_without_grad(lambda c: c.mul_(0.5)),
    "lerp_": run_without_grad(lambda c: c.lerp_(torch.ones_like(c), 0.7)),
    "foreach": run_without_grad(lambda c: torch._foreach_mul_([c], 0.5)),
    "out": run_without_grad(lambda c: torch.mul(c, 0.5, out=c)),
    "data": lambda c: c.data.mul_(0.5),
    "data is replaced": lambda c: setattr(c, "data", c.data * 0.5),
    "numpy": lambda c: numpy.multiply(c.detach().numpy(), 0.5, out=c.detach().numpy()),
    "overload": lambda c: torch.ops.aten.mul_.Scalar(c.data, 0.5),
}


class FunctionModel(nn.Module):
    """A model whose forward is `function(self, x)`; `attributes` are its modules, parameters and buffers."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, (nn.Module, nn.Parameter)):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


class TokenModel(FunctionModel):
    """A FunctionModel that also has a Linear `first`, a LayerNorm `norm` and a Linear `head`."""

    def __init__(self, function, **attributes):
        layers = {"first": nn.Linear(DIM, DIM), "norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, DIM)}
        super().__init__(function, **layers | attributes)


class WrappedNorm(nn.Module):
    """A module round a norm, as of norms by domain or by part of a batch."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.norm(x)


def make_tokens(n=8, length=16, dim=DIM):
    return torch.randn(n, length, dim, generator=make_generator(1))


def make_images(n=4, channels=3, size=16):
    return torch.randn(n, channels, size, size, generator=make_generator(2))


def make_generator(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def make_autocast(dtype=torch.bfloat16, **options):
    """Returns a function that makes contexts of autocast for the default device."""
    return lambda: torch.autocast(torch.get_default_device().type, dtype, **options)


def make_step(make, x, context=None, between=lambda model: None):
    """Returns a function `run(convert)`, which takes a step of the model `convert(make())`.

    `run` returns the output and the gradients. The forward runs in `context()`, if it is not None.
    `between(model)` is called between forward and backward.
    """
    context = context or contextlib.nullcontext

    def run(convert):
        torch.manual_seed(0)
        model = convert(make())
        with context():
            y = model(x)
        between(model)
        (y.float() ** 2).sum().backward()
        return [y.detach(), *list_gradients(model)]

    return run


def list_gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def leave_unconverted(model):
    return model


def assert_same_bits(actual, expected):
    """Raises unless the tensors have the same dtypes, shapes and bits. NaN must have the same bits, too."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert has_same_bits(a, b), f"{a.dtype} {a.shape} and {b.dtype} {b.shape} differ"


def has_same_bits(a, b):
    same_kind = a.dtype is b.dtype and a.shape == b.shape
    return same_kind and torch.equal(view_as_bytes(a), view_as_bytes(b))


def view_as_bytes(tensor):
    return tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8)


def assert_eager_bits(run, **options):
    """Raises unless `run(convert)` returns the same bits with and without conversion.

    If autograd refuses the backward of the original model, autograd must refuse that of the converted model.
    """
    try:
        expected = run(leave_unconverted)
    except RuntimeError as error:
        assert IN_PLACE_ERROR in str(error)
        with pytest.raises(RuntimeError, match=IN_PLACE_ERROR):
            run(partial(fastvit.convert, **options))
    else:
        assert_same_bits(run(partial(fastvit.convert, **options)), expected)


def assert_eager_bits_or_named_error(run, **options):
    """Raises unless `run(convert)` returns the same bits, perhaps with options that its errors name.

    An error names an option that is set, or one pair of `skip`. The next run has this option; at most five
    further runs may follow the first.
    """
    expected = run(leave_unconverted)
    for _ in range(6):
        try:
            return assert_same_bits(run(partial(fastvit.convert, **options)), expected)
        except RuntimeError as error:
            options = extend_options_as_asked(str(error), options)
    pytest.fail("six errors one after another do not name all tensors that must be kept")


def extend_options_as_asked(message, options):
    """Returns `options` with the change that the error message of a backward asks for."""
    if options.get("recompute_weight_casts") and "recompute_weight_casts" in message:
        return options | {"recompute_weight_casts": False}
    pair = re.search(r"""\(['"]([\w.]*)['"], ['"]([\w ]+)['"]\)""", message)
    assert "skip" in message and pair, f"the error names no pair of skip=: {message}"
    skip = options.get("skip", [])
    assert pair.groups() not in skip, f"a skipped tensor is recomputed: {message}"
    return options | {"skip": [*skip, pair.groups()]}
