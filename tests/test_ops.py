"""Every op against the float64 reference, in every layout, dtype and activation."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import (
    ACTIVATIONS,
    CORE_LAYOUTS,
    DTYPES,
    INVERTIBLE,
    LAYOUTS,
    PARAM,
    Case,
    agree,
    check_threads,
    fresh,
    generator,
)
from tolerances import check, error

from fastvit import ops, reference
from fastvit.memory import peak_bytes


def options(case, activation):
    return {"activation": activation, "activation_param": PARAM, "channel_dim": case.channel_dim}


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


# Every layout with a kink and a smooth one, the others where the kernels' paths differ.
LAYOUT_ACTIVATION = [
    (layout, activation)
    for layout in LAYOUTS
    for activation in ACTIVATIONS
    if layout in CORE_LAYOUTS or activation in ("identity", "relu", "gelu")
]


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout,activation", LAYOUT_ACTIVATION)
def test_bn_ops(layout, dtype, activation, residual, device):
    """Each op against the reference; one that makes the statistics that it uses has the bits of two ops."""
    case = Case(layout, dtype, device)
    rest = case.weight, case.bias, case.z if residual else None
    given, kept = options(case, activation), case.x.clone()
    (moments,), _ = agree("bn_stats", case.x, case.channel_dim)
    (y, saved, *buffers), _ = agree("bn_forward", case.x, moments, *rest, running=case, **given)
    assert y.stride() == torch.empty_like(case.x).stride() and torch.equal(case.x, kept)
    local = case.buffers()
    same([*ops.bn_forward(case.x, None, *rest, **local, **given), *local.values()], [y, saved, *buffers])
    same([ops.bn_apply(case.x, saved, *rest, **given)], [y])
    evaluated, constants = ops.bn_forward(case.x, None, *rest, **case.buffers(), **given, training=False)
    assert torch.equal(ops.bn_apply(case.x, constants, *rest, **given), evaluated)

    *parameters, z = rest
    arguments = case.x, case.dy, z, saved
    (sums,), _ = agree("bn_reduce", *arguments, *parameters, **given)
    (dx, dz, _), _ = agree("bn_backward", *arguments, sums[0], *parameters, **given)
    same(ops.bn_backward(*arguments, None, *parameters, **given), (dx, dz, sums[0]))
    agree("bn_backward", *arguments, None, *parameters, **given, training=False)


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_abn_ops(layout, dtype, activation, device):
    case = Case(layout, dtype, device)
    parameters, given = (case.weight, case.bias), options(case, activation)
    (moments,), _ = agree("bn_stats", case.x, case.channel_dim)
    (y, saved, *buffers), _ = agree("abn_forward_", case.x, moments, *parameters, running=case, **given)
    written, local = fresh(case.x), case.buffers()
    own = ops.abn_forward_(written, None, *parameters, **local, **given)
    same([written, own, *local.values()], [y, saved, *buffers])
    for made in (moments, None):
        new = ops.abn_forward(case.x, made, *parameters, **case.buffers(), **given)
        assert torch.equal(new[0], y) and torch.equal(new[1], saved)  # y may have other strides

    arguments = y, case.dy, saved
    (sums,), _ = agree("abn_reduce", *arguments, *parameters, **given)
    (dx, _), _ = agree("abn_backward", *arguments, sums[0], *parameters, **given)
    same(ops.abn_backward(*arguments, None, *parameters, **given), (dx, sums[0]))
    agree("abn_backward", *arguments, None, *parameters, **given, training=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_mixed_layouts_of_x_and_dy(layout, dtype, device):
    """A gradient need not have the layout of the input: expanded, transposed, channels_last."""
    case = Case(layout, dtype, device)
    saved = reference.bn_forward(case.x, reference.bn_stats(case.x))[1]
    n, c, h, w = case.x.shape
    for dy in (
        case.dy.contiguous()
        if layout == "nhwc_c13"
        else case.dy.contiguous(memory_format=torch.channels_last),
        torch.tensor(0.7, dtype=dtype, device=device).expand(n, c, h, w),
        case.dy.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        case.dy[:, :1].expand(n, c, h, w),
    ):
        rest = case.weight, case.bias, "leaky_relu"
        _, (sums,) = agree("bn_reduce", case.x, dy, None, saved, *rest)
        agree("bn_backward", case.x, dy, None, saved, sums[0], *rest)


@pytest.mark.parametrize("in_place", [False, True], ids=["bn", "abn"])
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_without_parameters_and_with_running_statistics(layout, in_place, device):
    """No weight, no bias; not in training the running statistics normalise and nothing is written."""
    case = Case(layout, torch.float32, device)
    op = "abn_forward_" if in_place else "bn_forward"
    for weight, bias in ((None, None), (case.weight, None), (None, case.bias)):
        given = dict(weight=weight, bias=bias, training=False, **options(case, "leaky_relu"))
        (_, saved, *buffers), _ = agree(op, case.x, None, running=case, **given)
        assert saved[-2:].tolist() == [math.inf, 0]
        assert all(map(torch.equal, buffers, case.buffers().values()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics(dtype, device):
    """Unbiased variance, any dtype of the buffers, and a cumulative average without a host read."""
    case = Case("nchw", torch.float32, device, parameters=dtype)
    ours, theirs = case.buffers(), case.buffers()
    for step, momentum in enumerate((0.1, None, 0.0, 1.0, None)):
        x = case.x + step
        moments, versions = ops.bn_stats(x), [buffer._version for buffer in ours.values()]
        local = {name: value.clone() for name, value in ours.items()}
        ops.bn_forward(x, **local, momentum=momentum)
        ops.bn_forward(x, moments, **ours, momentum=momentum)
        same(local.values(), ours.values())
        assert all(b._version > version for b, version in zip(ours.values(), versions, strict=True))
        reference.bn_forward(x, moments, **theirs, momentum=momentum)
        check("running", ours["running_mean"], theirs["running_mean"])
        check("running", ours["running_var"], theirs["running_var"])
        assert ours["num_batches_tracked"] == 4 + step
        theirs = {name: value.clone() for name, value in ours.items()}  # roundings must not pile up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 6), (0, 4, 0, 2)])
def test_merging_ranks_equals_one_big_batch(sizes, dtype, device):
    x = (torch.randn(sum(sizes), 7, 5, 3, dtype=torch.float64) * 3 + 100).to(dtype).to(device)
    rows = reference.merge_moments(torch.stack([ops.bn_stats(part) for part in x.split(sizes)]))
    whole, whole_saved = ops.bn_forward(x, ops.bn_stats(x), activation="relu")
    parts = [ops.bn_forward(part, rows, activation="relu") for part in x.split(sizes)]
    for _, saved in parts:
        check("bn_stats", saved, whole_saved)
        assert torch.equal(saved, parts[0][1])
    check("bn_stats", torch.cat([y for y, _ in parts]), whole)


def test_counts_are_exact_beyond_2_to_the_24(device):
    """Two floats of 24 bits: a float32 count would lose the odd ones."""
    for count in (2**24 + 1, 2**31 + 2**24 + 10):
        moments = torch.tensor([0.0, 0.0, *reference.pack_count(count)], device=device)
        _, saved = ops.bn_forward(torch.zeros(2, 1, 2, device=device), moments)
        assert reference.unpack_count(saved).item() == count


@pytest.mark.parametrize("in_place", [False, True])
def test_moments_that_could_not_be_had(in_place, device):
    """NaN, the count too: y and saved are NaN, and nothing else is written."""
    x = torch.randn(4, 3, 5, device=device)
    running = [torch.zeros(3, device=device), torch.ones(3, device=device), torch.tensor(7, device=device)]
    before = [t.clone() for t in running]
    moments = torch.full((8,), float("nan"), device=device)
    for momentum in (0.1, None):
        if in_place:
            y = x.clone()
            saved = ops.abn_forward_(y, moments, None, None, *running, momentum)
        else:
            y, saved = ops.bn_forward(x, moments, None, None, None, *running, momentum)
        assert y.isnan().all() and saved.isnan().all()
        assert all(map(torch.equal, running, before))
        for sums in (torch.full((6,), float("nan"), device=device), torch.zeros(6, device=device)):
            assert ops.bn_backward(x, x, None, saved, sums)[0].isnan().all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13", "nc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_far_larger_than_deviation(layout, dtype, device):
    """sum of squares minus square of sums would give NaN or 100% here."""
    case = Case(layout, torch.float64, device)
    x = (case.x * 1e-2 + 1e3).to(dtype)
    moments, want = ops.bn_stats(x), reference.bn_stats(x)
    c = case.channels
    torch.testing.assert_close(moments[c : 2 * c], want[c : 2 * c], rtol=1e-5, atol=0)
    torch.testing.assert_close(moments[:c], want[:c], rtol=1e-7, atol=0)


@pytest.mark.parametrize("every", [4, 16, 32, 128, 1024])
def test_outliers(every, device):
    """Outliers at equal distances, so that some group begins with one, in planes and in rows."""
    for shape, channel_dim in (((4, 8, 32, 32), 1), ((4096, 8), 1), ((16, 64, 64), 2)):
        c = shape[channel_dim]
        x = torch.randn(shape, generator=generator()).to(device)
        x.view(-1)[::every] += 1e5
        got, want = ops.bn_stats(x, channel_dim), reference.bn_stats(x, channel_dim)
        torch.testing.assert_close(got[c : 2 * c], want[c : 2 * c], rtol=1e-4, atol=0)
        deviation = (want[c : 2 * c] * c / x.numel()).sqrt()
        assert ((got[:c] - want[:c]).abs() < 1e-5 * deviation).all()


NEGATIVE = torch.cat([-torch.logspace(-12, 1.2, 4001, dtype=torch.float64), -torch.linspace(0.2, 0.6, 500)])


def like_identity(channels, device):
    """Saved statistics that change nothing: mean 0, deviation 1, of many values."""
    return torch.tensor([0.0] * channels + [1.0] * channels + [1.0, 0.0], device=device)


def test_elu_keeps_its_digits_near_zero(device):
    """Errors relative to each value, not to the largest: forward, and the value recovered in place."""
    v = NEGATIVE.float()[None].to(device)
    y = ops.bn_apply(v, like_identity(v.shape[1], device), activation="elu", activation_param=1.5)
    torch.testing.assert_close(y.double(), 1.5 * torch.expm1(v.double()), rtol=1e-6, atol=0)
    y = (torch.expm1(NEGATIVE) * 1.5).float()[None].to(device)
    y = y[:, y[0] > -1.2]  # nearer to saturation the rounding of y shows
    saved = like_identity(y.shape[1], device)
    (sums,) = ops.abn_reduce(y, torch.ones_like(y), saved, activation="elu", activation_param=1.5)
    want = torch.log1p(y.double() / 1.5) * (y.double() + 1.5)
    torch.testing.assert_close(sums[y.shape[1] :].double(), want[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "elu"])
def test_all_16_bit_values(activation, dtype, device):
    """All finite values through the activation and its gradient: rounded once, up to 2^-16 of a value."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)][:, None].to(device)
    saved, dy, wide = like_identity(1, device), torch.ones_like(x), x.double()
    rounding = torch.finfo(dtype).eps / 2 + 2**-16
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 2**-30
    given = {"activation": activation, "activation_param": PARAM}
    want = reference.act_forward(wide, **given)
    for y in (ops.bn_apply(x, saved, **given), ops.act_forward(x, **given)):
        assert ((y.double() - want).abs() <= rounding * want.abs() + least).all()
    want = reference.act_backward(wide, torch.ones_like(wide), **given)
    through, *_ = ops.bn_backward(x, dy, None, saved, None, **given, training=False)
    for dx in (through, ops.act_backward(x, dy, **given)):
        assert ((dx.double() - want).abs() <= rounding * want.abs() + 1e-5).all()


def test_moments_of_values_near_the_ends_of_the_range(device):
    for scale in (1e-18, 1e15):
        x = torch.randn(8, 3, 40, device=device) * scale
        torch.testing.assert_close(ops.bn_stats(x), reference.bn_stats(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 5, 3, 3), (0, 5), (4, 5, 0), (0, 7, 5)])
def test_empty(shape, device):
    """An empty rank: zero moments, running statistics that stay when all are empty, counted batches."""
    channel_dim = 2 if shape == (0, 7, 5) else 1
    x = torch.empty(shape, device=device)
    moments = ops.bn_stats(x, channel_dim)
    assert moments.tolist() == reference.bn_stats(x, channel_dim).tolist() == [0.0] * 12
    mean, var, tracked = (
        torch.ones(5, device=device),
        torch.ones(5, device=device),
        torch.tensor(2, device=device),
    )
    for made, count in ((moments, 3), (None, 4)):
        y, saved = ops.bn_forward(
            x, made, None, None, None, mean, var, tracked, None, channel_dim=channel_dim
        )
        assert y.shape == shape and saved[10:].tolist() == [0, 0]
        assert mean.tolist() == var.tolist() == [1.0] * 5 and tracked == count
    assert ops.bn_apply(x, saved, channel_dim=channel_dim).shape == shape
    assert ops.bn_reduce(x, x, None, saved, channel_dim=channel_dim).tolist() == [[0.0] * 10]
    sums = torch.ones(10, device=device)
    for given, own in ((sums, []), (None, [0.0] * 10)):
        dx, dz, made = ops.bn_backward(x, x, None, saved, given, channel_dim=channel_dim)
        assert dx.shape == shape and dz.numel() == 0 and made.tolist() == own
    assert ops.abn_backward(x, x, saved, sums, channel_dim=channel_dim)[0].shape == shape
    other = ops.bn_stats(torch.randn(9, 5, device=device))
    ops.abn_forward_(x, other, None, None, mean, var, tracked, 1.0, channel_dim=channel_dim)
    check("running", mean, other[:5])


@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_nan_and_infinity_stay_in_their_channel(layout, device):
    case = Case(layout, torch.float32, device)
    x = case.x.clone()
    x[1, 2, 3, 4] = float("nan")
    x[0, 3, 0, 0] = float("inf")
    for activation in ACTIVATIONS:
        y, saved = ops.bn_forward(x, ops.bn_stats(x), activation=activation)
        finite = [c for c in range(case.channels) if c not in (2, 3)]
        assert y[:, 2].isnan().all() and not y[:, finite].isnan().any()
        assert y[:, 3].isnan().all()
        (sums,) = ops.bn_reduce(x, case.dy, None, saved, activation=activation)
        dx, *_ = ops.bn_backward(x, case.dy, None, saved, sums, activation=activation)
        assert dx[:, 2].isnan().all() and not dx[:, finite].isnan().any()


@pytest.mark.parametrize("shape", [(2, 2, 181, 191), (9001, 16)])
def test_partial_results_of_several_tasks(shape, device):
    """Large enough for three slices; of two planes, the middle slice takes a part of each.

    The bits of repeated calls are the same, with any number of threads.
    """
    x, dy = (torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(device) for seed in (0, 1))
    x += 3
    moments = reference.bn_stats(x)
    saved = reference.bn_forward(x, moments)[1]

    def run():
        y = x.clone()
        own = ops.abn_forward_(y, None)
        reduced = ops.bn_reduce(x, dy, None, saved)[0], ops.abn_reduce(y, dy, own)[0]
        return ops.bn_stats(x), *reduced, y, own, ops.abn_backward(y, dy, own, reduced[1])[0]

    got = run()
    check("bn_stats", got[0], moments)
    check("bn_reduce", got[1], reference.bn_reduce(x, dy, None, saved)[0])
    check_threads(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_storage_is_to_nearest_even(dtype, device):
    """The vector conversions, value by value: every finite half, infinities, NaN, ties and subnormals."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).reshape(1, 1, -1).to(device)
    saved_like_identity = {
        "running_mean": torch.zeros(1, device=device),
        "running_var": torch.ones(1, device=device),
    }
    scale = torch.tensor([1.0 + 2**-9], device=device)
    y, _ = ops.bn_forward(x, weight=scale, eps=0.0, training=False, **saved_like_identity)
    want = (x.float() * scale + 0.0).to(dtype)  # + bias, which makes -0 a 0
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(7.0).view(torch.int16), want.nan_to_num(7.0).view(torch.int16))


@pytest.mark.skipif(
    torch.cuda.is_available() or "FASTVIT_TEST_DEVICE" in os.environ, reason="kernels of the CPU"
)
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_of_other_instruction_sets(capability):
    """They are chosen on machines without AVX-512. The tests run in a process that is told to take them."""
    tests = ("test_abn_ops", "test_rounding_to_storage_is_to_nearest_even")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [f"{Path(__file__).with_name('test_info.py')}::test_facts"]
    command += [f"{__file__}::{name}" for name in tests]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "this build has no CPU kernels for" in run.stdout:
        pytest.skip("built for this machine's instruction set alone; FASTVIT_CPU=all builds all")
    assert run.returncode == 0, run.stdout[-3000:]


def allocating_calls(x: torch.Tensor):
    """(op, the activations that it makes, a call) of each op of an activation like x."""
    dy, z = torch.randn_like(x), torch.randn_like(x)
    a, b = torch.cat([x, x], 1).chunk(2, 1)
    moments = ops.bn_stats(x)
    _, saved = ops.bn_forward(x, moments)
    (sums,) = ops.bn_reduce(x, dy, None, saved)
    return [
        ("bn_stats", 0, lambda: ops.bn_stats(x)),
        ("bn_forward", 1, lambda: ops.bn_forward(x, moments, z=z, activation="relu")),
        ("bn_apply", 1, lambda: ops.bn_apply(x, saved, z=z, activation="gelu")),
        ("abn_forward_", 0, lambda: ops.abn_forward_(x, moments)),
        ("bn_reduce", 0, lambda: ops.bn_reduce(x, dy, z, saved, activation="relu")),
        ("abn_reduce", 0, lambda: ops.abn_reduce(x, dy, saved)),
        ("bn_backward", 2, lambda: ops.bn_backward(x, dy, z, saved, sums, activation="relu")),
        ("abn_backward", 1, lambda: ops.abn_backward(x, dy, saved, sums)),
        ("act_forward", 1, lambda: ops.act_forward(a)),
        ("glu_forward", 1, lambda: ops.glu_forward(a, b)),
        ("glu_backward", 2, lambda: ops.glu_backward(a, b, b)),
    ]


def test_no_op_allocates_more_than_its_outputs(device):
    """The outputs and O(C) bytes; on a GPU O(C) of each block, and only the peak is counted."""
    x = torch.randn(16, 8, 64, 64, device=device)
    for name, activations, call in allocating_calls(x):
        if device == "cuda":
            torch.cuda.empty_cache()  # a cached block that is larger than an output counts as a whole
            allocated, more = peak_bytes(call, device), 1 << 20
        else:
            with torch.profiler.profile(profile_memory=True) as profile:
                kept = call()
            allocated, more = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages()), 4096
            del kept
        assert activations * x.nbytes <= allocated <= activations * x.nbytes + more, (name, allocated)


@pytest.mark.skipif(
    torch.cuda.is_available() or "FASTVIT_TEST_DEVICE" in os.environ, reason="kernels of the CPU"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 211, 211), (128, 7, 7), (771,), (256,)])
def test_results_larger_than_the_caches(sizes, dtype):
    """They are written past the caches, in whole vectors wherever rows and planes begin: as their halves."""
    n = 36 * 2**20 // math.prod(sizes) // dtype.itemsize
    x, dy = torch.randn(2, n, *sizes, dtype=torch.float32).to(dtype)
    moments = ops.bn_stats(x)
    y, saved = ops.bn_forward(x, moments)
    (sums,) = ops.bn_reduce(x, dy, None, saved)
    calls = {
        "bn_forward": lambda x, dy: ops.bn_forward(x, moments)[0],
        "bn_backward": lambda x, dy: ops.bn_backward(x, dy, None, saved, sums)[0],
        "act_backward": lambda x, dy: ops.act_backward(x, dy, "silu"),
        "layer_norm_forward": lambda x, dy: ops.layer_norm_forward(x)[0],
        "layer_norm_backward": lambda x, dy: ops.layer_norm_backward(x, dy, ops.layer_norm_forward(x)[1])[0],
    }
    for name, call in calls.items():
        if name.startswith("layer_norm") and len(sizes) > 1:
            continue
        halves = [call(*pair) for pair in zip(x.chunk(2), dy.chunk(2), strict=True)]
        assert torch.equal(call(x, dy), torch.cat(halves)), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.timeout(600)
def test_more_than_2_to_the_31_elements(layout, device):
    """64-bit indices: 2^31 + 2^16 elements of bfloat16, the last ones unlike the rest."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    x = torch.zeros(2**15 + 1, 4, 128, 128, dtype=torch.bfloat16, device=device)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    x[-1] = 1
    moments = ops.bn_stats(x)
    n = x.numel() // 4
    share = 128 * 128 / n
    assert error(moments[:4], torch.full((4,), share)) < 1e-5
    assert reference.unpack_count(moments).item() == n
    saved = ops.abn_forward_(x, moments, eps=0.0)
    assert x[-1].min() > 150 and x[0].max() < 0
    (sums,) = ops.abn_reduce(x, x, saved)
    assert error(sums[4:] / n, torch.ones(4)) < 0.02
    # With sums, what is left of two values is their rounding.
    dx, _ = ops.abn_backward(x, x, saved, training=False)
    for part in (slice(0, 1), slice(-1, None)):
        check("abn_backward", dx[part], reference.abn_backward(x[part], x[part], saved, training=False)[0])
