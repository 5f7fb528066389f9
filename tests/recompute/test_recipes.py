"""The op calls that recompute tensors: which ops have them, what they cost, and what they read."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastvit import recompute_scope
from fastvit.recompute import packed_tensor, pins, recipe
from recompute.models import compare_and_measure_freed

# From the result of a Linear, which the op or a part of it saves, to what the next Linear saves.
OPS = {
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


@pytest.mark.parametrize("op", OPS)
def test_the_output_of_an_op_is_recomputed(op, device):
    first, last = (nn.Linear(64, 64, device=device) for _ in range(2))
    x, parameters = torch.randn(32, 64, device=device), [*first.parameters(), *last.parameters()]
    assert compare_and_measure_freed(lambda: last(OPS[op](first(x))), parameters) >= x.nbytes


@pytest.mark.parametrize("pieces,is_recomputed", [(30, True), (45, False)], ids=["30 pieces", "45 pieces"])
def test_a_recipe_has_at_most_40_ops(pieces, is_recomputed, device):
    last = nn.Linear(90 * 8, 8, device=device)
    x = torch.randn(32, 90 * 8, device=device, requires_grad=True)

    def forward():
        return last(torch.cat([F.silu(t) for t in (x * 2).tensor_split(pieces, 1)], 1))

    assert (compare_and_measure_freed(forward, [x]) >= x.nbytes) == is_recomputed


def test_an_operand_whose_memory_was_freed_raises(device):
    """FSDP2 frees parameters so, where two Linears are sharded apart."""
    first, last = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    with recompute_scope(matmuls=True):
        y = last(first(x))
    first.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of its operand .* has been freed, or is sharded now"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_kept_and_their_parts_recomputed():
    """They have no shape, and so no recipe; what is made of their parts and their padded form has one."""
    first, last = nn.Linear(64, 64), nn.Linear(64, 8)
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in (40, 50)], requires_grad=True)

    def forward():
        h = F.gelu(first(x))
        parts = sum(last(F.silu(part)).sum() for part in h.unbind())
        return last(F.silu(torch.nested.to_padded_tensor(h, 0.0))).square().sum() + parts

    assert compare_and_measure_freed(forward, [*first.parameters(), *last.parameters()]) >= 2 * 50 * 64 * 4


def test_sparse_factors_leave_eager_gradients():
    a, b = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    compare_and_measure_freed(
        lambda: torch.relu(a.sin().exp() + a.to_sparse().neg() * b.to_sparse().neg()) @ b, [a, b]
    )


def test_casts_before_and_after_a_write_are_told_apart():
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            h = x.cumsum(0)
            first = F.linear(h, weight)
            with torch.no_grad():
                h.clamp_(-1, 1)
            return first.float().square() + F.linear(h, weight).float().square()

    compare_and_measure_freed(forward, [x, weight])


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_product_behind_other_ops_has_its_price(bias):
    first, last = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64)
    with recompute_scope(matmuls=True):
        y = last(F.relu(first(torch.randn(4, 50, 64, requires_grad=True))))
    node = y.grad_fn if "Addmm" in y.grad_fn.name() else y.grad_fn.next_functions[0][0]
    assert node._raw_saved_mat1.data.state.recipe.flops == 2 * 64 * 4 * 50 * 64


@pytest.mark.parametrize(
    "dtype,matmuls",
    [("float32", False), ("bfloat16", False), ("bfloat16", True)],
    ids=["float32", "bfloat16", "bfloat16, matmuls"],
)
def test_a_recipe_that_moves_many_bytes_needs_matmuls(dtype, matmuls):
    """A product and two scalings in float32 move 7 bytes for each of the result; and a cast 17."""
    linear, autocast = nn.Linear(64, 64), dtype == "bfloat16"
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear(x * y * 2.0 * 3.0)

    saved_bytes = x.numel() * (2 if autocast else 4)
    freed_bytes = compare_and_measure_freed(forward, [x, y], lambda: recompute_scope(matmuls=matmuls))
    assert freed_bytes == (0 if autocast and not matmuls else saved_bytes)


def test_a_copy_is_made_from_a_result_that_another_op_saves():
    """The op could not write it: the product that made the op's input is not kept."""
    linear, x = nn.Linear(32, 32), torch.randn(4, 64, 32)
    weight = torch.randn(4, 4, 8, 8, requires_grad=True)

    def forward():
        h = linear(x).view(4, 64, 4, 8) * 2.0
        return torch.cat([F.gelu(h).flatten(), (h.transpose(1, 2) @ weight).flatten()])

    assert compare_and_measure_freed(forward, [linear.weight]) == x.nbytes  # the copy


@pytest.mark.parametrize(
    "dtype,mode",
    [
        ("float32", "train"),
        ("float64", "train"),
        ("bfloat16", "train"),
        ("float32", "default"),
        ("float32", "eval"),
    ],
)
def test_a_result_of_native_dropout_is_recomputed_from_its_mask(dtype, mode):
    """The result of native_dropout, which dropout calls on CUDA, is recomputed from the mask's bits.

    The result is kept in evaluation. It is also kept in half precision on a CPU, since versions of torch
    round differently there.
    """
    dtype, is_training = getattr(torch, dtype), {"train": True, "default": None, "eval": False}[mode]
    last, x = nn.Linear(64, 64, dtype=dtype), torch.randn(128, 64, dtype=dtype, requires_grad=True)

    def forward():
        return last(torch.native_dropout(x.exp(), 0.3, is_training)[0])

    mask_bytes = x.numel() * 7 // 8 if mode != "eval" else 0
    result_bytes = x.nbytes if mask_bytes and dtype.itemsize > 2 else 0
    assert compare_and_measure_freed(forward, [x, last.weight]) == mask_bytes + result_bytes


def test_readers_on_two_streams_share_no_recomputed_tensor(monkeypatch):
    """The allocator learns which stream reads another's memory. Streams are numbers here."""
    stream, recorded, recomputed, silu = [1], [], [], torch._C._nn.silu
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (packed_tensor, pins, recipe):
        monkeypatch.setattr(module, "current_stream_id", lambda _: stream[0])
    for module in (packed_tensor, pins):
        monkeypatch.setattr(module, "record_current_stream", lambda tensor: recorded.append(stream[0]))
    monkeypatch.setattr(torch._C._nn, "silu", lambda t: (recomputed.append(1), silu(t))[1])
    for second_stream, count in ((1, 1), (2, 2)):
        leaf, stream[0] = torch.randn(64, 64, requires_grad=True), 1
        with recompute_scope():
            y = F.silu(leaf * 1)
            sums = [(y @ torch.ones(64, 64, requires_grad=True)).sum() for _ in range(2)]
        del y
        expected = torch.autograd.grad(128 * F.silu(leaf * 1).sum(), leaf)[0]
        recomputed.clear()
        sums[0].backward(retain_graph=True)
        stream[0] = second_stream
        sums[1].backward(retain_graph=True)
        assert len(recomputed) == count and recorded == [2] * (count - 1)
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("eps", [None, 0.25], ids=["default eps", "eps"])
def test_the_fused_rms_norm_of_cuda_is_recomputed(eps):
    """On a CPU torch composes the norm of other ops, unless there is a kernel."""

    def rms_norm(x, shape, weight, eps):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale * weight, scale

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", rms_norm, "CPU")
    try:
        norm, x = nn.RMSNorm(64, eps=eps), torch.randn(128, 64, requires_grad=True)
        assert norm(x).grad_fn.name() == "FusedRmsNormBackward0"
        with recompute_scope():
            y = norm(x.exp())
            node = (y @ torch.ones(64, 64, requires_grad=True)).grad_fn
        expected = y.detach().clone()
        del y
        assert type(node._raw_saved_self.data.state) is packed_tensor.Recomputed
        assert torch.equal(node._saved_self, expected)
    finally:
        library._destroy()
