"""recompute_scope: outputs rebuilt to the same bits, whoever reads them and whatever happens to them."""

import contextlib
import gc
import threading
from unittest import mock

import pytest
import torch
from cases import ACTIVATIONS
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import BatchNormAct, ops, recompute_scope
from fastvit.memory import live_bytes


class Rebuilds:
    """Counts the outputs that are rebuilt."""

    def __enter__(self):
        self.count = 0
        original = ops.bn_apply

        def counted(*arguments):
            self.count += 1
            return original(*arguments)

        self.patch = mock.patch.object(ops, "bn_apply", counted)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


class Net(nn.Module):
    """conv, BatchNormAct, and something that reads its output."""

    def __init__(self, read, memory, **options):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 6, 3, bias=False)
        self.norm = BatchNormAct(6, **{"activation": "silu", **options}, memory=memory)
        self.a, self.b = nn.Conv2d(6, 4, 3), nn.Conv2d(6, 4, 3)
        self.linear = nn.Linear(6, 5)
        nn.init.normal_(self.norm.weight)
        self.read = read

    def forward(self, x):
        return self.read(self, self.norm(self.first(x)))


READERS = {  # name -> (what reads y, how often it is rebuilt)
    "conv": (lambda net, y: net.a(y), 1),
    "two convs": (lambda net, y: net.a(y) + net.b(y), 2),
    "twice in one op": (lambda net, y: y * y, 1),
    "max_pool": (lambda net, y: nn.functional.max_pool2d(y, 2), 1),
    "linear": (lambda net, y: net.linear(y.flatten(2).transpose(1, 2)), None),
    "tokens": (lambda net, y: y.flatten(2).transpose(1, 2).square(), 1),
    "slice": (lambda net, y: y[1:, ::2, 1:-1, ::3].square(), 1),
    "halves": (lambda net, y: torch.add(*(t.square() for t in y.chunk(2, 1))), 2),
    "unfold": (lambda net, y: y.unfold(2, 3, 1).square(), 1),
    "detached": (lambda net, y: net.a(y) * net.b(y.detach()), 2),
    "residual": (lambda net, y: y + y.square(), 1),
    "nothing": (lambda net, y: y + 1, 0),
    "complex": (lambda net, y: (torch.view_as_complex(y[..., :2].contiguous()).conj() * 2j).abs(), None),
    "other dtype": (lambda net, y: y.view(torch.int32).view(torch.float32) * net.linear.weight.sum() + y, 1),
    "in place before": (lambda net, y: net.a(y.mul_(2)), 0),
    "in place on a view before": (lambda net, y: (y[:, 0].zero_(), net.a(y))[1], 0),
    "relu_ over it": (lambda net, y: net.a(torch.relu_(y)), 0),
}


def run(net, x, scope=recompute_scope):
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    with scope():
        y = net(leaf)
        loss = y.square().sum()
    loss.backward()
    return [y.detach().clone(), leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def same_bits(got, want):
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("reader", READERS)
def test_the_bits_of_keep(reader, channels_last, device):
    read, times = READERS[reader]
    x = torch.randn(4, 3, 11, 13, device=device)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    want = run(Net(read, "keep").to(device), x)
    with Rebuilds() as rebuilds:
        same_bits(run(Net(read, "recompute").to(device), x), want)
    assert times is None or rebuilds.count == times, rebuilds.count
    same_bits(run(Net(read, "recompute").to(device), x, contextlib.nullcontext), want)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_stats", "cumulative"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bits_of_keep_in_every_mode(activation, mode, residual, device):
    """Running statistics move on between forward and backward; what is rebuilt does not see that."""
    x, z = (torch.randn(6, 5, 7, device=device) for _ in range(2))
    results = []
    with Rebuilds() as rebuilds:
        for memory in ("keep", "recompute"):
            layer = BatchNormAct(
                5, activation=activation, memory=memory, device=device,
                track_running_stats=mode != "no_stats", momentum=None if mode == "cumulative" else 0.1,
            ).train(mode != "eval")  # fmt: skip
            leaves = [t.clone().requires_grad_() for t in ([x, z] if residual else [x])]
            with recompute_scope():
                y = layer(*(t * 1 for t in leaves))
                loss = (y * y.detach().clone().requires_grad_()).exp().mean()
            with torch.no_grad():
                for name, buffer in layer.named_buffers():
                    if "running" in name:
                        buffer.add_(1)
            results.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
    same_bits(*results)
    assert rebuilds.count == 0, "y itself is still alive, so it is what the reader gets"


def stack(kind, depth=4):
    torch.manual_seed(0)

    def norm():
        if kind == "torch":
            return nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
        return BatchNormAct(8, activation="silu", memory=kind)

    convs = [nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(depth)]
    return nn.Sequential(*(m for conv in convs for m in (conv, norm())), nn.Conv2d(8, 1, 1))


def forward_leaves(net, x, scope=recompute_scope):
    """Activations that a forward leaves alive, and its result."""

    def forward():
        with scope():
            return net(x).sum()

    forward()
    count, result = live_bytes(forward, x.device)
    return count / x.nbytes, result


def test_live_bytes_of_a_forward(device):
    """Per layer: torch saves x, the normalised x and y; keep x and y; recompute x."""
    x = torch.randn(4, 8, 48, 48, device=device)
    for kind, want in (("torch", 12), ("keep", 8), ("recompute", 4)):
        assert abs(forward_leaves(stack(kind).to(device), x)[0] - want) < 0.02
    net = stack("recompute").to(device)
    assert abs(forward_leaves(net, x, contextlib.nullcontext)[0] - 8) < 0.02, "without a scope it is keep"
    _, loss = forward_leaves(net, x)
    left, _ = live_bytes(loss.backward, device)
    assert -4.02 < left / x.nbytes < -3.9, "the graph is held by its result, what it saved is gone"


@pytest.mark.parametrize("where", ["scope outside", "scope inside", "converted submodule"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointing(where, reentrant, device):
    x = torch.randn(4, 8, 20, 20, device=device)
    want = run(stack("keep").to(device), x)
    net = stack("recompute").to(device)

    def inner(x):
        if where == "converted submodule":
            x = net[:2](x)
            with recompute_scope():
                return net[2:](x)
        with recompute_scope() if where == "scope inside" else contextlib.nullcontext():
            return net(x)

    class Checkpointed(nn.Module):
        net_ = net

        def forward(self, x):
            return checkpoint(inner, x, use_reentrant=reentrant)

        def parameters(self, recurse=True):
            return net.parameters()

    scope = recompute_scope if where == "scope outside" else contextlib.nullcontext
    same_bits(run(Checkpointed(), x, scope), want)
    leaf = x.clone().requires_grad_()
    assert forward_leaves(Checkpointed(), leaf, scope)[0] < 0.1, "checkpoint's own hooks see every tensor"


def test_layers_around_a_checkpoint(device):
    """A checkpointed block between layers of one scope."""
    x = torch.randn(4, 8, 20, 20, device=device)
    results = []
    for kind in ("keep", "recompute"):
        parts = [stack(kind, 2)[:4].to(device) for _ in range(3)]
        net = nn.ModuleList(parts)
        net.forward = lambda x, p=parts: p[2](checkpoint(p[1], p[0](x), use_reentrant=False))
        with Rebuilds() as rebuilds:
            results.append(run(net, x))
    same_bits(*results)
    assert rebuilds.count >= 3


def test_hooks_on_the_stack_are_called(device):
    """Hooks outside of a scope, and inside, see the same tensors as with keep."""
    x = torch.randn(4, 8, 20, 20, device=device)
    want = run(stack("keep").to(device), x)
    for outside in (True, False):
        shapes = {}
        for kind in ("keep", "recompute"):
            seen = shapes[kind] = []

            def pack(t, seen=seen):
                seen.append(t.shape)
                return t.detach()

            @contextlib.contextmanager
            def both(pack=pack, outside=outside):
                hooks = saved_tensors_hooks(pack, lambda t: t)
                first, second = (hooks, recompute_scope()) if outside else (recompute_scope(), hooks)
                with first, second:
                    yield

            same_bits(run(stack(kind).to(device), x, both), want)
        assert shapes["keep"] == shapes["recompute"] and len(shapes["keep"]) > 8


def test_save_on_cpu_outside(device):
    x = torch.randn(4, 8, 20, 20, device=device)

    @contextlib.contextmanager
    def both():
        with save_on_cpu(), recompute_scope():
            yield

    same_bits(run(stack("recompute").to(device), x, both), run(stack("keep").to(device), x))


def test_scopes_nest_and_end(device):
    x = torch.randn(4, 8, 12, 12, device=device)
    net = stack("recompute").to(device)
    with recompute_scope():
        with recompute_scope():
            a = net[:4](x)
        y = net[4:](a)
    with pytest.raises(ZeroDivisionError), recompute_scope():
        _ = 1 / 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with Rebuilds() as rebuilds:
        y.sum().backward()
    assert rebuilds.count == 3, "a is alive"


def test_retain_graph_and_partial_gradients(device):
    x = torch.randn(4, 3, 9, 9, device=device)
    net = Net(READERS["two convs"][0], "recompute").to(device)
    with recompute_scope():
        loss = net(x).square().sum()
    weights = [net.a.weight, net.b.weight, net.first.weight]
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    alone = [torch.autograd.grad(loss, w, retain_graph=True)[0] for w in weights]
    same_bits(alone, first)
    same_bits(torch.autograd.grad(loss, weights), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, weights)


def test_readers_that_outlive_the_layers_graph(device):
    """A reader of y.detach() backpropagates after the layer's own graph is spent: x lives as long as it."""
    x = torch.randn(4, 3, 9, 9, device=device)
    results = []
    for memory in ("keep", "recompute"):
        net = Net(None, memory).to(device)
        with recompute_scope():
            y = net.norm(net.first(x))
            one, two = net.a(y).sum(), net.b(y.detach()).square().sum()
        del y
        one.backward()
        del one
        gc.collect()
        two.backward()
        results.append([net.a.weight.grad, net.b.weight.grad, net.first.weight.grad])
    same_bits(*results)


def test_written_after_it_was_saved(device):
    """Autograd would refuse; the copy that is rebuilt is the one that was saved, so the gradient is right."""
    x = torch.randn(4, 3, 9, 9, device=device)
    want = run(Net(READERS["conv"][0], "keep").to(device), x)
    for alive in (True, False):
        net = Net(None, "recompute").to(device)
        leaf = x.clone().requires_grad_()
        with recompute_scope():
            y = net.norm(net.first(leaf))
            out = net.a(y)
        with torch.no_grad():
            y.mul_(3)
        if not alive:
            del y
        out.square().sum().backward()
        same_bits([out.detach(), leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)], want)


@pytest.mark.parametrize("what", ["x", "weight", "other"])
def test_writes_that_make_the_gradient_wrong_are_refused(what, device):
    """To x, which y would be rebuilt from; to a parameter; to a tensor of no layer, as without the scope."""
    net = Net(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        other = x.detach() + 1
        out = net.a(net.norm(x)).sum() + (other * net.b.weight.sum()).sum()
    with torch.no_grad():
        {"x": x, "weight": net.norm.weight, "other": other}[what].add_(1)
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation.* is at version .; expected version ."
    ):
        out.backward()


def test_x_written_before_y_is_saved(device):
    """Then y cannot be rebuilt, and is kept: only the layer's own backward is wrong, and refused."""
    net = Net(None, "recompute").to(device)
    with recompute_scope():
        x = net.first(torch.randn(4, 3, 9, 9, device=device))
        y = net.norm(x)
        with torch.no_grad():
            x.add_(1)
        out = net.a(y).sum()
    del y
    with Rebuilds() as rebuilds:
        torch.autograd.grad(out, net.a.weight, retain_graph=True)
    assert rebuilds.count == 0
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.backward()


def test_data_of_another_tensor(device):
    """y.data = other leaves the version alone; the storage tells."""
    net = Net(None, "recompute").to(device)
    x = torch.randn(4, 3, 9, 9, device=device)
    results = []
    for memory in ("keep", "recompute"):
        net.norm.memory = memory
        with recompute_scope():
            y = net.norm(net.first(x))
            first = net.a(y)
            y.data = torch.ones_like(y)
            second = net.b(y)
        grads = torch.autograd.grad(
            (first.square().sum() + second.square().sum()), [net.a.weight, net.b.weight]
        )
        results.append(grads)
    same_bits(*results)


def test_memory_that_is_handed_out_again(device):
    """Tensors that come to lie where outputs lay are not taken for them."""
    layer = BatchNormAct(8, activation="gelu", device=device)
    leaf = torch.randn(64, 8, 16, 16, device=device, requires_grad=True)
    w = torch.ones(8, 1, 1, device=device, requires_grad=True)
    addresses, again = set(), 0
    with recompute_scope(), Rebuilds() as rebuilds:
        for _ in range(200):
            y = layer(leaf)
            addresses.add(y.data_ptr())
            del y
            other = torch.randn_like(leaf.detach())
            again += other.data_ptr() in addresses
            (grad,) = torch.autograd.grad((other * w).sum(), w)
            torch.testing.assert_close(grad, other.sum((0, 2, 3)).view(8, 1, 1), rtol=1e-4, atol=1e-2)
    assert again > 0 and rebuilds.count == 0


def test_nothing_is_kept_alive(device):
    """Without the garbage collector: an op that saves its own output, and everything a layer made."""
    layer, conv = BatchNormAct(8, device=device), nn.Conv2d(8, 8, 1, device=device)
    leaf = torch.randn(4, 8, 6, 6, device=device, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with recompute_scope():
            x = leaf * 1
            y = layer(x)
            out = conv(y).sigmoid()
            gone = [StorageWeakRef(t.untyped_storage()) for t in (x, y, out)]
            del x, y
            assert not gone[0].expired() and gone[1].expired()
            out.sum().backward()
            del out
            assert all(reference.expired() for reference in gone)
    finally:
        gc.enable()


def test_a_scope_around_a_whole_loop_forgets(device):
    layer = BatchNormAct(4, device=device)
    with recompute_scope():
        scope = fastvit.recompute.active_scope()
        for _ in range(500):
            layer(torch.randn(2, 4, device=device)).square().sum().backward()
        assert len(scope._outputs) <= 2 * scope._SWEEP_AT_LEAST


def test_chains_do_not_grow(device):
    """y of a layer that reads y of another: every second one is kept, so nothing is rebuilt over and over."""

    class Chain(nn.Module):
        def __init__(self, memory):
            super().__init__()
            torch.manual_seed(0)
            self.norms = nn.ModuleList(BatchNormAct(8, activation="gelu", memory=memory) for _ in range(12))
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(12))

        def forward(self, x):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = norm(conv(x), x)
            return self.norms[0](x)

    x = torch.randn(2, 8, 10, 10, device=device)
    want = run(Chain("keep").to(device), x)
    with Rebuilds() as rebuilds:
        same_bits(run(Chain("recompute").to(device), x), want)
    assert 6 <= rebuilds.count <= 24


def test_autocast(device):
    x = torch.randn(4, 3, 9, 9, device=device)
    results = []
    for memory in ("keep", "recompute"):
        net = Net(READERS["two convs"][0], memory).to(device)

        @contextlib.contextmanager
        def scope():
            with recompute_scope(), torch.autocast(device, torch.bfloat16):
                yield

        results.append(run(net, x, scope))
        net.norm.float()
        with scope():  # the layer in float32, so that the convolution saves a copy that autocast made
            y = net.a(net.norm(net.first(x).float()))
        results[-1].append(torch.autograd.grad(y.float().sum(), net.a.weight)[0])
    same_bits(*results)


def test_without_gradients(device):
    net = stack("recompute").to(device)
    x = torch.randn(4, 8, 6, 6, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with recompute_scope(), mode():
            assert not net(x).requires_grad
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net[-1].weight.requires_grad_()
    with recompute_scope(), Rebuilds() as rebuilds:
        net(x).sum().backward()
    assert rebuilds.count == 0, "a frozen layer saves nothing that its output could be rebuilt from"


def test_double_backward(device):
    """Refused through the layer, as everywhere; right through the ops around it."""
    x = torch.randn(4, 6, 5, 5, device=device, requires_grad=True)
    layer = BatchNormAct(6, activation="silu", device=device)
    with recompute_scope():
        y = layer(x * 1)
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|differentiated twice"):
            grad.sum().backward()
        y = layer(x.detach() * 1)
        w = torch.randn(6, 1, 1, device=device, requires_grad=True)
        (grad,) = torch.autograd.grad((y * w).pow(3).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), w)
    torch.testing.assert_close(
        second, (6 * y.detach().pow(3) * w).sum((0, 2, 3)).view(6, 1, 1), rtol=1e-4, atol=1e-3
    )


def test_threads_have_scopes_of_their_own(device):
    x = torch.randn(4, 8, 12, 12, device=device)
    want = run(stack("keep").to(device), x)
    results, failures = {}, []

    def work(name):
        try:
            scope = recompute_scope if name % 2 else contextlib.nullcontext
            for _ in range(3):
                results[name] = run(stack_of[name], x, scope)
        except BaseException as failure:
            failures.append(failure)

    stack_of = {name: stack("recompute").to(device) for name in range(4)}
    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not failures
    for got in results.values():
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled(where):
    torch._dynamo.reset()
    net = stack("recompute", 2)
    x = torch.randn(4, 8, 9, 9)
    want = run(net, x)

    def scoped(x):
        with recompute_scope():
            return net(x)

    class Compiled(nn.Module):
        call = staticmethod(
            torch.compile(scoped if where == "inside" else net, fullgraph=True, backend="aot_eager")
        )

        def forward(self, x):
            return type(self).call(x)

        def parameters(self, recurse=True):
            return net.parameters()

        def zero_grad(self, set_to_none=True):
            net.zero_grad()

    got = run(Compiled(), x, contextlib.nullcontext if where == "inside" else recompute_scope)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
