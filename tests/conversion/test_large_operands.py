"""A recipe never reads a large operand that was written to: eager's bits, or an error that names the op.

A write in the forward leaves eager's bits. After the forward, if eager's backward does not read the tensor,
there are eager's bits or an error that names what keeps the tensor, and no crash.
"""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.cases import add_in_turn
from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    TokenModel,
    assert_eager_bits,
    assert_eager_bits_or_named_error,
    assert_same_bits,
    extend_options_as_asked,
    leave_unconverted,
    list_gradients,
    make_autocast,
    make_step,
    make_tokens,
    run_without_grad,
)

# --- writes in the forward that raise no version counter


def write_to_alias_of_dead_tensor(m, x):
    h = m.norm(x)
    alias = h.data
    h = F.gelu(h)
    alias.zero_()
    return m.head(h)


def write_after_use(write):
    def function(m, x):
        h = m.norm(x)
        y = F.gelu(h)
        write(h)
        return m.head(y)

    return function


WRITES_TO_ALIASES = {
    "data whose tensor has no name": write_to_alias_of_dead_tensor,
    "overload": write_after_use(lambda h: torch.ops.aten.mul_.Scalar(h.data, 0.0)),
    "overload of fill": write_after_use(lambda h: torch.ops.aten.fill_.Scalar(h.detach(), 0.5)),
    "dlpack": write_after_use(lambda h: torch.from_dlpack(h.detach()).zero_()),
    "storage": write_after_use(lambda h: h.untyped_storage().fill_(0)),
    "tensor of the storage": write_after_use(
        lambda h: torch.empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()).zero_()
    ),
    "view of data": write_after_use(lambda h: h.data[1:].view(-1)[::2].zero_()),
}


@pytest.mark.parametrize("alias", WRITES_TO_ALIASES)
def test_a_write_to_an_alias_in_the_forward_leaves_eager_bits(alias):
    assert_eager_bits(make_step(lambda: TokenModel(WRITES_TO_ALIASES[alias]), make_tokens()))


# --- writes after the forward to tensors that eager's backward does not read


class ThreeOutputs(nn.Module):
    """Returns two results, and an intermediate tensor that recipes of both may read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 8)

    def forward(self, x):
        h = self.a(x)
        w = h + 1
        return h, self.b(F.gelu(h)), self.c(w * w)


def make_step_with_write(write):
    def run(convert):
        torch.manual_seed(0)
        model = convert(ThreeOutputs())
        h, _, y = model(make_tokens().flatten(0, 1))
        write(h)
        return list(torch.autograd.grad(y.sum(), list(model.c.parameters())))

    return run


LATE_WRITES = {
    "clamp_": run_without_grad(lambda h: h.clamp_(0, 1)),
    "detach": lambda h: h.detach().div_(2),
    "view": run_without_grad(lambda h: h[1:].zero_()),
    "foreach": run_without_grad(lambda h: torch._foreach_mul_([h], 2.0)),
}


@pytest.mark.parametrize(("write", "level"), [*add_in_turn(zip(LATE_WRITES), LEVELS), ("detach", "default")])
def test_a_late_write_to_a_result_leaves_eager_bits_or_is_named(write, level):
    assert_eager_bits_or_named_error(make_step_with_write(LATE_WRITES[write]), **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_a_late_write_to_a_result_whose_reader_is_not_in_the_loss(level):
    def function(m, x):
        y = m.first(m.norm(x))
        return y, y * m.w, m.head(F.gelu(y + m.c))

    def run(convert):
        torch.manual_seed(0)
        vectors = {name: nn.Parameter(torch.randn(DIM)) for name in ("c", "w")}
        model = convert(TokenModel(function, **vectors))
        y, _product, t = model(make_tokens())
        y.detach().div_(2)
        t.sum().backward()
        return list_gradients(model)

    assert_eager_bits_or_named_error(run, **LEVELS[level])


class WritesGradient(torch.autograd.Function):
    """Its backward writes the gradient over what it has saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return x.copy_(s * (1 - s) * dy)


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_that_writes_over_what_it_saved(level):
    def function(m, x):
        h = m.first(x)
        y = h + 1
        return m.head(y * y) + WritesGradient.apply(h)

    step = make_step(lambda: TokenModel(function), make_tokens())
    assert_eager_bits_or_named_error(step, **LEVELS[level])


def run_step_with_freed_result(level):
    """Frees the memory of a result after the forward. Raises unless eager's bits or a named error follow."""
    run = make_step_with_write(lambda h: h.untyped_storage().resize_(0))
    expected = run(leave_unconverted)
    try:
        assert_same_bits(run(lambda model: fastvit.convert(model, **LEVELS[level])), expected)
    except RuntimeError as error:
        extend_options_as_asked(str(error), LEVELS[level])


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["default", "products"])
def test_a_result_that_is_freed_after_the_forward_crashes_no_process(level):
    process = multiprocessing.get_context("spawn").Process(target=run_step_with_freed_result, args=(level,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


# --- steps of optimizers between a forward and a backward that does not read what they change


def assert_eager_bits_at(level, run):
    """Raises unless the bits are eager's. At levels with matmuls an error may name tensors to keep."""
    compare = assert_eager_bits if level == "default" else assert_eager_bits_or_named_error
    compare(run, **LEVELS[level])


LAST_LAYERS = {"norm": lambda: nn.LayerNorm(DIM), "activation": nn.GELU}


@pytest.mark.parametrize("last", LAST_LAYERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_of_the_critic_after_a_step_of_the_generator(level, last):
    def run(convert):
        torch.manual_seed(0)
        layers = nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), LAST_LAYERS[last]()
        generator = convert(nn.Sequential(*layers))
        critic = convert(nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1)))
        score = critic(generator(make_tokens())).mean()
        (-score).backward(inputs=list(generator.parameters()), retain_graph=True)
        torch.optim.SGD(generator.parameters(), 0.1).step()
        score.backward(inputs=list(critic.parameters()))
        return list_gradients(critic)

    assert_eager_bits_at(level, run)


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_of_one_head_after_a_step_of_the_trunk(level):
    def make():
        trunk = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.GELU())
        heads = {"a": nn.Linear(DIM, 3), "b": nn.Linear(DIM, 3)}
        return FunctionModel(lambda m, x: (m.a(h := m.trunk(x)), m.b(h)), trunk=trunk, **heads)

    def run(convert):
        torch.manual_seed(0)
        model = convert(make())
        trunk, (first, second) = model.trunk, model(make_tokens())
        first.square().sum().backward(inputs=list(trunk.parameters()), retain_graph=True)
        torch.optim.Adam(trunk.parameters(), 0.1).step()
        second.square().sum().backward(inputs=list(model.b.parameters()))
        return list_gradients(model)

    assert_eager_bits_at(level, run)


@pytest.mark.parametrize("place", ["in the forward", "after the forward"])
def test_a_write_to_a_weight_whose_cast_is_recomputed(place):
    def write(model):
        with torch.no_grad():
            model.head.weight.mul_(0.5)

    def function(m, x):
        y = m.head(F.gelu(m.first(x)))
        if place == "in the forward":
            write(m)
        return y

    arguments = lambda: TokenModel(function), make_tokens(), make_autocast(cache_enabled=False)
    if place == "in the forward":
        assert_eager_bits(make_step(*arguments), recompute_weight_casts=True)
    else:
        step = make_step(*arguments, between=write)
        assert_eager_bits_or_named_error(step, recompute_weight_casts=True)
