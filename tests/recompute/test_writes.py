"""Code that writes, casts, and calls what a scope cannot see: eager's bits, or a tensor that is kept."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit import recompute_scope
from recompute.models import assert_same_bits, compare_and_measure_freed

B, D = 32, 128
SCOPES = {"scope": recompute_scope, "products": lambda: recompute_scope(matmuls=True)}


def leaves():
    torch.manual_seed(0)
    return [torch.randn(B, D).requires_grad_() for _ in range(3)] + [torch.randn(D, D).requires_grad_()]


def same_as_eager(function, scope, measures=False):
    """`function(a, b, c, w)` returns a tensor; three leaves of B x D and a D x D one."""
    given = leaves()
    return compare_and_measure_freed(lambda: function(*given), given, SCOPES[scope], measures)


def no_grad(write):
    def run(h, b):
        with torch.no_grad():
            write(h, b)

    return run


WRITES = {  # of a tensor that is made and not saved, before an op whose result is saved
    "add_": lambda h, b: h.add_(b),
    "add_ with alpha": lambda h, b: h.add_(b, alpha=0.3),
    "mul_": lambda h, b: h.mul_(b),
    "mul_ by a number": lambda h, b: h.mul_(0.3),
    "div_": lambda h, b: h.div_(b),
    "relu_": lambda h, b: h.relu_(),
    "relu_ by functional": lambda h, b: F.relu(h, inplace=True),
    "silu": lambda h, b: F.silu(h, inplace=True),
    "hardtanh_": lambda h, b: F.hardtanh_(h),
    "celu_": lambda h, b: F.celu_(h),
    "abs_, pow_": lambda h, b: h.abs_().pow_(1.5),
    "masked_fill_": lambda h, b: h.masked_fill_(b > 1, 0.0),
    "item": lambda h, b: h.__setitem__(b > 1, 3.0),
    "slice": lambda h, b: h.__setitem__((slice(None), slice(0, 5)), b[:, :5]),
    "copy_": lambda h, b: h.copy_(b),
    "zero_": lambda h, b: h.zero_(),
    "view": lambda h, b: h.view(-1).mul_(2),
    "strided view": lambda h, b: h[:, ::2].mul_(2),
    "addcmul_": lambda h, b: h.addcmul_(b, b, value=0.5),
    "lerp_": lambda h, b: h.lerp_(b, 0.5),
    "dropout": lambda h, b: F.dropout(h, 0.3, True, True),
    "bernoulli_": lambda h, b: h.bernoulli_(0.5),
    "transpose_": lambda h, b: h.transpose_(0, 1).mul_(2).transpose_(0, 1),
    "no_grad": no_grad(lambda h, b: h.mul_(2)),
    "no_grad, a view": no_grad(lambda h, b: h[:, 3:].clamp_(-1, 1)),
    "detach": lambda h, b: h.detach().mul_(2),
    "a view of detach": lambda h, b: h.detach()[1:].mul_(2),
    "data": lambda h, b: h.data.clamp_(max=0.5),
    "data is set": lambda h, b: setattr(h, "data", h.data.sign()),
    "numpy": lambda h, b: h.detach().numpy().__imul__(2),
    "out, no_grad": no_grad(lambda h, b: torch.mul(h, 2, out=h)),
    "out, data": lambda h, b: torch.mul(h.data, 2, out=h.data),
    "out of addmm, data": lambda h, b: torch.addmm(b.data, b.data, torch.eye(D), out=h.data),
    "two results": lambda h, b: torch.frexp(h.data, out=(h.data, torch.empty(h.shape, dtype=torch.int32))),
    "foreach": lambda h, b: torch._foreach_mul_([h], 2.0),
    "foreach, no_grad": no_grad(lambda h, b: torch._foreach_mul_([h], 2.0)),
    "foreach, data": lambda h, b: torch._foreach_mul_([h.data], 2.0),
}
MAKES = {
    "product": lambda a, b, c: a * c,
    "sum": lambda a, b, c: a.sin() + c,
    "gelu": lambda a, b, c: F.gelu(a),
    "matrix product": lambda a, b, c: F.linear(a, torch.ones(D, D)),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_saving_leaves_eager_gradients(write, make, scope):
    def function(a, b, c, w):
        h = MAKES[make](a, b, c)
        WRITES[write](h, b)
        return torch.relu(h) @ w + (h @ w).tanh() + torch.sigmoid(h) @ w

    same_as_eager(function, scope)


@pytest.mark.parametrize("write", ["silu", "mul_", "mul_ by a number", "abs_, pow_"])
def test_a_result_that_an_op_in_place_made_is_recomputed(write):
    """Twice in a row, so that the second starts from a tensor that was written to."""

    def function(a, b, c, w):
        h = a * c
        WRITES[write](h, b)
        WRITES["mul_ by a number"](h, b)
        return h @ w

    assert same_as_eager(function, "scope", measures=True) >= B * D * 4


class Rotated(torch.autograd.Function):
    """Writes into its input without mark_dirty and returns it, as rotary kernels do."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class SavesBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y, x * y)
        return x * y

    @staticmethod
    def backward(ctx, dy):
        x, y, z = ctx.saved_tensors
        return dy * y + z * 0, dy * x


def heads(t):
    return t.view(2, 16, 4, 32).transpose(1, 2)


@torch.jit.script
def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def unused_branch(write, read):
    """An op that has no part in the loss has saved h, which is overwritten."""

    def function(a, b, c, w):
        h = a @ w
        h.sin(), F.gelu(h)
        y = read(h)
        write(h)
        return y @ w

    return function


def unused_part(a, b, c, w):
    """An op that has no part in the loss has saved a part of h, which a recipe takes as a whole."""
    h = a @ w
    unused = h[:, 8:].sin()
    y = h.neg() @ w
    h.zero_()
    return y + 0 * unused.detach().sum()


def forces(a, b, c, w):
    energy = F.gelu(a * c).sum()
    (force,) = torch.autograd.grad(energy, a, create_graph=True)
    return force @ w


def disabled(a, b, c, w):
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return F.gelu(a * c) @ w


def of_func(transform):
    return lambda a, b, c, w: (F.gelu(a) * c + transform(lambda t: torch.sin(t).pow(2).sum())(F.gelu(c))) @ w


PROGRAMS = {
    "a Function that writes": lambda a, b, c, w: Rotated.apply(F.gelu(a)) @ w,
    "a part of what a Function wrote": lambda a, b, c, w: (
        Rotated.apply((a.sin() @ w).view(B, 2, -1)).unbind(1)[0].tanh() @ w[: D // 2]
    ),
    "a Function that marks": lambda a, b, c, w: torch.relu(MarksDirty.apply(F.gelu(a) * 1.0)) @ w,
    "a Function that saves its result": lambda a, b, c, w: SavesBoth.apply(F.gelu(a), b * c) @ w,
    "attention": lambda a, b, c, w: F.scaled_dot_product_attention(
        heads(F.gelu(a)), heads(b * c), heads(torch.tanh(c))
    )
    .transpose(1, 2)
    .reshape(B, D)
    @ w,
    "a half written by a float": lambda a, b, c, w: torch.relu((a.bfloat16() * 1.5).mul_(c[0])).float() @ w,
    "a half plus a float": lambda a, b, c, w: torch.tanh((a.half() * 1.0).add_(b.exp())).float() @ w,
    "a float over a double": lambda a, b, c, w: torch.sigmoid((a * 1.5).div_(b.double().exp())) @ w,
    "a part of a copy of a slice": lambda a, b, c, w: a.exp()[4:].clone()[6:] @ w,
    "a copy of a slice": lambda a, b, c, w: a.exp()[4:].to(torch.float32, copy=True)[6:] @ w,
    "slices of TorchScript": lambda a, b, c, w: (rotate_half(F.gelu(a)) * a) @ w,
    "unused, then in place": unused_branch(lambda h: None, lambda h: F.silu(h, inplace=True)),
    "unused, then written": unused_branch(lambda h: h.add_(1), torch.relu),
    "unused, then zeroed": unused_branch(lambda h: h.zero_(), lambda h: torch.relu(h) * 2.0),
    "unused part, then zeroed": unused_part,
    "a gradient inside": forces,
    "hooks disabled": disabled,
    "func.grad": of_func(torch.func.grad),
    "func.jacrev": of_func(lambda f: torch.func.vmap(torch.func.jacrev(f))),
    "func.vjp": lambda a, b, c, w: (F.gelu(a) * torch.func.vjp(torch.sin, F.gelu(c))[1](b)[0]) @ w,
    "func.jvp": lambda a, b, c, w: (F.gelu(a) * torch.func.jvp(torch.sin, (F.gelu(c),), (b,))[1]) @ w,
    "vmap": lambda a, b, c, w: torch.vmap(lambda t: torch.tanh(t @ w))(F.gelu(a)) @ w,
    "cond": lambda a, b, c, w: torch.cond(a.sum() > 0, torch.sin, torch.cos, (F.gelu(a),)) @ w,
    "checkpoint": lambda a, b, c, w: checkpoint(lambda t: F.gelu(t @ w), F.silu(a), use_reentrant=False) @ w,
    "hooks inside": lambda a, b, c, w: on_cpu(F.gelu(a), c) @ w,
}


def on_cpu(x, y):
    with torch.autograd.graph.save_on_cpu():
        return F.silu(x) * y


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_uncommon_code_in_a_scope_leaves_eager_gradients(program, scope):
    torch._dynamo.reset()
    same_as_eager(PROGRAMS[program], scope)


@pytest.mark.parametrize("write", ["data", "out, data", "out of addmm, data", "two results", "foreach, data"])
def test_a_write_that_autograd_does_not_notice_reaches_what_was_saved(write):
    def function(a, b, c, w):
        h = F.gelu(a)
        y, z, u = h @ w, h.sin(), F.gelu(h.neg())
        WRITES[write](h, b)
        return y + torch.relu(h) @ w + z @ w + u @ w

    for scope in SCOPES:
        same_as_eager(function, scope)


def in_scope_and_eager(function):
    """Compares the gradients of `function(scope, a, b, c, w)`, which may change the leaves."""

    def gradients(scope):
        given = leaves()
        with scope():
            loss = function(scope, *given).square().sum()
        return torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)

    assert_same_bits(gradients(recompute_scope), gradients(contextlib.nullcontext))


@pytest.mark.parametrize("op", [lambda a, w: F.gelu(a), torch.mm, lambda a, w: torch.relu(a @ w)])
@pytest.mark.parametrize("view", [lambda h: h, lambda h: h.view(D, B).view(B, D)])
def test_data_that_is_replaced(op, view):
    """Backward reads the other numbers, if an op had saved the tensor as an input before too."""

    def function(scope, a, b, c, w):
        h = view(op(a, w))
        y = h @ w
        h.data = torch.ones_like(h)
        return y + h @ w

    in_scope_and_eager(function)


@pytest.mark.parametrize(
    "lend", [lambda h: h.untyped_storage().fill_(0), lambda h: h.detach().numpy().fill(0)]
)
@pytest.mark.parametrize("op", [lambda a, w: F.gelu(a), torch.mm])
def test_memory_that_is_written_to_after_the_plan(op, lend):
    """The end of the inner scope plans what its ops have saved. A recipe reads the product, which is kept."""

    def function(scope, a, b, c, w):
        with scope():
            h = op(a, w)
            y = F.gelu(F.layer_norm(h, (D,), b[0], c[0])) @ w
        lend(h)
        return y

    is_read = op is torch.mm
    with pytest.raises(RuntimeError, match="written to by NumPy") if is_read else contextlib.nullcontext():
        in_scope_and_eager(function)


@pytest.mark.parametrize(
    "write", [lambda w: torch.from_dlpack(w.detach()).mul_(2), lambda w: w.detach().numpy().fill(1)]
)
def test_a_large_leaf_that_is_lent_after_the_plan(write):
    def function(scope, a, b, c, w):
        with scope():
            h = F.gelu(a + b)
            y = h.sum(0) @ c.mT
        write(b)
        return y

    in_scope_and_eager(function)


@pytest.mark.parametrize("write", [lambda h: h.data.clamp_(max=0.0), lambda h: h.detach().mul_(0.5)])
def test_a_write_after_hooks_around_have_copied(write):
    def function(scope, a, b, c, w):
        h = torch.relu(a * b)
        y = F.max_pool2d(h.view(1, 4, B, B), 3)
        write(h)
        return y.sum() + c

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        in_scope_and_eager(function)


def test_data_of_another_view_is_replaced():
    """It has the shape of the view that an op has saved, and may have its address."""

    def function(scope, a, b, c, w):
        h = F.gelu(a)
        y = h.view(D, B).view(B, D) @ w
        for _ in range(4):
            view = h.view(D, B).view(B, D)
            view.data = torch.ones_like(view)
        return y

    in_scope_and_eager(function)


class Exp(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("frees", [False, True])
def test_data_of_the_output_of_a_function_is_replaced(frees):
    def function(scope, a, b, c, w):
        x = a.detach().requires_grad_() if frees else a
        h = Exp.apply(x)
        y, z = h @ w, F.gelu(h)
        if frees:
            y.sum().backward()
            w.grad = None
        h.data = torch.ones_like(h)
        return z.detach() * w[:B] if frees else y

    in_scope_and_eager(function)


@pytest.mark.parametrize(
    "write", [lambda s: s.data.mul_(2), lambda s: s.detach().numpy().fill(3), lambda s: s.data.fill_(0.3)]
)
def test_a_number_that_an_op_has_made_is_written_to(write):
    def function(scope, a, b, c, w):
        s = (a * b).mean()
        y = F.gelu(w * s)
        write(s)
        return y

    in_scope_and_eager(function)


@pytest.mark.parametrize("op", [lambda t: t + t, lambda t: torch.cat([t, t])])
def test_sparse_leaves(op):
    def function(scope, a, b, c, w):
        return op(torch.eye(D).to_sparse().requires_grad_()).to_dense().sum() * a

    in_scope_and_eager(function)


class SkippedNorm(nn.LayerNorm):
    """Returns its input: the result of another norm."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("scope", SCOPES)
def test_eps_comes_from_the_call(scope, monkeypatch):
    norm, skipped = nn.LayerNorm(D, eps=1e-2), SkippedNorm(D, eps=1e-6)
    same_as_eager(lambda a, b, c, w: skipped(norm(a * 0.01)) @ w, scope)
    norm.eps = 1e-4
    same_as_eager(lambda a, b, c, w: skipped(norm(a * 0.01)) @ w, scope)
    original = F.layer_norm

    def patched(input, normalized_shape, weight=None, bias=None, eps=1e-5):
        return original(input, normalized_shape, weight, bias, 0.5)

    monkeypatch.setattr(F, "layer_norm", patched)
    same_as_eager(lambda a, b, c, w: norm(a * 0.01) @ w, scope)


@pytest.mark.parametrize("step", ["chain", "doubling", "recurrence"])
@pytest.mark.timeout(20)
def test_long_chains_take_no_longer_than_they_are(step):
    """Recipes have a bounded number of ops, or the walk over them would take exponential time."""
    x = torch.randn(64, 64).requires_grad_()
    with recompute_scope(matmuls=True):
        a, b, total = x * 1.0, x.sin(), 0.0
        for _ in range(300 if step == "chain" else 40):
            if step == "chain":
                a = a * 0.999
            elif step == "doubling":
                a = (a + a) * 0.5
            else:
                a, b = (a * 0.6 + b * 0.4) * 1.01, a
            total = total + torch.sigmoid(a.t().reshape(-1)).sum()
    total.backward()


def test_disabled_hooks_are_told_of_once():
    x = torch.randn(64, 64).requires_grad_()
    with torch.autograd.graph.disable_saved_tensors_hooks("none of them here"):
        with pytest.warns(UserWarning, match="hooks are disabled: none of them here"), recompute_scope():
            F.gelu(x).sum().backward()


def test_writes_after_a_write_that_the_graph_does_not_show():
    """A tensor that was written to in unknown ways is no ingredient: it may be written to once more."""
    conv, leaf = nn.Conv2d(4, 4, 1), torch.randn(8, 4, 12, 12, requires_grad=True)

    def forward():
        x = leaf * 1
        x.detach().mul_(1.5)
        y = x * x
        x.data.clamp_(-1, 1)
        return conv(y)

    compare_and_measure_freed(forward, [leaf, conv.weight])


@pytest.mark.parametrize("scope", SCOPES)
def test_a_linear_that_adds_its_bias_in_place(scope):
    """For tokens whose strides are others. Its result is an ingredient as any other Linear's."""
    linear, leaf = nn.Linear(B, B), torch.randn(4, B, D, requires_grad=True)

    def forward():
        y = linear((leaf * 1).mT)
        assert y._version == 1
        return F.gelu(y) @ torch.ones(B, B, requires_grad=True)

    assert compare_and_measure_freed(forward, [leaf, *linear.parameters()], SCOPES[scope]) >= leaf.nbytes
