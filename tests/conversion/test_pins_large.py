"""Large tensors that recipes read, and that something writes to in the forward or after it.

In the forward: eager's bits. After it, where eager's backward does not read the tensor: eager's bits, or an
error that names what keeps it, and no crash.
"""

import subprocess
import sys
from pathlib import Path

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
    assert_same_bits,
    extend_options_as_asked,
    list_gradients,
    make_step,
    make_tokens,
)
from conversion.test_pins import no_grad

# --- large tensors that are written to in the forward by what counts no version


def name_is_gone(m, x):
    h = m.norm(x)
    alias = h.data
    h = F.gelu(h)
    alias.zero_()
    return m.head(h)


def written_after_use(write):
    def function(m, x):
        h = m.norm(x)
        y = F.gelu(h)
        write(h)
        return m.head(y)

    return function


ALIASES = {
    "data whose tensor has no name": name_is_gone,
    "overload": written_after_use(lambda h: torch.ops.aten.mul_.Scalar(h.data, 0.0)),
    "overload of fill": written_after_use(lambda h: torch.ops.aten.fill_.Scalar(h.detach(), 0.5)),
    "dlpack": written_after_use(lambda h: torch.from_dlpack(h.detach()).zero_()),
    "storage": written_after_use(lambda h: h.untyped_storage().fill_(0)),
    "tensor of the storage": written_after_use(
        lambda h: torch.empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()).zero_()
    ),
    "view of data": written_after_use(lambda h: h.data[1:].view(-1)[::2].zero_()),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_what_an_alias_writes_in_the_forward(alias):
    def make():
        return FunctionModel(ALIASES[alias], norm=nn.LayerNorm(DIM), head=nn.Linear(DIM, DIM))

    assert_eager_bits(make_step(make, make_tokens()))


# --- large tensors that eager's backward does not read, written to after the forward


class Outputs(nn.Module):
    """Two results, and one of its intermediate tensors, which recipes of both may read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 8)

    def forward(self, x):
        h = self.a(x)
        w = h + 1
        return h, self.b(F.gelu(h)), self.c(w * w)


def free(h):
    h.untyped_storage().resize_(0)


AFTER = {
    "clamp_": no_grad(lambda h: h.clamp_(0, 1)),
    "detach": lambda h: h.detach().div_(2),
    "view": no_grad(lambda h: h[1:].zero_()),
    "foreach": no_grad(lambda h: torch._foreach_mul_([h], 2.0)),
}


def outputs(write):
    def run(convert):
        torch.manual_seed(0)
        model = convert(Outputs())
        h, _, y = model(make_tokens().flatten(0, 1))
        write(h)
        return list(torch.autograd.grad(y.sum(), list(model.c.parameters())))

    return run


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", AFTER)
def test_a_result_that_is_written_to_after_the_forward(write, level):
    assert_eager_bits_or_named_error(outputs(AFTER[write]), **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_a_result_whose_reader_is_not_in_the_loss(level):
    def function(m, x):
        y = m.a(m.norm(x))
        return y, y * m.w, m.head(F.gelu(y + m.c))

    def run(convert):
        torch.manual_seed(0)
        parts = {"norm": nn.LayerNorm(DIM), "a": nn.Linear(DIM, DIM), "head": nn.Linear(DIM, 3)}
        model = convert(
            FunctionModel(
                function, **parts, c=nn.Parameter(torch.randn(DIM)), w=nn.Parameter(torch.randn(DIM))
            )
        )
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
        h = m.a(x)
        y = h + 1
        return m.b(y * y) + WritesGradient.apply(h)

    step = make_step(
        lambda: FunctionModel(function, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM)), make_tokens()
    )
    assert_eager_bits_or_named_error(step, **LEVELS[level])


def free_a_result(level):
    """In a process of its own."""
    run, options = outputs(free), LEVELS[level]
    expected = run(lambda model: model)
    try:
        assert_same_bits(run(lambda model: fastvit.convert(model, **options)), expected)
    except RuntimeError as error:
        extend_options_as_asked(str(error), options)
    print("right")


@pytest.mark.parametrize("level", ["default", "products"])
def test_a_result_whose_memory_is_freed_after_the_forward(level):
    """An error or eager's bits, and no crash of the process."""
    code = f"import test_convert_pins_large as tests; tests.free_a_result({level!r})"
    folder, package = Path(__file__).parent, Path(fastvit.__file__).parents[1]
    code = f"import sys; sys.path[:0] = {[str(folder), str(package)]!r}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "right\n", (done.returncode, done.stderr[-2000:])
