"""layer_norm_forward and layer_norm_backward against the float64 reference; LayerNorm against torch's."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastvit
from fastvit import ops
from ops import reference
from ops.inputs import DTYPES, assert_repeats_bits, make_generator, run_layer_step
from ops.tolerances import assert_close_enough

pytestmark = pytest.mark.cuda_model

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PAIRS = [(dtype, dtype) for dtype in DTYPES] + [(F32, BF16), (F32, F16)]
# Columns: one, odd, whole vectors, several warps and several parts of a row. Rows: one, few, many slices.
SHAPES = [
    *((5, 1), (1, 1), (257,), (7, 13), (3, 17, 48), (70, 64), (2, 65, 192), (2100, 33)),
    *((4, 3, 768), (5, 2049), (40, 1024), (3, 4100), (2, 9001), (2, 1, 3, 1, 2, 24)),
]


def inputs(shape, dtype, output_dtype, device, parameters=F32):
    g = make_generator()

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=F64)

    x, dy = randn(*shape) * 2 + 3, randn(*shape)
    weight, bias = randn(shape[-1]) + 1, randn(shape[-1])
    if dtype == F64:
        parameters = F64
    casts = ((x, dtype), (dy, output_dtype), (weight, parameters), (bias, parameters))
    return [t.to(kind).to(device) for t, kind in casts]


def compare(x, dy, weight, bias, output_dtype=None, eps=1e-5):
    y, saved = ops.layer_norm_forward(x, weight, bias, eps, output_dtype)
    want_y, want_saved = reference.layer_norm_forward(x, weight, bias, eps, output_dtype)
    assert y.dtype == want_y.dtype and y.is_contiguous()
    assert_close_enough(y, want_y, row="layer_norm_forward")
    assert_close_enough(saved, want_saved, row="layer_norm_saved", dtype=x.dtype)
    dx, sums = ops.layer_norm_backward(x, dy, want_saved, weight)
    want_dx, want_sums = reference.layer_norm_backward(x, dy, want_saved, weight)
    assert dx.dtype == x.dtype and dx.is_contiguous()
    # what dx would be if nothing were taken off, as all of it is from a row of one value
    invstd = want_saved.chunk(2)[1].double().view(*x.shape[:-1], 1)
    whole = (invstd * dy.double() * (1 if weight is None else weight.double())).abs().max().item()
    assert_close_enough(dx, want_dx, row="layer_norm_backward", least_scale=whole)
    assert_close_enough(
        sums,
        want_sums,
        row="layer_norm_sums",
        dtype=x.dtype,
        least_scale=max(x.numel() / x.shape[-1], 1) ** 0.5,
    )
    alone, none = ops.layer_norm_backward(x, dy, want_saved, weight, False)
    assert torch.equal(alone, dx) and none.numel() == 0


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_ops_match_the_reference(shape, dtypes, device):
    x, dy, weight, bias = inputs(shape, *dtypes, device)
    compare(x, dy, weight, bias, dtypes[1])


@pytest.mark.parametrize("parameters", DTYPES)
def test_without_parameters_and_in_their_own_dtype(parameters, device):
    x, dy, weight, bias = inputs((9, 40), F32, F32, device, parameters)
    for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
        compare(x, dy, *given, eps=0.1)


def test_operands_that_are_not_contiguous(device):
    x, dy, weight, bias = inputs((6, 5, 48), F32, F32, device)
    for strange in (
        lambda t: t[1:, ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t.permute(0, 2, 1).contiguous().permute(0, 2, 1),
        lambda t: t[:1].expand(6, 5, 48),
        lambda t: t.flatten()[1:-47].view(-1, 48),  # not at 16 bytes
    ):
        compare(strange(x), strange(dy), weight, bias)
    compare(x, dy[:, :1, :1].expand(6, 5, 48), weight, bias)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_an_input_without_rows_gives_zero_sums(shape, device):
    x, weight = torch.empty(shape, device=device), torch.ones(8, device=device)
    y, saved = ops.layer_norm_forward(x, weight, None)
    assert y.shape == shape and saved.shape == (0,)
    dx, sums = ops.layer_norm_backward(x, y, saved, weight)
    assert dx.shape == shape and sums.tolist() == [0.0] * 16


def test_mean_far_larger_than_deviation(device):
    """A sum of squares minus a square of sums would give NaN here."""
    for columns in (64, 4100):
        x = (torch.randn(5, columns, generator=make_generator(), dtype=F64) * 1e-2 + 1e3).float().to(device)
        _, saved = ops.layer_norm_forward(x)
        _, want = reference.layer_norm_forward(x)
        torch.testing.assert_close(saved, want, rtol=1e-5, atol=0)


def test_nan_and_infinity_stay_in_their_row(device):
    x = torch.randn(6, 40, device=device)
    x[1, 3], x[4, 39] = float("nan"), float("inf")
    y, saved = ops.layer_norm_forward(x)
    dx, _ = ops.layer_norm_backward(x, x, saved)
    for result in (y, dx):
        assert result.isnan().any(1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_repeats_and_threads_give_the_same_bits(dtypes, device):
    x, dy, weight, bias = inputs((4000, 96), *dtypes, device)

    def run():
        y, saved = ops.layer_norm_forward(x, weight, bias, 1e-5, dtypes[1])
        return y, saved, *ops.layer_norm_backward(x, dy, saved, weight)

    assert_repeats_bits(run)


def test_ops_allocate_little_beside_their_outputs():
    """Counted by the profiler: outputs, and little beside them."""
    x = torch.randn(4096, 256)
    _, saved = ops.layer_norm_forward(x)
    for call in (lambda: ops.layer_norm_forward(x), lambda: ops.layer_norm_backward(x, x, saved)):
        with torch.profiler.profile(profile_memory=True) as profile:
            kept = call()
        allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages())
        assert x.nbytes <= allocated <= 1.01 * x.nbytes + 4096, allocated
        del kept


def pair(*arguments, device="cpu", **options):
    """Ours and torch's, with the same parameters."""
    ours = fastvit.LayerNorm(*arguments, device=device, **options)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, 1.0)
    options.pop("output_dtype", None)
    theirs = nn.LayerNorm(*arguments, device=device, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape,normalized,options",
    [
        ((3, 17, 48), 48, {}),
        ((3, 5, 7, 8), (7, 8), {"eps": 0.1}),
        ((4, 13), (13,), {"bias": False}),
        ((2, 6, 4), [6, 4], {"elementwise_affine": False}),
    ],
)
def test_a_layer_norm_gives_torchs_results(shape, normalized, options, dtype, device):
    ours, theirs = pair(normalized, dtype=dtype, device=device, **options)
    x, dy = (torch.randn(shape, dtype=F64).to(dtype).to(device) for _ in range(2))
    want = run_layer_step(theirs.double(), x.double(), dy)
    for got, exact in zip(run_layer_step(ours, x, dy), want, strict=True):
        assert got.dtype == dtype
        assert_close_enough(got, exact, row="layer", dtype=dtype)
    assert repr(ours) == repr(theirs)


def test_checkpoints_move_between_ours_and_torchs(device):
    ours, theirs = pair(24, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is fastvit.LayerNorm
        x = torch.randn(5, 24, device=device)
        assert torch.equal(other(x), ours(x))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_has_nothing_left_to_cast(dtype, device):
    ours, theirs = pair(48, device=device)
    fixed = fastvit.LayerNorm(48, device=device, output_dtype=F32)
    linear = nn.Linear(48, 8, device=device)
    x, dy = torch.randn(9, 48, device=device), torch.randn(9, 8, device=device)
    with torch.autocast(device, dtype):
        assert ours(x).dtype == dtype and fixed(x).dtype == F32
        assert ours(x.to(dtype)).dtype == dtype and ours(x.double()).dtype == F64
        for got, want in zip(
            run_layer_step(nn.Sequential(ours, linear), x, dy),
            run_layer_step(nn.Sequential(theirs, linear), x, dy),
            strict=True,
        ):
            assert got.dtype == want.dtype
            assert_close_enough(got, want, row="layer", dtype=dtype)
        with torch.autocast(device, enabled=False):
            assert ours(x).dtype == F32
    assert ours(x).dtype == F32 and "output_dtype=torch.float32" in repr(fixed)


def test_what_backward_keeps(device):
    layer, kept = fastvit.LayerNorm(64, device=device), []
    x = torch.randn(10, 64, device=device, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = {p.data_ptr() for p in layer.parameters()}
    assert sorted(t.nbytes for t in kept if t.data_ptr() not in own) == [2 * 10 * 4, x.nbytes]


def test_on_meta_there_are_shapes_alone():
    y = fastvit.LayerNorm((2, 8), device="meta")(torch.empty(3, 2, 8, device="meta", dtype=BF16))
    assert y.is_meta and y.shape == (3, 2, 8) and y.dtype == BF16


def test_frozen_parts(device):
    for frozen in ("weight", "bias", "both", "x"):
        layer = fastvit.LayerNorm(32, device=device)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen not in (name, "both"))
        x = torch.randn(6, 32, device=device, requires_grad=frozen != "x")
        layer(x).square().sum().backward()
        for name, tensor in (("x", x), *layer.named_parameters()):
            assert (tensor.grad is None) == (frozen == name or (frozen == "both" and name != "x"))
