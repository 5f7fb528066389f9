"""Writes to a tensor, and a comparison with eager of code that makes them in scopes."""

import contextlib

import torch
import torch.nn.functional as F

from fastvit import recompute_scope

ROWS, COLUMNS = 32, 128
SCOPES = {"scope": recompute_scope, "matmuls": lambda: recompute_scope(matmuls=True)}


def make_leaves():
    """Returns a, b and c, which are ROWS x COLUMNS, and w, which is COLUMNS x COLUMNS."""
    torch.manual_seed(0)
    shapes = [(ROWS, COLUMNS)] * 3 + [(COLUMNS, COLUMNS)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def assert_eager_gradients(function, scopes=SCOPES):
    """Raises unless `function(a, b, c, w)` and its gradients have the same bits in each scope as outside."""

    def run(scope):
        leaves = make_leaves()
        with scope():
            y = function(*leaves)
            loss = y.square().sum()
        return [y.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]

    expected = run(contextlib.nullcontext)
    for name in scopes:
        assert all(map(torch.equal, run(SCOPES[name]), expected)), f"recompute_scope, {name}"


def without_gradients(write):
    def write_without_gradients(h, b):
        with torch.no_grad():
            write(h, b)

    return write_without_gradients


# A write changes h, which an op has made; b has the shape of h.
WRITES = {
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
    "no_grad": without_gradients(lambda h, b: h.mul_(2)),
    "no_grad, a view": without_gradients(lambda h, b: h[:, 3:].clamp_(-1, 1)),
    "detach": lambda h, b: h.detach().mul_(2),
    "a view of detach": lambda h, b: h.detach()[1:].mul_(2),
    "data": lambda h, b: h.data.clamp_(max=0.5),
    "data is set": lambda h, b: setattr(h, "data", h.data.sign()),
    "numpy": lambda h, b: h.detach().numpy().__imul__(2),
    "out, no_grad": without_gradients(lambda h, b: torch.mul(h, 2, out=h)),
    "out, data": lambda h, b: torch.mul(h.data, 2, out=h.data),
    "out of addmm, data": lambda h, b: torch.addmm(b.data, b.data, torch.eye(COLUMNS), out=h.data),
    "two results": lambda h, b: torch.frexp(h.data, out=(h.data, torch.empty(h.shape, dtype=torch.int32))),
    "foreach": lambda h, b: torch._foreach_mul_([h], 2.0),
    "foreach, no_grad": without_gradients(lambda h, b: torch._foreach_mul_([h], 2.0)),
    "foreach, data": lambda h, b: torch._foreach_mul_([h.data], 2.0),
}


class Rotated(torch.autograd.Function):
    """Writes into its input without mark_dirty and returns it, as rotary kernels do."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy * 2
