"""recompute_scope within checkpoints, other hooks, other scopes, autocast, threads and compiled code."""

import contextlib
import copy
import threading

import pytest
import torch
from conversion import vit_models
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import recompute_scope
from fastvit.recompute import Policy, RecomputeLevel, active_scope, packed_tensor, pins, recipe
from recompute.models import (
    RecomputationCounter,
    assert_same_bits,
    compare_and_measure_freed,
    make_conv_stack,
    measure_forward,
    run_step,
)


@pytest.mark.parametrize("where", ["scope outside", "scope inside", "converted submodule"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_scopes_and_checkpoints_nest_either_way(where, reentrant, device):
    x = torch.randn(4, 8, 20, 20, device=device)
    want = run_step(make_conv_stack("keep").to(device), x)
    net = make_conv_stack("recompute").to(device)

    def inner(x):
        if where == "converted submodule":
            x = net[:2](x)
            with recompute_scope():
                return net[2:](x)
        with recompute_scope() if where == "scope inside" else contextlib.nullcontext():
            return net(x)

    checkpointed = nn.Module()
    checkpointed.net = net
    checkpointed.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
    scope = recompute_scope if where == "scope outside" else contextlib.nullcontext
    assert_same_bits(run_step(checkpointed, x, scope), want)
    leaf = x.clone().requires_grad_()
    assert measure_forward(checkpointed, leaf, scope)[0] < 0.1, "checkpoint's own hooks see every tensor"


def test_hooks_on_the_stack_are_called(device):
    """Hooks inside of a scope see every tensor; hooks outside see those that the scope keeps."""
    x = torch.randn(4, 8, 20, 20, device=device)
    want = run_step(make_conv_stack("keep").to(device), x)
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

            assert_same_bits(run_step(make_conv_stack(kind).to(device), x, both), want)
        if outside:
            assert len(shapes["recompute"]) == len(shapes["keep"]) - 4, (
                "an output of each layer is recomputed"
            )
        else:
            assert shapes["keep"] == shapes["recompute"] and len(shapes["keep"]) > 8


def test_scopes_nest_and_end(device):
    x = torch.randn(4, 8, 12, 12, device=device)
    net = make_conv_stack("recompute").to(device)
    with recompute_scope():
        with recompute_scope():
            a = net[:4](x)
        y = net[4:](a)
    with pytest.raises(ZeroDivisionError), recompute_scope():
        _ = 1 / 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with RecomputationCounter() as recomputations:
        y.sum().backward()
    assert recomputations.count == 4


def test_older_names_of_arguments():
    with pytest.warns(DeprecationWarning, match=r"recompute_scope\(matmuls=\) now") as warned:
        with recompute_scope(products=True):
            assert active_scope().policy == Policy(RecomputeLevel.MATMULS)
    assert [one.filename for one in warned] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"recompute_scope\(recompute_weight_casts=\) now"):
        with recompute_scope(weight_casts=True):
            assert active_scope().policy == Policy(weight_casts=True)
    with pytest.raises(TypeError, match="products is the old name of matmuls"):
        recompute_scope(products=True, matmuls=True)


def test_two_models_in_one_scope(device):
    """One after the other, and in the other order: neither goes by what was decided for the other."""
    models = [make_conv_stack(kind).to(device) for kind in ("recompute", "keep")]
    x = torch.randn(4, 8, 12, 12, device=device)
    want = [run_step(model, x) for model in models]
    with recompute_scope():
        for order in ((0, 1), (1, 0)):
            for i in order:
                assert_same_bits(run_step(models[i], x, contextlib.nullcontext), want[i])


def test_two_threads_may_run_a_converted_model():
    """Two threads run one model at once; it has no state of a step but the parameters."""
    eager = nn.Sequential(*(vit_models.Block() for _ in range(2)))
    model = fastvit.convert(copy.deepcopy(eager))
    inputs = [torch.randn(n, 50, 64) for n in (4, 8)]
    want = [torch.autograd.grad(eager(x).sum(), list(eager.parameters())) for x in inputs]
    failed = []

    def work(index):
        for _ in range(10):
            got = torch.autograd.grad(model(inputs[index]).sum(), list(model.parameters()))
            if not all(map(torch.equal, got, want[index])):
                failed.append(index)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
        assert not thread.is_alive()
    assert not failed


def test_a_scope_keeps_nothing_without_gradients(device):
    net = make_conv_stack("recompute").to(device)
    x = torch.randn(4, 8, 6, 6, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with recompute_scope(), mode():
            assert not net(x).requires_grad
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net[-1].weight.requires_grad_()
    with recompute_scope(), RecomputationCounter() as recomputations:
        net(x).sum().backward()
    assert recomputations.count == 0, "a frozen layer saves nothing that its output could be recomputed from"


def test_a_scope_in_compiled_code_leaves_eager_gradients():
    """A scope in the function that is compiled; one round compiled code is in test_convert_vit.py."""
    torch._dynamo.reset()
    net, x = make_conv_stack("recompute", 2), torch.randn(4, 8, 9, 9)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def scoped(x):
        with recompute_scope():
            return net(x)

    parameters = list(net.parameters())
    want, got = (torch.autograd.grad(f(x).square().sum(), parameters) for f in (net, scoped))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


OPS = {  # from the result of a Linear, which the op or a part of it saves, to what the next Linear saves
    "elu": lambda t: F.elu(t, 0.7),
    "hardtanh": lambda t: F.hardtanh(t, -0.5, 0.4),
    "leaky_relu": lambda t: F.leaky_relu(t, 0.2),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "glu": lambda t: F.glu(torch.cat([t, t], 1)),
    "pow": lambda t: t.pow(3),
    "repeat": lambda t: F.silu(t).repeat(2, 1),
    "roll": lambda t: F.silu(t).roll(3, 1),
    "pad by nothing": lambda t: F.pad(F.silu(t), (0, 0)),
    "copy": lambda t: F.silu(t).clone(),
    "copy of other strides": lambda t: F.silu(t).t().contiguous().t(),
    "second factor": lambda t: torch.mul(torch.full_like(t, 0.3), F.silu(t)),
    "a number times, in TorchScript": lambda t: torch.ops.aten.mul.Scalar(F.silu(t), 0.3),
    "negative": lambda t: -F.silu(t),
    "a number and the rest": lambda t: 1.5 + F.silu(t),
    "all but a number": lambda t: torch.sub(F.silu(t), 3, alpha=0.3),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_of_torch(name, device):
    torch.manual_seed(0)
    first, last = (nn.Linear(64, 64, device=device) for _ in range(2))
    x = torch.randn(32, 64, device=device)
    assert (
        compare_and_measure_freed(
            lambda: last(OPS[name](first(x))), [*first.parameters(), *last.parameters()]
        )
        >= x.nbytes
    )


@pytest.mark.parametrize("pieces,recomputed", [(30, True), (45, False)])
def test_a_recipe_has_at_most_40_ops(pieces, recomputed, device):
    last = nn.Linear(90 * 8, 8, device=device)
    x = torch.randn(32, 90 * 8, device=device, requires_grad=True)

    def forward():
        return last(torch.cat([F.silu(t) for t in (x * 2).tensor_split(pieces, 1)], 1))

    assert (compare_and_measure_freed(forward, [x]) >= x.nbytes) == recomputed


def test_a_parameter_that_is_freed_before_the_backward(device):
    """As by FSDP2, where two Linears are sharded apart."""
    first, last = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    with recompute_scope(matmuls=True):
        y = last(first(x))
    first.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of its operand .* has been freed, or is sharded now"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    """They have no shape, and so no recipe; what is made of their parts and their padded form has one."""
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 8)
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in (40, 50)], requires_grad=True)

    def forward():
        h = F.gelu(first(x))
        parts = sum(last(F.silu(part)).sum() for part in h.unbind())
        return last(F.silu(torch.nested.to_padded_tensor(h, 0.0))).square().sum() + parts

    assert compare_and_measure_freed(forward, [*first.parameters(), *last.parameters()]) >= 2 * 50 * 64 * 4


def test_a_sparse_factor():
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    compare_and_measure_freed(
        lambda: torch.relu(a.sin().exp() + a.to_sparse().neg() * b.to_sparse().neg()) @ b, [a, b]
    )


def test_a_write_between_two_casts():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            h = x.cumsum(0)
            first = F.linear(h, weight)
            with torch.no_grad():
                h.clamp_(-1, 1)
            return first.float().square() + F.linear(h, weight).float().square()

    compare_and_measure_freed(forward, [x, weight])


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_behind_other_ops_has_its_price(bias):
    first, last = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64)
    with recompute_scope(matmuls=True):
        y = last(F.relu(first(torch.randn(4, 50, 64, requires_grad=True))))
    node = y.grad_fn if "Addmm" in y.grad_fn.name() else y.grad_fn.next_functions[0][0]
    assert node._raw_saved_mat1.data.state.recipe.flops == 2 * 64 * 4 * 50 * 64


@pytest.mark.parametrize("dtype,products", [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_recipe_that_moves_many_bytes(dtype, products):
    """A product and two scalings in float32 move 7 bytes for each of the result; and a cast 17."""
    linear, autocast = nn.Linear(64, 64), dtype == "bfloat16"
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear(x * y * 2.0 * 3.0)

    saved = x.numel() * (2 if autocast else 4)
    less = compare_and_measure_freed(forward, [x, y], lambda: recompute_scope(matmuls=products))
    assert less == (0 if autocast and not products else saved)


def test_a_copy_is_made_from_a_result_that_another_op_saves():
    """The op could not write it: the product that made the op's input is not kept."""
    linear, x = torch.nn.Linear(32, 32), torch.randn(4, 64, 32)
    weight = torch.randn(4, 4, 8, 8, requires_grad=True)

    def forward():
        h = linear(x).view(4, 64, 4, 8) * 2.0
        return torch.cat([F.gelu(h).flatten(), (h.transpose(1, 2) @ weight).flatten()])

    assert compare_and_measure_freed(forward, [linear.weight]) == x.nbytes  # the copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("train", [True, None, False])
def test_a_result_of_native_dropout_is_recomputed_from_its_mask(train, dtype):
    """The result of native_dropout, which dropout calls on CUDA, is recomputed from the mask's bits.

    The result is kept in evaluation. It is also kept in half precision on a CPU, since versions of torch
    round differently there.
    """
    last, x = nn.Linear(64, 64, dtype=dtype), torch.randn(128, 64, dtype=dtype, requires_grad=True)
    less = compare_and_measure_freed(
        lambda: last(torch.native_dropout(x.exp(), 0.3, train)[0]), [x, last.weight]
    )
    mask = x.numel() * 7 // 8 if train is not False else 0
    assert less == mask + (x.nbytes if mask and dtype.itemsize > 2 else 0)


def test_readers_on_two_streams_share_no_recomputed_tensor(monkeypatch):
    """And the allocator knows of a stream that reads another's memory. Streams are numbers here."""
    running, used, made, silu = [1], [], [], torch._C._nn.silu
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (packed_tensor, pins, recipe):
        monkeypatch.setattr(module, "current_stream_id", lambda _: running[0])
    for module in (packed_tensor, pins):
        monkeypatch.setattr(module, "record_current_stream", lambda tensor: used.append(running[0]))
    monkeypatch.setattr(torch._C._nn, "silu", lambda t: (made.append(1), silu(t))[1])
    for second, count in ((1, 1), (2, 2)):
        leaf, running[0] = torch.randn(64, 64, requires_grad=True), 1
        with recompute_scope():
            y = F.silu(leaf * 1)
            ones = [(y @ torch.ones(64, 64, requires_grad=True)).sum() for _ in range(2)]
        del y
        want, made[:] = torch.autograd.grad(128 * F.silu(leaf * 1).sum(), leaf)[0], []
        ones[0].backward(retain_graph=True)
        running[0] = second
        ones[1].backward(retain_graph=True)
        assert len(made) == count and used == [2] * (count - 1)
        torch.testing.assert_close(leaf.grad, want)


def test_rms_norm_of_cuda():
    """On a CPU torch composes it of others, unless there is a kernel."""
    library = torch.library.Library("aten", "IMPL")

    def rms_norm(x, shape, weight, eps):
        scale = (
            x.square().mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
        ).rsqrt()
        return x * scale * weight, scale

    library.impl("_fused_rms_norm", rms_norm, "CPU")
    try:
        for eps in (None, 0.25):
            norm, x = nn.RMSNorm(64, eps=eps), torch.randn(128, 64, requires_grad=True)
            assert norm(x).grad_fn.name() == "FusedRmsNormBackward0"
            with recompute_scope():
                y = norm(x.exp())
                node = (y @ torch.ones(64, 64, requires_grad=True)).grad_fn
            want = y.detach().clone()
            del y
            assert type(node._raw_saved_self.data.state) is packed_tensor.Recomputed
            assert torch.equal(node._saved_self, want)
    finally:
        library._destroy()
