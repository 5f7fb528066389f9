"""A model of one function, steps through it as it is and converted, and what an error must name."""

import contextlib
import re
from functools import partial

import pytest
import torch
from torch import nn

import fastvit
from fastvit.conversion.scope_hooks import add_scope_hooks
from fastvit.recompute import Policy, RecomputeLevel

D = 64  # features of a token
LEVELS = {"default": {}, "products": {"matmuls": True}, "least": {"budget": "least"}}
WRITTEN = "modified by an inplace operation"  # what autograd says of a saved tensor that was written to


def convert_at(level, model):
    """Converts at a level; `least` recomputes every op in each step, without the plan of a budget."""
    if level == "least":
        return add_scope_hooks(model, Policy(RecomputeLevel.EVERY_OP))
    return fastvit.convert(model, **LEVELS[level])


class Program(nn.Module):
    """Its forward is `function(self, x)`. Parts are modules, parameters and buffers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, (nn.Module, nn.Parameter)):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x):
        return self.function(self, x)


def tokens(n=8, length=16, dim=D):
    return torch.randn(n, length, dim, generator=torch.Generator().manual_seed(1))


def images(n=4, channels=3, size=16):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(2))


def make_step(make, x, context=contextlib.nullcontext, between=lambda model: None):
    """Returns a step through `make()`: its result and its gradients, for a function that converts models.

    `between(model)` runs after the forward and before the backward.
    """

    def run(convert):
        torch.manual_seed(0)
        model = convert(make())
        with context():
            y = model(x)
        between(model)
        (y.float() ** 2).sum().backward()
        return [y.detach(), *gradients(model)]

    return run


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def keep_as_it_is(model):
    return model


def same_bits(actual, expected):
    """Compares bytes, in which NaN is equal to itself."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(as_bytes(one), as_bytes(other)), f"by up to {(one - other).abs().max():.2g}"


def as_bytes(tensor):
    return tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8)


def assert_eager_bits(run, **options):
    """`run(convert)` returns tensors; with a model that is converted they have the same bits.

    Where autograd refuses the backward of the model as it is, it refuses that of the converted one.
    """
    try:
        expected = run(keep_as_it_is)
    except RuntimeError as error:
        assert WRITTEN in str(error)
        with pytest.raises(RuntimeError, match=WRITTEN):
            run(partial(fastvit.convert, **options))
    else:
        same_bits(run(partial(fastvit.convert, **options)), expected)


def assert_eager_bits_or_named_error(run, **options):
    """The same, or an error with what keeps the tensor, which has the same bits then.

    An error names an option that is set, or a pair of `skip`, and several pairs one after the other.
    """
    expected = run(keep_as_it_is)
    for _ in range(6):
        try:
            return same_bits(run(partial(fastvit.convert, **options)), expected)
        except RuntimeError as error:
            options = options_that_keep(str(error), options)
    pytest.fail("six errors, one after the other, do not name all that has to be kept")


def options_that_keep(message, options):
    """`options` as this error of a backward asks for."""
    if options.get("recompute_weight_casts") and "recompute_weight_casts" in message:
        return options | {"recompute_weight_casts": False}
    pair = re.search(r"""\(['"]([\w.]*)['"], ['"]([\w ]+)['"]\)""", message)
    assert "skip" in message and pair, f"the error names no pair of skip=: {message}"
    pairs = options.get("skip", [])
    assert pair.groups() not in pairs, f"what is skipped is rebuilt: {message}"
    return options | {"skip": [*pairs, pair.groups()]}
