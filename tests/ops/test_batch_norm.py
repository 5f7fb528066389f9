"""Every op against the float64 reference, in every layout, dtype and activation."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastvit import ops
from fastvit.memory import peak_bytes
from ops import reference
from ops.inputs import (
    ACTIVATION_PARAM,
    ACTIVATIONS,
    CORE_LAYOUTS,
    DTYPES,
    INVERTIBLE,
    LAYOUTS,
    LayerInputs,
    assert_matches_reference,
    assert_repeats_bits,
    clone_with_strides,
    make_differently_strided,
    make_generator,
)
from ops.tolerances import FROM_OUTPUT, assert_close_enough, relative_error

pytestmark = pytest.mark.cuda_model


def options(case, activation):
    return {"activation": activation, "activation_param": ACTIVATION_PARAM, "channel_dim": case.channel_dim}


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
def test_batch_norm_ops_match_the_reference_and_each_other(layout, dtype, activation, residual, device):
    """Each op against the reference; one that makes the statistics that it uses has the bits of two ops."""
    case = LayerInputs(layout, dtype, device)
    tail = case.weight, case.bias, case.residual if residual else None
    given, kept = options(case, activation), case.x.clone()
    (moments,) = assert_matches_reference("bn_stats", case.x, case.channel_dim)
    y, saved, *buffers = assert_matches_reference(
        "bn_forward", case.x, *tail, moments=moments, running=case, **given
    )
    assert y.stride() == torch.empty_like(case.x).stride() and torch.equal(case.x, kept)
    local = case.copy_buffers()
    same([*ops.bn_forward(case.x, *tail, **local, **given), *local.values()], [y, saved, *buffers])
    same([ops.bn_apply(case.x, saved, *tail, **given)], [y])
    evaluated, constants = ops.bn_forward(case.x, *tail, **case.copy_buffers(), **given, training=False)
    assert torch.equal(ops.bn_apply(case.x, constants, *tail, **given), evaluated)

    arguments = case.x, case.dy, saved, *tail
    (sums,) = assert_matches_reference("bn_reduce", *arguments, **given)
    dx, dresidual, _ = assert_matches_reference("bn_backward", *arguments, **given, global_sums=sums[0])
    same(ops.bn_backward(*arguments, **given), (dx, dresidual, sums[0]))
    assert_matches_reference("bn_backward", *arguments, **given, training=False)


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_that_invert_y_match_the_reference(layout, dtype, activation, device):
    """Written over x or not, and the backward from y."""
    case = LayerInputs(layout, dtype, device)
    parameters, given = (case.weight, case.bias), options(case, activation)
    (moments,) = assert_matches_reference("bn_stats", case.x, case.channel_dim)
    y, saved, *buffers = assert_matches_reference(
        "bn_forward_inplace", case.x, *parameters, moments=moments, running=case, **given
    )
    written, local = clone_with_strides(case.x), case.copy_buffers()
    same([ops.bn_forward_inplace(written, *parameters, **local, **given), written], [saved, y])
    same(local.values(), buffers)
    for made in (moments, None):
        new = ops.bn_forward(
            case.x, *parameters, moments=made, **case.copy_buffers(), **given, invertible=True
        )
        assert torch.equal(new[0], y) and torch.equal(new[1], saved)  # y may have other strides

    arguments, given = (y, case.dy, saved, *parameters), given | {"from_output": True}
    (sums,) = assert_matches_reference("bn_reduce", *arguments, **given)
    dx, none, _ = assert_matches_reference("bn_backward", *arguments, **given, global_sums=sums[0])
    same(ops.bn_backward(*arguments, **given), (dx, none, sums[0]))
    assert_matches_reference("bn_backward", *arguments, **given, training=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_mixed_layouts_of_x_and_dy(layout, dtype, device):
    """A gradient need not have the layout of the input: expanded, transposed, channels_last."""
    case = LayerInputs(layout, dtype, device)
    saved = reference.bn_forward(case.x)[1]
    n, c, h, w = case.x.shape
    for dy in (
        case.dy.contiguous()
        if layout == "nhwc_c13"
        else case.dy.contiguous(memory_format=torch.channels_last),
        torch.tensor(0.7, dtype=dtype, device=device).expand(n, c, h, w),
        case.dy.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        case.dy[:, :1].expand(n, c, h, w),
    ):
        rest = saved, case.weight, case.bias, None, "leaky_relu"
        assert_matches_reference("bn_reduce", case.x, dy, *rest)
        sums = reference.bn_reduce(case.x, dy, *rest)
        assert_matches_reference("bn_backward", case.x, dy, *rest, global_sums=sums[0])


def agree_both_ways(case, *tail, in_place=False, **given):
    """Each op of a step against the reference; y, `saved` and the residual's gradient."""
    moments = ops.bn_stats(case.x, case.channel_dim)
    forward = "bn_forward_inplace" if in_place else "bn_forward"
    y, saved, *_ = assert_matches_reference(forward, case.x, *tail, moments=moments, running=case, **given)
    arguments, given = (y if in_place else case.x, case.dy, saved, *tail), given | {"from_output": in_place}
    (sums,) = assert_matches_reference("bn_reduce", *arguments, **given)
    _, dresidual, _ = assert_matches_reference("bn_backward", *arguments, **given, global_sums=sums[0])
    return y, saved, dresidual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_mixed_layouts_of_x_and_residual(layout, dtype, device):
    """A residual has strides of its own, and its gradient has them too."""
    case, given = LayerInputs(layout, dtype, device), {"activation": "gelu"}
    for residual in make_differently_strided(case.residual).values():
        assert residual.stride() != case.x.stride()
        tail = case.weight, case.bias, residual
        y, saved, dresidual = agree_both_ways(case, *tail, **given)
        assert dresidual.stride() == torch.empty_like(residual).stride()
        same([ops.bn_apply(case.x, saved, *tail, **given)], [y])


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_parameters_and_buffers_of_16_bits(layout, dtype, parameters, device):
    case = LayerInputs(layout, dtype, device, parameters=parameters)
    given = options(case, "leaky_relu")
    agree_both_ways(case, case.weight, case.bias, case.residual, **given)
    agree_both_ways(case, case.weight, case.bias, in_place=True, **given)


@pytest.mark.parametrize("op", ["bn_forward", "bn_forward_inplace"])
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_without_parameters_and_with_running_statistics(layout, op, device):
    """No weight, no bias; not in training the running statistics normalise and nothing is written."""
    case = LayerInputs(layout, torch.float32, device)
    for weight, bias in ((None, None), (case.weight, None), (None, case.bias)):
        given = dict(weight=weight, bias=bias, training=False, **options(case, "leaky_relu"))
        _, saved, *buffers = assert_matches_reference(op, case.x, running=case, **given)
        assert saved[-2:].tolist() == [math.inf, 0]
        assert all(map(torch.equal, buffers, case.copy_buffers().values()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics_match_the_reference(dtype, device):
    """Unbiased variance, any dtype of the buffers, and a cumulative average without a host read."""
    case = LayerInputs("nchw", torch.float32, device, parameters=dtype)
    ours, theirs = case.copy_buffers(), case.copy_buffers()
    for step, momentum in enumerate((0.1, None, 0.0, 1.0, None)):
        x = case.x + step
        moments = ops.bn_stats(x)
        local = {name: value.clone() for name, value in ours.items()}
        ops.bn_forward(x, **local, momentum=momentum)
        ops.bn_forward(x, moments=moments, **ours, momentum=momentum)
        same(local.values(), ours.values())
        reference.bn_forward(x, moments=moments, **theirs, momentum=momentum)
        assert_close_enough(ours["running_mean"], theirs["running_mean"], row="running")
        assert_close_enough(ours["running_var"], theirs["running_var"], row="running")
        assert ours["num_batches_tracked"] == 4 + step
        theirs = {name: value.clone() for name, value in ours.items()}  # roundings must not pile up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 6), (0, 4, 0, 2)])
def test_merging_ranks_equals_one_big_batch(sizes, dtype, device):
    x = (torch.randn(sum(sizes), 7, 5, 3, dtype=torch.float64) * 3 + 100).to(dtype).to(device)
    rows = reference.merge_moments(torch.stack([ops.bn_stats(part) for part in x.split(sizes)]))
    whole, whole_saved = ops.bn_forward(x, moments=ops.bn_stats(x), activation="relu")
    parts = [ops.bn_forward(part, moments=rows, activation="relu") for part in x.split(sizes)]
    for _, saved in parts:
        assert_close_enough(saved, whole_saved, row="bn_stats")
        assert torch.equal(saved, parts[0][1])
    assert_close_enough(torch.cat([y for y, _ in parts]), whole, row="bn_stats")


def test_counts_are_exact_beyond_2_to_the_24(device):
    """Two floats of 24 bits: a float32 count would lose the odd ones."""
    for count in (2**24 + 1, 2**31 + 2**24 + 10):
        moments = torch.tensor([0.0, 0.0, *reference.pack_count(count)], device=device)
        _, saved = ops.bn_forward(torch.zeros(2, 1, 2, device=device), moments=moments)
        assert reference.unpack_count(saved).item() == count


@pytest.mark.parametrize("in_place", [False, True])
def test_a_nan_count_poisons_outputs_and_changes_no_statistics(in_place, device):
    """NaN, the count too: y and saved are NaN, and nothing else is written."""
    x = torch.randn(4, 3, 5, device=device)
    running = {
        "running_mean": torch.zeros(3, device=device),
        "running_var": torch.ones(3, device=device),
        "num_batches_tracked": torch.tensor(7, device=device),
    }
    before = [t.clone() for t in running.values()]
    given = running | {"moments": torch.full((8,), float("nan"), device=device)}
    for momentum in (0.1, None):
        if in_place:
            y = x.clone()
            saved = ops.bn_forward_inplace(y, **given, momentum=momentum)
        else:
            y, saved = ops.bn_forward(x, **given, momentum=momentum)
        assert y.isnan().all() and saved.isnan().all()
        assert all(map(torch.equal, running.values(), before))
        for sums in (torch.full((6,), float("nan"), device=device), torch.zeros(6, device=device)):
            assert ops.bn_backward(x, x, saved, global_sums=sums)[0].isnan().all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13", "nc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_far_larger_than_deviation(layout, dtype, device):
    """sum of squares minus square of sums would give NaN or 100% here."""
    case = LayerInputs(layout, torch.float64, device)
    x = (case.x * 1e-2 + 1e3).to(dtype)
    moments, want = ops.bn_stats(x), reference.bn_stats(x)
    c = case.channels
    torch.testing.assert_close(moments[c : 2 * c], want[c : 2 * c], rtol=1e-5, atol=0)
    torch.testing.assert_close(moments[:c], want[:c], rtol=1e-7, atol=0)


@pytest.mark.parametrize("every", [4, 16, 32, 128, 1024])
def test_moments_survive_outliers_at_the_pivot(every, device):
    """Outliers at equal distances, so that some group begins with one, in planes and in rows."""
    for shape, channel_dim in (((4, 8, 32, 32), 1), ((4096, 8), 1), ((16, 64, 64), 2)):
        c = shape[channel_dim]
        x = torch.randn(shape, generator=make_generator()).to(device)
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
    given = {"activation": "elu", "activation_param": 1.5, "from_output": True}
    (sums,) = ops.bn_reduce(y, torch.ones_like(y), saved, **given)
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
    given = {"activation": activation, "activation_param": ACTIVATION_PARAM}
    want = reference.act_forward(wide, **given)
    for y in (ops.bn_apply(x, saved, **given), ops.act_forward(x, **given)):
        assert ((y.double() - want).abs() <= rounding * want.abs() + least).all()
    want, _ = reference.act_backward(wide, torch.ones_like(wide), **given)
    through, *_ = ops.bn_backward(x, dy, saved, **given, training=False)
    for dx in (through, ops.act_backward(x, dy, **given)[0]):
        assert ((dx.double() - want).abs() <= rounding * want.abs() + 1e-5).all()


def test_moments_of_values_near_the_ends_of_the_range(device):
    for scale in (1e-18, 1e15):
        x = torch.randn(8, 3, 40, device=device) * scale
        torch.testing.assert_close(ops.bn_stats(x), reference.bn_stats(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 5, 3, 3), (0, 5), (4, 5, 0), (0, 7, 5)])
def test_empty_tensors_give_zero_moments_and_keep_running_statistics(shape, device):
    """An empty rank: zero moments, running statistics that stay when all are empty, counted batches."""
    channel_dim = 2 if shape == (0, 7, 5) else 1
    x = torch.empty(shape, device=device)
    moments = ops.bn_stats(x, channel_dim)
    assert moments.tolist() == reference.bn_stats(x, channel_dim).tolist() == [0.0] * 12
    mean, var = torch.ones(5, device=device), torch.ones(5, device=device)
    tracked = torch.tensor(2, device=device)
    running = {"running_mean": mean, "running_var": var, "num_batches_tracked": tracked}
    given = {"channel_dim": channel_dim}
    for made, count in ((moments, 3), (None, 4)):
        y, saved = ops.bn_forward(x, moments=made, **running, momentum=None, **given)
        assert y.shape == shape and saved[10:].tolist() == [0, 0]
        assert mean.tolist() == var.tolist() == [1.0] * 5 and tracked == count
    assert ops.bn_apply(x, saved, **given).shape == shape
    assert ops.bn_reduce(x, x, saved, **given).tolist() == [[0.0] * 10]
    sums = torch.ones(10, device=device)
    for from_output in (False, True):
        for global_sums, local_sums in ((sums, []), (None, [0.0] * 10)):
            dx, dresidual, made = ops.bn_backward(
                x, x, saved, **given, from_output=from_output, global_sums=global_sums
            )
            assert dx.shape == shape and dresidual.numel() == 0 and made.tolist() == local_sums
    other = ops.bn_stats(torch.randn(9, 5, device=device))
    ops.bn_forward_inplace(x, moments=other, **running, momentum=1.0, **given)
    assert_close_enough(mean, other[:5], row="running")


@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_nan_and_infinity_stay_in_their_channel(layout, device):
    case = LayerInputs(layout, torch.float32, device)
    x = case.x.clone()
    x[1, 2, 3, 4] = float("nan")
    x[0, 3, 0, 0] = float("inf")
    for activation in ACTIVATIONS:
        y, saved = ops.bn_forward(x, moments=ops.bn_stats(x), activation=activation)
        finite = [c for c in range(case.channels) if c not in (2, 3)]
        assert y[:, 2].isnan().all() and not y[:, finite].isnan().any()
        assert y[:, 3].isnan().all()
        (sums,) = ops.bn_reduce(x, case.dy, saved, activation=activation)
        dx, *_ = ops.bn_backward(x, case.dy, saved, activation=activation, global_sums=sums)
        assert dx[:, 2].isnan().all() and not dx[:, finite].isnan().any()


@pytest.mark.parametrize("shape", [(2, 1, 362, 191), (9001, 16)])
def test_results_do_not_depend_on_slices_or_threads(shape, device):
    """Large enough for three slices; of two planes, the middle slice takes a part of each.

    The bits of repeated calls are the same, with any number of threads.
    """
    x, dy = (
        torch.randn(shape, generator=make_generator(seed), dtype=torch.float64).to(device) for seed in (0, 1)
    )
    x += 3
    moments = reference.bn_stats(x)
    saved = reference.bn_forward(x, moments=moments)[1]
    leaky = {"activation": "leaky_relu"}
    from_output = leaky | {"from_output": True}

    def run():
        y = x.clone()
        own = ops.bn_forward_inplace(y, **leaky)
        reduced = ops.bn_reduce(x, dy, saved)[0], ops.bn_reduce(y, dy, own, **from_output)[0]
        dx = ops.bn_backward(y, dy, own, **from_output, global_sums=reduced[1])[0]
        return ops.bn_stats(x), *reduced, y, own, dx

    got = run()
    assert_close_enough(got[0], moments, row="bn_stats")
    assert_close_enough(got[1], reference.bn_reduce(x, dy, saved)[0], row="bn_reduce")
    assert_repeats_bits(run)


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


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_of_other_instruction_sets(capability):
    """They are chosen on machines without AVX-512. The tests run in a process that is told to take them."""
    tests = ("test_ops_that_invert_y_match_the_reference", "test_rounding_to_storage_is_to_nearest_even")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [
        f"{Path(__file__).parents[1] / 'project/test_info.py'}::test_facts_name_torch_and_the_kernels_that_were_built"
    ]
    command += [f"{__file__}::{name}" for name in tests]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "this build has no CPU kernels for" in run.stdout:
        pytest.skip("built for this machine's instruction set alone; FASTVIT_CPU=all builds all")
    assert run.returncode == 0, run.stdout[-3000:]


def allocating_calls(x: torch.Tensor):
    """(op, the activations that it makes, a call) of each op of an activation like x."""
    dy, residual = torch.randn_like(x), torch.randn_like(x)
    a, gate = torch.cat([x, x], 1).chunk(2, 1)
    moments = ops.bn_stats(x)
    _, saved = ops.bn_forward(x, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved)
    added = {"residual": residual, "activation": "relu"}
    leaky = {"activation": "leaky_relu"}
    from_output = leaky | {"from_output": True}
    return [
        ("bn_stats", 0, lambda: ops.bn_stats(x)),
        ("bn_forward", 1, lambda: ops.bn_forward(x, moments=moments, **added)),
        ("bn_apply", 1, lambda: ops.bn_apply(x, saved, residual=residual, activation="gelu")),
        ("bn_forward_inplace", 0, lambda: ops.bn_forward_inplace(x, moments=moments, **leaky)),
        ("bn_reduce", 0, lambda: ops.bn_reduce(x, dy, saved, **added)),
        ("bn_reduce from_output", 0, lambda: ops.bn_reduce(x, dy, saved, **from_output)),
        ("bn_backward", 2, lambda: ops.bn_backward(x, dy, saved, **added, global_sums=sums)),
        (
            "bn_backward from_output",
            1,
            lambda: ops.bn_backward(x, dy, saved, **from_output, global_sums=sums),
        ),
        ("act_forward", 1, lambda: ops.act_forward(a)),
        ("act_forward with a gate", 1, lambda: ops.act_forward(a, gate)),
        ("act_backward with a gate", 2, lambda: ops.act_backward(a, gate, gate)),
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 211, 211), (128, 7, 7), (771,), (256,)])
def test_results_larger_than_the_caches(sizes, dtype):
    """They are written past the caches, in whole vectors wherever rows and planes begin: as their halves."""
    n = 36 * 2**20 // math.prod(sizes) // dtype.itemsize
    x, dy = torch.randn(2, n, *sizes, dtype=torch.float32).to(dtype)
    moments = ops.bn_stats(x)
    y, saved = ops.bn_forward(x, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved)
    calls = {
        "bn_forward": lambda x, dy: ops.bn_forward(x, moments=moments)[0],
        "bn_backward": lambda x, dy: ops.bn_backward(x, dy, saved, global_sums=sums)[0],
        "act_backward": lambda x, dy: ops.act_backward(x, dy, activation="silu")[0],
        "layer_norm_forward": lambda x, dy: ops.layer_norm_forward(x)[0],
        "layer_norm_backward": lambda x, dy: ops.layer_norm_backward(x, dy, ops.layer_norm_forward(x)[1])[0],
    }
    for name, call in calls.items():
        if name.startswith("layer_norm") and len(sizes) > 1:
            continue
        halves = [call(*pair) for pair in zip(x.chunk(2), dy.chunk(2), strict=True)]
        assert torch.equal(call(x, dy), torch.cat(halves)), name


def allocations(call):
    """How often `call` allocates memory."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ["leaky_relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_stay_in_the_cache(dtype, activation, residual, request):
    """An op that makes its own statistics walks 17 MiB and more tile by tile, with the bits of two ops."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)  # with more threads than channels there are no tiles
    sizes = 4, 35, 181, 178 if dtype == torch.float32 else 356
    x, dy, other = (torch.randn(sizes, generator=make_generator(seed)).to(dtype) for seed in range(3))
    weight, bias = torch.linspace(-1.5, 1.5, 35), torch.linspace(-0.5, 0.5, 35)
    given = {
        "weight": weight,
        "bias": bias,
        "residual": other if residual else None,
        "activation": activation,
    }

    def forward(moments=None, momentum=0.1):
        running = {"running_mean": torch.zeros(35), "running_var": torch.ones(35)}
        running["num_batches_tracked"] = torch.tensor(2)
        results = ops.bn_forward(x, **given, **running, moments=moments, momentum=momentum)
        return *results, *running.values()

    for momentum in 0.1, None:
        same(forward(momentum=momentum), forward(ops.bn_stats(x), momentum))
    saved = forward()[1]
    (sums,) = ops.bn_reduce(x, dy, saved, **given)
    *gradients, local_sums = ops.bn_backward(x, dy, saved, **given)
    same(gradients, ops.bn_backward(x, dy, saved, **given, global_sums=sums)[:2])
    same([local_sums], [sums])
    if residual:  # of other strides
        given["residual"] = other.contiguous(memory_format=torch.channels_last)
        (sums,) = ops.bn_reduce(x, dy, saved, **given)
        *gradients, local_sums = ops.bn_backward(x, dy, saved, **given)
        same(gradients, ops.bn_backward(x, dy, saved, **given, global_sums=sums)[:2])
        same([local_sums], [sums])
    elif activation == "leaky_relu":
        y, _ = ops.bn_forward(x, **given, invertible=True)
        overwritten = x.clone()
        same([ops.bn_forward_inplace(overwritten, **given), overwritten], [saved, y])
        (sums,) = ops.bn_reduce(y, dy, saved, **given, from_output=True)
        dx, _, local_sums = ops.bn_backward(y, dy, saved, **given, from_output=True)
        wanted = ops.bn_backward(y, dy, saved, **given, from_output=True, global_sums=sums)[0]
        same([dx, local_sums], [wanted, sums])
    assert_repeats_bits(lambda: ops.bn_backward(x, dy, saved, **given))
    # y and saved, but no moments
    assert allocations(lambda: ops.bn_forward(x, **given)) == 2
    assert allocations(lambda: ops.bn_forward(x[:3], **given | {"residual": None})) == 3


@pytest.mark.nightly
@pytest.mark.memory(20)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.timeout(600)
def test_more_than_2_to_the_31_elements(layout, device):
    """64-bit indices: 2^31 + 2^16 elements of bfloat16, the last ones unlike the rest."""
    x = torch.zeros(2**15 + 1, 4, 128, 128, dtype=torch.bfloat16, device=device)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    x[-1] = 1
    moments = ops.bn_stats(x)
    n = x.numel() // 4
    share = 128 * 128 / n
    assert relative_error(moments[:4], torch.full((4,), share)) < 1e-5
    assert reference.unpack_count(moments).item() == n
    leaky = {"activation": "leaky_relu"}
    saved = ops.bn_forward_inplace(x, moments=moments, eps=0.0, **leaky)
    assert x[-1].min() > 150 and x[0].max() < 0
    given = leaky | {"from_output": True}
    (sums,) = ops.bn_reduce(x, x, saved, **given)
    assert relative_error(sums[4:] / n, torch.ones(4)) < 0.02
    # With sums, what is left of two values is their rounding.
    given["training"] = False
    dx, *_ = ops.bn_backward(x, x, saved, **given)
    for part in (slice(0, 1), slice(-1, None)):
        want, *_ = reference.bn_backward(x[part], x[part], saved, **given)
        assert_close_enough(dx[part], want, row="bn_backward" + FROM_OUTPUT)
