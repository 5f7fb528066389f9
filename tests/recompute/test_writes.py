"""Code that writes and that a scope cannot see through: eager's bits, or a tensor that is kept."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit import recompute_scope
from fastvit.recompute import active_scope
from recompute.models import SavesItsOutput, compare_and_measure_freed
from recompute.writes import (
    COLUMNS,
    ROWS,
    SCOPES,
    WRITES,
    Rotated,
    assert_eager_gradients,
    make_leaves,
)

MAKES = {
    "product": lambda a, b, c: a * c,
    "sum": lambda a, b, c: a.sin() + c,
    "gelu": lambda a, b, c: F.gelu(a),
    "matrix product": lambda a, b, c: F.linear(a, torch.ones(COLUMNS, COLUMNS)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_saving_leaves_eager_gradients(write):
    for make in MAKES.values():

        def function(a, b, c, w, make=make):
            h = make(a, b, c)
            WRITES[write](h, b)
            return torch.relu(h) @ w + (h @ w).tanh() + torch.sigmoid(h) @ w

        assert_eager_gradients(function)


@pytest.mark.parametrize("write", ["silu", "mul_", "mul_ by a number", "abs_, pow_"])
def test_a_result_that_an_op_in_place_made_is_recomputed(write):
    """The second write starts from a tensor that was written to."""
    a, b, c, w = leaves = make_leaves()

    def forward():
        h = a * c
        WRITES[write](h, b)
        WRITES["mul_ by a number"](h, b)
        return h @ w

    assert compare_and_measure_freed(forward, leaves) >= a.nbytes


@pytest.mark.parametrize("write", ["data", "out, data", "out of addmm, data", "two results", "foreach, data"])
def test_a_write_that_autograd_does_not_notice_reaches_what_was_saved(write):
    def function(a, b, c, w):
        h = F.gelu(a)
        y, z, u = h @ w, h.sin(), F.gelu(h.neg())
        WRITES[write](h, b)
        return y + torch.relu(h) @ w + z @ w + u @ w

    assert_eager_gradients(function)


def test_a_tensor_after_an_untracked_write_may_be_written_again():
    """Such a tensor is no operand of a recipe."""
    conv, leaf = nn.Conv2d(4, 4, 1), torch.randn(8, 4, 12, 12, requires_grad=True)

    def forward():
        x = leaf * 1
        x.detach().mul_(1.5)
        y = x * x
        x.data.clamp_(-1, 1)
        return conv(y)

    compare_and_measure_freed(forward, [leaf, conv.weight])


class MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class SavesInputsAndOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y, x * y)
        return x * y

    @staticmethod
    def backward(ctx, dy):
        x, y, z = ctx.saved_tensors
        return dy * y + z * 0, dy * x


def attend(a, b, c, w):
    q, k, v = (t.view(2, 16, 4, 32).transpose(1, 2) for t in (F.gelu(a), b * c, torch.tanh(c)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape) @ w


@torch.jit.script
def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def make_unused_branch(write, read):
    """Returns a program in which ops that have no part in the loss save h, which is then written to."""

    def program(a, b, c, w):
        h = a @ w
        h.sin(), F.gelu(h)
        y = read(h)
        write(h)
        return y @ w

    return program


def save_unused_slice(a, b, c, w):
    """An op that has no part in the loss saves a slice of h, which a recipe takes as a whole."""
    h = a @ w
    unused = h[:, 8:].sin()
    y = h.neg() @ w
    h.zero_()
    return y + 0 * unused.detach().sum()


def differentiate_inside(a, b, c, w):
    energy = F.gelu(a * c).sum()
    (force,) = torch.autograd.grad(energy, a, create_graph=True)
    return force @ w


def disable_hooks(a, b, c, w):
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return F.gelu(a * c) @ w


def save_on_cpu(a, b, c, w):
    with torch.autograd.graph.save_on_cpu():
        return (F.silu(F.gelu(a)) * c) @ w


def transform(transformation):
    """Returns a program with a transformation of torch.func, applied to a function of one sum."""
    derivative = transformation(lambda t: torch.sin(t).pow(2).sum())
    return lambda a, b, c, w: (F.gelu(a) * c + derivative(F.gelu(c))) @ w


def make_sparse_leaf():
    return torch.eye(COLUMNS).to_sparse().requires_grad_()


PROGRAMS = {
    "a Function that writes": lambda a, b, c, w: Rotated.apply(F.gelu(a)) @ w,
    "a part of what a Function wrote": lambda a, b, c, w: (
        Rotated.apply((a.sin() @ w).view(ROWS, 2, -1)).unbind(1)[0].tanh() @ w[: COLUMNS // 2]
    ),
    "a Function that marks": lambda a, b, c, w: torch.relu(MarksDirty.apply(F.gelu(a) * 1.0)) @ w,
    "a Function that saves its result": lambda a, b, c, w: SavesInputsAndOutput.apply(F.gelu(a), b * c) @ w,
    "attention": attend,
    "a half written by a float": lambda a, b, c, w: torch.relu((a.bfloat16() * 1.5).mul_(c[0])).float() @ w,
    "a half plus a float": lambda a, b, c, w: torch.tanh((a.half() * 1.0).add_(b.exp())).float() @ w,
    "a float over a double": lambda a, b, c, w: torch.sigmoid((a * 1.5).div_(b.double().exp())) @ w,
    "a part of a copy of a slice": lambda a, b, c, w: a.exp()[4:].clone()[6:] @ w,
    "a copy of a slice": lambda a, b, c, w: a.exp()[4:].to(torch.float32, copy=True)[6:] @ w,
    "slices of TorchScript": lambda a, b, c, w: (rotate_half(F.gelu(a)) * a) @ w,
    "unused, then in place": make_unused_branch(lambda h: None, lambda h: F.silu(h, inplace=True)),
    "unused, then written": make_unused_branch(lambda h: h.add_(1), torch.relu),
    "unused, then zeroed": make_unused_branch(lambda h: h.zero_(), lambda h: torch.relu(h) * 2.0),
    "unused slice, then zeroed": save_unused_slice,
    "a gradient inside": differentiate_inside,
    "hooks disabled": disable_hooks,
    "func.grad": transform(torch.func.grad),
    "func.jacrev": transform(lambda f: torch.func.vmap(torch.func.jacrev(f))),
    "func.vjp": lambda a, b, c, w: (F.gelu(a) * torch.func.vjp(torch.sin, F.gelu(c))[1](b)[0]) @ w,
    "func.jvp": lambda a, b, c, w: (F.gelu(a) * torch.func.jvp(torch.sin, (F.gelu(c),), (b,))[1]) @ w,
    "vmap": lambda a, b, c, w: torch.vmap(lambda t: torch.tanh(t @ w))(F.gelu(a)) @ w,
    "cond": lambda a, b, c, w: torch.cond(a.sum() > 0, torch.sin, torch.cos, (F.gelu(a),)) @ w,
    "checkpoint": lambda a, b, c, w: checkpoint(lambda t: F.gelu(t @ w), F.silu(a), use_reentrant=False) @ w,
    "hooks inside": save_on_cpu,
    "a sum of sparse leaves": lambda a, b, c, w: ((t := make_sparse_leaf()) + t).to_dense().sum() * a,
    "sparse leaves in a row": lambda a, b, c, w: torch.cat([t := make_sparse_leaf(), t]).to_dense().sum() * a,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_uncommon_code_in_a_scope_leaves_eager_gradients(program):
    torch._dynamo.reset()
    assert_eager_gradients(PROGRAMS[program])


def test_disabled_hooks_are_told_of_once():
    x = torch.randn(64, 64).requires_grad_()
    with torch.autograd.graph.disable_saved_tensors_hooks("none of them here"):
        with pytest.warns(UserWarning, match="hooks are disabled: none of them here"), recompute_scope():
            F.gelu(x).sum().backward()


@pytest.mark.parametrize("is_view", [False, True], ids=["tensor", "view"])
@pytest.mark.parametrize("op", ["gelu", "mm", "relu of mm"])
def test_a_backward_reads_data_that_replaced_the_saved(op, is_view):
    """An op saved the tensor as an input before."""
    make = {"gelu": lambda a, w: F.gelu(a), "mm": torch.mm, "relu of mm": lambda a, w: torch.relu(a @ w)}[op]

    def function(a, b, c, w):
        h = make(a, w)
        if is_view:
            h = h.view(COLUMNS, ROWS).view(ROWS, COLUMNS)
        y = h @ w
        h.data = torch.ones_like(h)
        return y + h @ w

    assert_eager_gradients(function)


def replace_data_of_other_views(a, b, c, w):
    """The views have the shape of the view that an op has saved, and may have its address."""
    h = F.gelu(a)
    y = h.view(COLUMNS, ROWS).view(ROWS, COLUMNS) @ w
    for _ in range(4):
        view = h.view(COLUMNS, ROWS).view(ROWS, COLUMNS)
        view.data = torch.ones_like(view)
    return y


def replace_data_of_an_output(a, b, c, w):
    h = SavesItsOutput.apply(a)
    y = h @ w
    h.data = torch.ones_like(h)
    return y


def replace_data_after_a_backward(a, b, c, w):
    h = SavesItsOutput.apply(a.detach().requires_grad_())
    y, z = h @ w, F.gelu(h)
    y.sum().backward()
    w.grad = None
    h.data = torch.ones_like(h)
    return z.detach() * w[:ROWS]


def write_to_a_number(write):
    def function(a, b, c, w):
        s = (a * b).mean()
        y = F.gelu(w * s)
        write(s)
        return y

    return function


def enter_inner_scope():
    """Returns a scope inside of a scope, and no context outside. Its end plans what its ops have saved."""
    return recompute_scope() if active_scope() else contextlib.nullcontext()


def write_to_a_large_leaf(write):
    def function(a, b, c, w):
        with enter_inner_scope():
            y = F.gelu(a + b).sum(0) @ c.mT
        write(b.detach())
        return y

    return function


LATE_WRITES = {
    "data of other views": replace_data_of_other_views,
    "data of an output": replace_data_of_an_output,
    "data after a backward": replace_data_after_a_backward,
    "a number by data": write_to_a_number(lambda s: s.data.mul_(2)),
    "a number by NumPy": write_to_a_number(lambda s: s.detach().numpy().fill(3)),
    "a number is filled": write_to_a_number(lambda s: s.data.fill_(0.3)),
    "a large leaf by DLPack": write_to_a_large_leaf(lambda b: torch.from_dlpack(b).mul_(2)),
    "a large leaf by NumPy": write_to_a_large_leaf(lambda b: b.numpy().fill(1)),
}


@pytest.mark.parametrize("name", LATE_WRITES)
def test_a_write_after_saving_leaves_eager_gradients(name):
    assert_eager_gradients(LATE_WRITES[name])


@pytest.mark.parametrize("write", ["storage", "NumPy"])
@pytest.mark.parametrize("op", ["gelu", "mm"])
def test_memory_that_is_written_to_after_the_plan_is_refused_if_a_recipe_reads_it(op, write):
    """A recipe reads the product, which is kept."""

    def function(a, b, c, w):
        with enter_inner_scope():
            h = torch.mm(a, w) if op == "mm" else F.gelu(a)
            y = F.gelu(F.layer_norm(h, (COLUMNS,), b[0], c[0])) @ w
        h.untyped_storage().fill_(0) if write == "storage" else h.detach().numpy().fill(0)
        return y

    error = pytest.raises(RuntimeError, match="written to by NumPy")
    with error if op == "mm" else contextlib.nullcontext():
        assert_eager_gradients(function, ["scope"])


@pytest.mark.parametrize("write", ["data", "detach"])
def test_a_write_after_outer_hooks_have_copied_leaves_eager_gradients(write):
    def function(a, b, c, w):
        h = torch.relu(a * b)
        y = F.max_pool2d(h.view(1, 4, ROWS, ROWS), 3)
        h.data.clamp_(max=0.0) if write == "data" else h.detach().mul_(0.5)
        return y.sum() + c

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        assert_eager_gradients(function)


class SkippedNorm(nn.LayerNorm):
    """Returns its input: the result of another norm."""

    def forward(self, x):
        return x


def test_a_recipe_takes_eps_from_the_call(monkeypatch):
    norm, skipped = nn.LayerNorm(COLUMNS, eps=1e-2), SkippedNorm(COLUMNS, eps=1e-6)
    for eps in (1e-2, 1e-4):
        norm.eps = eps
        assert_eager_gradients(lambda a, b, c, w: skipped(norm(a * 0.01)) @ w)
    layer_norm = F.layer_norm
    patched = lambda x, shape, weight, bias, eps: layer_norm(x, shape, weight, bias, 0.5)  # noqa: E731
    monkeypatch.setattr(F, "layer_norm", patched)
    assert_eager_gradients(lambda a, b, c, w: norm(a * 0.01) @ w)


@pytest.mark.parametrize("pattern", ["chain", "doubling", "recurrence"])
@pytest.mark.timeout(20)
def test_long_chains_take_no_longer_than_they_are(pattern):
    """Recipes have a bounded number of ops, or the walk over them would take exponential time."""
    x = torch.randn(64, 64).requires_grad_()
    with recompute_scope(matmuls=True):
        a, b, total = x * 1.0, x.sin(), 0.0
        for _ in range(300 if pattern == "chain" else 40):
            if pattern == "chain":
                a = a * 0.999
            elif pattern == "doubling":
                a = (a + a) * 0.5
            else:
                a, b = (a * 0.6 + b * 0.4) * 1.01, a
            total = total + torch.sigmoid(a.t().reshape(-1)).sum()
    total.backward()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_linear_that_adds_its_bias_in_place_is_an_operand(scope):
    """A Linear does so for tokens of other strides."""
    linear, leaf = nn.Linear(ROWS, ROWS), torch.randn(4, ROWS, COLUMNS, requires_grad=True)

    def forward():
        y = linear((leaf * 1).mT)
        assert y._version == 1
        return F.gelu(y) @ torch.ones(ROWS, ROWS, requires_grad=True)

    assert compare_and_measure_freed(forward, [leaf, *linear.parameters()], SCOPES[scope]) >= leaf.nbytes
