"""Models whose layers recompute their outputs, steps of these in scopes, and measures of what scopes free."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from fastvit import BatchNormAct, ops, recompute_scope
from fastvit.memory import live_bytes


@contextlib.contextmanager
def count_recomputations():
    """Yields a mock of bn_apply, which recomputes the output of a batch norm; no forward calls it."""
    with mock.patch.object(ops, "bn_apply", wraps=ops.bn_apply) as bn_apply:
        yield bn_apply


class ReaderModel(nn.Module):
    """A convolution, a BatchNormAct, and a reader, `read(model, y)`, of the BatchNormAct's output y."""

    def __init__(self, read, memory):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 6, 3, bias=False)
        self.norm = BatchNormAct(6, activation="silu", memory=memory)
        self.a, self.b = nn.Conv2d(6, 4, 3), nn.Conv2d(6, 4, 3)
        self.linear = nn.Linear(6, 5)
        nn.init.normal_(self.norm.weight)  # torch draws the other weights.
        self.read = read

    def forward(self, x):
        return self.read(self, self.norm(self.first(x)))


class ReaderCase(NamedTuple):
    """A reader of y, the output of a ReaderModel's norm, and how often a backward recomputes y."""

    read: Callable[[ReaderModel, torch.Tensor], torch.Tensor]
    num_recomputations: int | None  # None is not checked: torch may save a copy of y.


# A backward recomputes y once if it reads y. It does not if it reads only sizes ("max_pool", "nothing"), or
# if y is kept: after a view as another dtype, or a write to a view. The loss reads the square of the result.
READERS = {
    "conv": ReaderCase(lambda net, y: net.a(y), 1),
    "two convs": ReaderCase(lambda net, y: net.a(y) + net.b(y), 1),
    "twice in one op": ReaderCase(lambda net, y: y * y, 1),
    "max_pool": ReaderCase(lambda net, y: nn.functional.max_pool2d(y, 2), 0),
    "linear": ReaderCase(lambda net, y: net.linear(y.flatten(2).transpose(1, 2)), None),
    "tokens": ReaderCase(lambda net, y: y.flatten(2).transpose(1, 2).square(), 1),
    "slice": ReaderCase(lambda net, y: y[1:, ::2, 1:-1, ::3].square(), 1),
    "halves": ReaderCase(lambda net, y: torch.add(*(t.square() for t in y.chunk(2, 1))), 1),
    "unfold": ReaderCase(lambda net, y: y.unfold(2, 3, 1).square(), 1),
    "detached": ReaderCase(lambda net, y: net.a(y) * net.b(y.detach()), 1),
    "residual": ReaderCase(lambda net, y: y + y.square(), 1),
    "nothing": ReaderCase(lambda net, y: y.sum((2, 3)), 0),
    "a number": ReaderCase(lambda net, y: y + 1, 1),
    "complex": ReaderCase(
        lambda net, y: (torch.view_as_complex(y[..., :2].contiguous()).conj() * 2j).abs(), None
    ),
    "other dtype": ReaderCase(
        lambda net, y: y.view(torch.int32).view(torch.float32) * net.linear.weight.sum() + y, 0
    ),
    "in place before": ReaderCase(lambda net, y: net.a(y.mul_(2)), 1),
    # The tuple makes a write and then a call, whose result it returns.
    "in place on a view before": ReaderCase(lambda net, y: (y[:, 0].zero_(), net.a(y))[1], 0),
    "relu_ on y": ReaderCase(lambda net, y: net.a(torch.relu_(y)), 1),
}


def step_in_scope(net, x, scope=recompute_scope):
    """Takes a step, and returns the output and the gradients of x and the parameters."""
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    with scope():
        y = net(leaf)
        loss = y.square().sum()
    loss.backward()
    return [y.detach().clone(), leaf.grad, *list_gradients(net)]


def list_gradients(net):
    return [p.grad for p in net.parameters() if p.grad is not None]


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def compare_and_measure_freed(forward, leaves, scope=recompute_scope, measures=True):
    """Returns the bytes that a scope frees; raises unless `forward()` has the same bits in the scope.

    Compares the result and the gradients of `leaves`. Measures no bytes and returns 0 without `measures`.
    """
    kept_bytes, results, devices = [], [], {leaf.device for leaf in leaves}
    for context in (contextlib.nullcontext, scope):

        def run(context=context):
            torch.manual_seed(1)
            with context():
                return forward()

        if measures:
            run()  # one-time caches must not be counted
        # live_bytes returns the bytes, and the result of run().
        nbytes, y = live_bytes(run, *devices) if measures else (0, run())
        gradients = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
        kept_bytes.append(nbytes)
        results.append([y.detach(), *(t for t in gradients if t is not None)])
    assert_same_bits(*results)
    return kept_bytes[0] - kept_bytes[1]


def make_conv_stack(kind, depth=4):
    """Returns convs with norms, torch's for "torch", else BatchNormActs of `memory=kind`, and a 1x1 conv."""
    torch.manual_seed(0)

    def make_norm():
        if kind == "torch":
            return nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
        return BatchNormAct(8, activation="silu", memory=kind)

    convs = [nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(depth)]
    return nn.Sequential(*(m for conv in convs for m in (conv, make_norm())), nn.Conv2d(8, 1, 1))


def measure_forward(net, x, scope=recompute_scope):
    """Returns the bytes that a forward leaves allocated, in units of the bytes of x."""

    def forward():
        with scope():
            return net(x).sum()

    forward()  # one-time caches must not be counted
    return live_bytes(forward, x.device)[0] / x.nbytes


class SavesItsOutput(torch.autograd.Function):
    """Has nodes of other graphs between its own and the output."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            x.detach().requires_grad_().sin().sum().backward()
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]
