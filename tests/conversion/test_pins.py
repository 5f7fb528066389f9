"""A recipe reads what the op read, whoever writes to it later: eager's bits, or an error that names the op.

Small operands (a bias, a weight of a norm, running statistics) are as they were when the op ran. A large one
that eager's backward does not read, and that was written to after the forward, may be an error.
"""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    assert_eager_bits,
    assert_eager_bits_or_named_error,
    list_gradients,
    make_images,
    make_step,
    make_tokens,
)

# --- small operands: parameters, frozen biases and buffers, in the forward and after it

USES = {  # of the vector `c`, by ops whose results other ops save
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


def no_grad(write):
    def run(c):
        with torch.no_grad():
            write(c)

    return run


WRITES = {
    "mul_": no_grad(lambda c: c.mul_(0.5)),
    "lerp_": no_grad(lambda c: c.lerp_(torch.ones_like(c), 0.7)),
    "foreach": no_grad(lambda c: torch._foreach_mul_([c], 0.5)),
    "out": no_grad(lambda c: torch.mul(c, 0.5, out=c)),
    "data": lambda c: c.data.mul_(0.5),
    "data is replaced": lambda c: setattr(c, "data", c.data * 0.5),
    "numpy": lambda c: numpy.multiply(c.detach().numpy(), 0.5, out=c.detach().numpy()),
    "overload": lambda c: torch.ops.aten.mul_.Scalar(c.data, 0.5),
}
PLACES = ["in the forward", "after the forward"]


def vector(frozen):
    c = torch.randn(DIM, generator=torch.Generator().manual_seed(4)) + 2
    return c if frozen else nn.Parameter(c)


def program_of(use, write, place, frozen):
    """A model that uses a vector, and what runs after its forward."""

    def function(m, x):
        y = F.gelu(USES[use](m, m.first(x)))
        if place == "in the forward":
            WRITES[write](m.c)
        return m.head(y)

    def make():
        return FunctionModel(
            function,
            first=nn.Linear(DIM, DIM),
            head=nn.Linear(DIM, 3),
            c=vector(frozen),
            w=nn.Parameter(torch.ones(DIM)),
        )

    return make, (lambda model: WRITES[write](model.c) if place == "after the forward" else None)


@pytest.mark.parametrize("frozen", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", USES)
def test_a_small_operand_is_as_its_op_read_it(use, write, place, frozen):
    make, between = program_of(use, write, place, frozen)
    assert_eager_bits(make_step(make, make_tokens(), between=between), matmuls=use == "bias of linear")


@pytest.mark.parametrize("frozen", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", ["mul_", "data"])
def test_the_cast_of_a_bias_is_of_the_bias_that_the_op_read(write, place, frozen):
    make, between = program_of("bias of linear", write, place, frozen)
    step = make_step(make, make_tokens(), lambda: torch.autocast("cpu", torch.bfloat16), between)
    assert_eager_bits(step, matmuls=True)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", ["mul_", "data"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_cast_of_a_bias_is_of_an_earlier_op(level, write, grad):
    """Autocast casts a bias once, and later ops read that cast."""

    def function(m, x):
        with torch.set_grad_enabled(grad):
            y = F.linear(x, m.first.weight, m.c)
        WRITES[write](m.c)
        return m.head(F.gelu(F.linear(x, m.first.weight, m.c)) + y)

    def make():
        return FunctionModel(function, first=nn.Linear(DIM, DIM), head=nn.Linear(DIM, 3), c=vector(False))

    step = make_step(make, make_tokens(), lambda: torch.autocast("cpu", torch.bfloat16))
    assert_eager_bits(step, **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_a_running_centre(level):
    """A parameter that each forward moves, after its use."""

    def function(m, x):
        h = m.norm(x)
        y = F.gelu(h - m.centre)
        with torch.no_grad():
            m.centre.lerp_(h.mean((0, 1)), 0.1)
        return m.head(y)

    def make():
        centre = nn.Parameter(torch.ones(DIM))
        return FunctionModel(function, norm=nn.LayerNorm(DIM), centre=centre, head=nn.Linear(DIM, DIM))

    assert_eager_bits(make_step(make, make_tokens()), **LEVELS[level])


# --- running statistics

NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(16),
    "without affine": lambda: nn.BatchNorm2d(16, affine=False),
    "frozen": lambda: nn.BatchNorm2d(16).requires_grad_(False),
    "BatchNormAct": lambda: fastvit.BatchNormAct(16, activation="silu", memory="recompute"),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
    "BatchNorm1d": lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(16), nn.Unflatten(2, (14, 14))),
}


def in_training(model, x):
    return model.train()(2 * x + 1)


def refreshed(model, x):
    with torch.no_grad():
        model.train()(2 * x + 1)
    return model.eval()(x)


def other_domain(model, x):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data.mul_(3).add_(0.5)
    return model.eval()(x)


@pytest.mark.parametrize("second", [in_training, refreshed, other_domain])
@pytest.mark.parametrize("norm", NORMS)
def test_running_statistics_are_those_of_the_pass(norm, second):
    """A pass in evaluation, and another that changes them, before one backward."""

    def run(convert):
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Conv2d(3, 16, 3), NORMS[norm](), nn.SiLU(), nn.Conv2d(16, 8, 3)))
        x = make_images()
        first = model.eval()(x)
        (first.mean() + second(model, x).square().mean()).backward()
        return list_gradients(model)

    assert_eager_bits(run)


# --- steps of optimizers between a forward and a backward that does not read what they change


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("last", [lambda: nn.LayerNorm(DIM), nn.GELU], ids=["norm", "activation"])
def test_a_critic_after_a_step_of_the_generator(last, level):
    def run(convert):
        torch.manual_seed(0)
        generator = convert(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), last())
        )
        critic = convert(nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1)))
        score = critic(generator(make_tokens())).mean()
        (-score).backward(inputs=list(generator.parameters()), retain_graph=True)
        torch.optim.SGD(generator.parameters(), 0.1).step()
        score.backward(inputs=list(critic.parameters()))
        return list_gradients(critic)

    (assert_eager_bits if level == "default" else assert_eager_bits_or_named_error)(run, **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_a_head_after_a_step_of_the_trunk(level):
    """Two losses, the second of which has its gradients in a head alone."""

    def run(convert):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.GELU())
        model = convert(
            FunctionModel(
                lambda m, x: (m.a(h := m.trunk(x)), m.b(h)),
                trunk=trunk,
                a=nn.Linear(DIM, 3),
                b=nn.Linear(DIM, 3),
            )
        )
        first, second = model(make_tokens())
        first.square().sum().backward(inputs=list(trunk.parameters()), retain_graph=True)
        torch.optim.Adam(trunk.parameters(), 0.1).step()
        second.square().sum().backward(inputs=list(model.b.parameters()))
        return list_gradients(model)

    (assert_eager_bits if level == "default" else assert_eager_bits_or_named_error)(run, **LEVELS[level])


@pytest.mark.parametrize(
    "weights", [lambda m: [m[1].weight], lambda m: [m[1].bias], lambda m: m[1].parameters()]
)
@pytest.mark.parametrize("write", ["data", "data is replaced", "numpy"])
def test_a_norm_whose_weights_are_exchanged_without_a_version(write, weights):
    """Optimizers that write to `.data` exchange weights so, and so do averages of weights."""
    between = lambda m: [WRITES[write](one) for one in weights(m)]  # noqa: E731
    assert_eager_bits(
        make_step(
            lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)),
            make_tokens(),
            between=between,
        )
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_that_is_cast_again(place):
    def write(model):
        with torch.no_grad():
            model.b.weight.mul_(0.5)

    def function(m, x):
        y = m.b(F.gelu(m.a(x)))
        if place == "in the forward":
            write(m)
        return y

    step = make_step(
        lambda: FunctionModel(function, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM)),
        make_tokens(),
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        write if place == "after the forward" else lambda model: None,
    )
    (assert_eager_bits if place == "in the forward" else assert_eager_bits_or_named_error)(
        step, recompute_weight_casts=True
    )
