"""A recipe reads a small operand as the op read it, whatever writes to the operand later: eager's bits.

Small operands are vectors: biases, weights of norms, running statistics, and autocast's casts of biases.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.cases import add_in_turn
from conversion.models import (
    DIM,
    LEVELS,
    WRITES,
    TokenModel,
    assert_eager_bits,
    list_gradients,
    make_autocast,
    make_images,
    make_step,
    make_tokens,
)

# Ops that read the vector `c`, and whose outputs other ops save.
USES = {
    "add": lambda m, h: h + m.c,
    "subtract": lambda m, h: h - m.c,
    "multiply": lambda m, h: h * m.c,
    "addcmul": lambda m, h: torch.addcmul(m.c, h, h, value=0.1),
    "concatenate": lambda m, h: torch.cat([h, m.c.expand_as(h)], 1),
    "bias of layer_norm": lambda m, h: F.layer_norm(h, (DIM,), m.w, m.c),
    "weight of layer_norm": lambda m, h: F.layer_norm(h, (DIM,), m.c, m.w),
    "weight of rms_norm": lambda m, h: F.rms_norm(h, (DIM,), m.c),
    "bias of group_norm": lambda m, h: F.group_norm(h.flatten(0, 1), 8, m.w, m.c),
    "weight of group_norm": lambda m, h: F.group_norm(h.flatten(0, 1), 8, m.c, m.w),
    "bias of batch_norm": lambda m, h: F.batch_norm(h.flatten(0, 1), None, None, m.w, m.c, True),
    "weight of batch_norm": lambda m, h: F.batch_norm(h.flatten(0, 1), None, None, m.c, m.w, True),
    "bias of instance_norm": lambda m, h: F.instance_norm(h.mT, None, None, m.w, m.c).mT,
    "bias of linear": lambda m, h: F.linear(h, m.first.weight, m.c),
}
PLACES = ["in the forward", "after the forward"]
KINDS = ["parameter", "buffer"]


def make_vector(kind):
    c = torch.randn(DIM, generator=torch.Generator().manual_seed(4)) + 2
    return c if kind == "buffer" else nn.Parameter(c)


def make_step_with_write(use, place, kind, write, context=None):
    """Returns a step of a model that uses a vector; a write to the vector follows."""

    def function(m, x):
        y = F.gelu(USES[use](m, m.first(x)))
        if place == "in the forward":
            WRITES[write](m.c)
        return m.head(y)

    def make():
        return TokenModel(function, c=make_vector(kind), w=nn.Parameter(torch.ones(DIM)))

    def write_after_forward(model):
        if place == "after the forward":
            WRITES[write](model.c)

    return make_step(make, make_tokens(), context, write_after_forward)


@pytest.mark.parametrize(
    ("place", "kind", "use", "write", "level"),
    add_in_turn(itertools.product(PLACES, KINDS, USES), WRITES, LEVELS),
)
def test_a_write_to_a_vector_leaves_eager_bits(place, kind, use, write, level):
    assert_eager_bits(make_step_with_write(use, place, kind, write), **LEVELS[level])


@pytest.mark.parametrize(
    ("place", "kind", "write"), add_in_turn(itertools.product(PLACES, KINDS), ["mul_", "data", "data"])
)
def test_a_write_to_a_bias_that_autocast_has_cast_leaves_eager_bits(place, kind, write):
    step = make_step_with_write("bias of linear", place, kind, write, make_autocast())
    assert_eager_bits(step, matmuls=True)


@pytest.mark.parametrize("write", ["mul_", "data"])
@pytest.mark.parametrize("grad", [True, False], ids=["with grad", "without grad"])
@pytest.mark.parametrize("level", LEVELS)
def test_later_ops_read_the_cast_of_a_bias_that_autocast_has_cached(level, grad, write):
    def function(m, x):
        with torch.set_grad_enabled(grad):
            y = F.linear(x, m.first.weight, m.c)
        WRITES[write](m.c)
        return m.head(F.gelu(F.linear(x, m.first.weight, m.c)) + y)

    def make():
        return TokenModel(function, c=make_vector("parameter"))

    assert_eager_bits(make_step(make, make_tokens(), make_autocast()), **LEVELS[level])


@pytest.mark.parametrize(
    ("write", "names"),
    [("data", ["weight"]), ("data is replaced", ["bias"]), ("numpy", ["weight", "bias"])],
    ids=["weight by data", "bias by new data", "both by numpy"],
)
def test_a_norm_whose_parameters_are_exchanged_without_a_version(write, names):
    """Optimizers that write to `.data` exchange weights so, and so do averages of weights."""

    def exchange(model):
        for name in names:
            WRITES[write](getattr(model[1], name))

    def make():
        return nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))

    assert_eager_bits(make_step(make, make_tokens(), between=exchange))


# --- running statistics

NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(16),
    "without affine": lambda: nn.BatchNorm2d(16, affine=False),
    "frozen": lambda: nn.BatchNorm2d(16).requires_grad_(False),
    "BatchNormAct": lambda: fastvit.BatchNormAct(16, activation="silu", memory="recompute"),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
    "BatchNorm1d": lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(16), nn.Unflatten(2, (14, 14))),
}


def run_in_training(model, x):
    return model.train()(2 * x + 1)


def run_after_training(model, x):
    with torch.no_grad():
        model.train()(2 * x + 1)
    return model.eval()(x)


def run_with_other_statistics(model, x):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data.mul_(3).add_(0.5)
    return model.eval()(x)


SECOND_PASSES = {
    "training": run_in_training,
    "after training": run_after_training,
    "other statistics": run_with_other_statistics,
}


@pytest.mark.parametrize(
    ("norm", "second_pass"),
    [*itertools.product(["BatchNorm2d"], SECOND_PASSES), *add_in_turn(zip([*NORMS][1:]), SECOND_PASSES)],
)
def test_a_second_pass_changes_the_statistics_before_the_backward_of_the_first(norm, second_pass):
    def run(convert):
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Conv2d(3, 16, 3), NORMS[norm](), nn.SiLU(), nn.Conv2d(16, 8, 3)))
        x = make_images()
        first = model.eval()(x)
        (first.mean() + SECOND_PASSES[second_pass](model, x).square().mean()).backward()
        return list_gradients(model)

    assert_eager_bits(run)
