"""Values that a careless kernel gets wrong: outliers, NaN, huge counts, empty tensors, roundings.

The tests are of batch norm, of LayerNorm and of activations.
"""

import functools
import threading

import pytest
import torch

from fastvit import ops
from ops import reference
from ops.compare import assert_repeats_bits, assert_same_bits
from ops.inputs import LayerInputs, make_generator
from ops.matrix import ACTIVATION_PARAM, ACTIVATIONS, name_of
from ops.tolerances import assert_close_enough

pytestmark = pytest.mark.cuda_model


def make_running(channels: int, device: str) -> dict[str, torch.Tensor]:
    return {
        "running_mean": torch.zeros(channels, device=device),
        "running_var": torch.ones(channels, device=device),
        "num_batches_tracked": torch.tensor(7, device=device),
    }


def make_identity_statistics(channels: int, device: str) -> torch.Tensor:
    """Returns `saved` that changes no value: mean 0 and deviation 1, of many values."""
    return torch.tensor([0.0] * channels + [1.0] * channels + [1.0, 0.0], device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13", "nc"])
def test_moments_survive_a_mean_far_larger_than_the_deviation(layout, dtype, device):
    """The mean of squares minus the square of the mean would give NaN or 100% here."""
    case = LayerInputs(layout, torch.float64, device)
    x = (case.x * 1e-2 + 1e3).to(dtype)
    (mean, m2), (expected_mean, expected_m2) = (
        t[:-2].chunk(2) for t in (ops.bn_stats(x), reference.bn_stats(x))
    )
    torch.testing.assert_close(m2, expected_m2, rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-7, atol=0)


@pytest.mark.parametrize("columns", [64, 4100])
def test_row_statistics_survive_a_mean_far_larger_than_the_deviation(columns, device):
    x = torch.randn(5, columns, generator=make_generator(), dtype=torch.float64) * 1e-2 + 1e3
    x = x.float().to(device)
    saved, expected = ops.layer_norm_forward(x)[1], reference.layer_norm_forward(x)[1]
    torch.testing.assert_close(saved, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("distance", [4, 16, 32, 128, 1024])
def test_moments_survive_outliers_at_the_pivot(distance, device):
    """The outliers have equal distances, so that some group begins with one, in planes and in rows."""
    for shape, channel_dim in (((4, 8, 32, 32), 1), ((4096, 8), 1), ((16, 64, 64), 2)):
        channels = shape[channel_dim]
        x = torch.randn(shape, generator=make_generator()).to(device)
        x.view(-1)[::distance] += 1e5
        mean, m2 = ops.bn_stats(x, channel_dim)[:-2].chunk(2)
        expected_mean, expected_m2 = reference.bn_stats(x, channel_dim)[:-2].chunk(2)
        torch.testing.assert_close(m2, expected_m2, rtol=1e-4, atol=0)
        deviation = (expected_m2 * channels / x.numel()).sqrt()
        assert ((mean - expected_mean).abs() < 1e-5 * deviation).all()


def test_moments_of_values_near_the_ends_of_the_range(device):
    for scale in (1e-18, 1e15):
        x = torch.randn(8, 3, 40, device=device) * scale
        torch.testing.assert_close(ops.bn_stats(x), reference.bn_stats(x), rtol=1e-5, atol=0)


def test_counts_are_exact_beyond_2_to_the_24(device):
    """A float32 count would lose the odd numbers; `saved` has two floats of 24 bits."""
    for count in (2**24 + 1, 2**31 + 2**24 + 10):
        moments = torch.tensor([0.0, 0.0, *reference.pack_count(count)], device=device)
        _, saved = ops.bn_forward(torch.zeros(2, 1, 2, device=device), moments=moments)
        assert reference.unpack_count(saved).item() == count


@pytest.mark.parametrize("shape", [(0, 5, 3, 3), (0, 5), (4, 5, 0), (0, 7, 5)], ids=str)
def test_empty_tensors_give_zero_moments_and_keep_running_statistics(shape, device):
    """Batches are counted all the same."""
    channel_dim = {"channel_dim": 2 if shape == (0, 7, 5) else 1}
    x, running = torch.empty(shape, device=device), make_running(5, device)
    moments = ops.bn_stats(x, **channel_dim)
    assert moments.tolist() == reference.bn_stats(x, **channel_dim).tolist() == [0.0] * 12
    for given_moments, count in ((moments, 8), (None, 9)):
        y, saved = ops.bn_forward(x, moments=given_moments, **running, momentum=None, **channel_dim)
        assert y.shape == shape and saved[10:].tolist() == [0, 0]
        assert running["running_mean"].tolist() == [0.0] * 5 and running["running_var"].tolist() == [1.0] * 5
        assert running["num_batches_tracked"] == count
    assert ops.bn_apply(x, saved, **channel_dim).shape == shape
    assert ops.bn_reduce(x, x, saved, **channel_dim).tolist() == [[0.0] * 10]
    for from_output in (False, True):
        for global_sums, expected_sums in ((torch.ones(10, device=device), []), (None, [0.0] * 10)):
            dx, dresidual, local_sums = ops.bn_backward(
                x, x, saved, **channel_dim, from_output=from_output, global_sums=global_sums
            )
            assert dx.shape == shape and dresidual.numel() == 0 and local_sums.tolist() == expected_sums
    # Another rank has values.
    moments = ops.bn_stats(torch.randn(9, 5, device=device))
    ops.bn_forward_inplace(x, moments=moments, **running, momentum=1.0, **channel_dim)
    assert_close_enough(running["running_mean"], moments[:5], row="running")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_an_input_without_rows_gives_zero_sums(shape, device):
    x, weight = torch.empty(shape, device=device), torch.ones(8, device=device)
    y, saved = ops.layer_norm_forward(x, weight, None)
    assert y.shape == shape and saved.shape == (0,)
    dx, sums = ops.layer_norm_backward(x, y, saved, weight)
    assert dx.shape == shape and sums.tolist() == [0.0] * 16


@pytest.mark.parametrize("in_place", [False, True], ids=["new_memory", "in_place"])
def test_a_nan_count_poisons_outputs_and_changes_no_statistics(in_place, device):
    """A failed exchange gives such moments. y, `saved` and dx are NaN."""
    x, running = torch.randn(4, 3, 5, device=device), make_running(3, device)
    old_running = [t.clone() for t in running.values()]
    options = running | {"moments": torch.full((8,), float("nan"), device=device)}
    for momentum in (0.1, None):
        if in_place:
            y = x.clone()
            saved = ops.bn_forward_inplace(y, **options, momentum=momentum)
        else:
            y, saved = ops.bn_forward(x, **options, momentum=momentum)
        assert y.isnan().all() and saved.isnan().all()
        assert all(map(torch.equal, running.values(), old_running))
        for sums in (torch.full((6,), float("nan"), device=device), torch.zeros(6, device=device)):
            assert ops.bn_backward(x, x, saved, global_sums=sums)[0].isnan().all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_nan_and_infinity_stay_in_their_channel(layout, device):
    case = LayerInputs(layout, torch.float32, device)
    x = case.x.clone()
    x[1, 2, 3, 4] = float("nan")
    x[0, 3, 0, 0] = float("inf")
    finite = [c for c in range(case.channels) if c not in (2, 3)]
    for activation in ACTIVATIONS:
        y, saved = ops.bn_forward(x, moments=ops.bn_stats(x), activation=activation)
        assert y[:, 2].isnan().all() and not y[:, finite].isnan().any()
        assert y[:, 3].isnan().all()
        (sums,) = ops.bn_reduce(x, case.dy, saved, activation=activation)
        dx, *_ = ops.bn_backward(x, case.dy, saved, activation=activation, global_sums=sums)
        assert dx[:, 2].isnan().all() and not dx[:, finite].isnan().any()


def test_nan_and_infinity_stay_in_their_row(device):
    x = torch.randn(6, 40, device=device)
    x[1, 3], x[4, 39] = float("nan"), float("inf")
    y, saved = ops.layer_norm_forward(x)
    dx, _ = ops.layer_norm_backward(x, x, saved)
    for result in (y, dx):
        assert result.isnan().any(1).tolist() == [False, True, False, False, True, False]


def test_elu_keeps_its_digits_near_zero(device):
    """Errors are relative to each value, not to the largest: forward, and when v is recovered from y."""
    negative = torch.cat(
        [-torch.logspace(-12, 1.2, 4001, dtype=torch.float64), -torch.linspace(0.2, 0.6, 500)]
    )
    v = negative.float()[None].to(device)
    saved = make_identity_statistics(v.shape[1], device)
    y = ops.bn_apply(v, saved, activation="elu", activation_param=1.5)
    torch.testing.assert_close(y.double(), 1.5 * torch.expm1(v.double()), rtol=1e-6, atol=0)
    y = (torch.expm1(negative) * 1.5).float()[None].to(device)
    y = y[:, y[0] > -1.2]  # nearer to saturation the rounding of y shows
    channels = y.shape[1]
    saved = make_identity_statistics(channels, device)
    options = {"activation": "elu", "activation_param": 1.5, "from_output": True}
    (sums,) = ops.bn_reduce(y, torch.ones_like(y), saved, **options)
    expected = torch.log1p(y.double() / 1.5) * (y.double() + 1.5)
    torch.testing.assert_close(sums[channels:].double(), expected[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "elu"])
def test_activations_of_all_16_bit_values_are_rounded_once(activation, dtype, device):
    """The error of the forward and of the gradient is that of one rounding, and 2^-16 of a value."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)][:, None].to(device)
    saved, dy, exact_x = make_identity_statistics(1, device), torch.ones_like(x), x.double()
    rounding = torch.finfo(dtype).eps / 2 + 2**-16
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 2**-30
    options = {"activation": activation, "activation_param": ACTIVATION_PARAM}
    expected = reference.act_forward(exact_x, **options)
    for y in (ops.bn_apply(x, saved, **options), ops.act_forward(x, **options)):
        assert ((y.double() - expected).abs() <= rounding * expected.abs() + least).all()
    expected, _ = reference.act_backward(exact_x, torch.ones_like(exact_x), **options)
    dx_of_bn, *_ = ops.bn_backward(x, dy, saved, **options, training=False)
    for dx in (dx_of_bn, ops.act_backward(x, dy, **options)[0]):
        assert ((dx.double() - expected).abs() <= rounding * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_rounding_to_storage_is_to_nearest_even(dtype, device):
    """Every 16-bit value is converted: finite ones, infinities, NaN, ties and subnormals."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).reshape(1, 1, -1).to(device)
    weight = torch.tensor([1.0 + 2**-9], device=device)
    y, _ = ops.bn_forward(x, weight=weight, eps=0.0, training=False, **make_running(1, device))
    expected = (x.float() * weight + 0.0).to(dtype)  # + bias, which makes -0 a 0
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(7.0).view(torch.int16), expected.nan_to_num(7.0).view(torch.int16))


def test_zeros_as_eps_and_momentum_are_taken_as_they_are(device):
    """Statistics are not updated, and a constant channel has an infinite invstd."""
    x = torch.randn(8, 3, device=device)
    x[:, 1] = 2
    parameters = {"weight": torch.ones(3, device=device), "bias": torch.zeros(3, device=device)}
    for module in (ops, reference):
        running = make_running(3, device)
        y, saved = module.bn_forward(x, **parameters, **running, eps=0.0, momentum=0.0)
        assert saved[3:6].isinf().tolist() == [False, True, False]
        assert y.isnan().any(0).tolist() == [False, True, False]
        assert running["running_mean"].tolist() == [0.0] * 3 and running["running_var"].tolist() == [1.0] * 3
    y, saved = ops.layer_norm_forward(x.t()[:2], eps=0.0)
    assert saved[2:].isinf().tolist() == [False, True] and y.isnan().any(1).tolist() == [False, True]


def run_batch_norm_from_output(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaky = {"activation": "leaky_relu"}
    y, from_output = x.clone(), leaky | {"from_output": True}
    saved = ops.bn_forward_inplace(y, **leaky)
    (sums,) = ops.bn_reduce(y, dy, saved, **from_output)
    return [y, saved, sums, ops.bn_backward(y, dy, saved, **from_output, global_sums=sums)[0]]


def run_batch_norm(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    moments = ops.bn_stats(x)
    _, saved = ops.bn_forward(x, moments=moments)
    return [moments, *ops.bn_reduce(x, dy, saved), *run_batch_norm_from_output(x, dy)]


def run_activations(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    gates = None, x.flip(0)
    gradients = [t for gate in gates for t in ops.act_backward(x, dy, gate)]
    return [*(ops.act_forward(x, gate) for gate in gates), *gradients]


def run_layer_norm(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1.5, 1.5, x.shape[-1], device=x.device)
    y, saved = ops.layer_norm_forward(x, weight, weight, 1e-5, dy.dtype)
    return [y, saved, *ops.layer_norm_backward(x, dy, saved, weight)]


# Large enough for three slices. The middle slice of two planes takes a part of each.
LARGE_CALLS = {
    "batch_norm_planes": (run_batch_norm, (2, 1, 362, 191), torch.float64, torch.float64),
    "batch_norm_rows": (run_batch_norm, (9001, 16), torch.float64, torch.float64),
    "activations": (run_activations, (40, 2100), torch.float32, torch.float32),
    "layer_norm_float32": (run_layer_norm, (4000, 96), torch.float32, torch.float32),
    "layer_norm_mixed": (run_layer_norm, (4000, 96), torch.float32, torch.bfloat16),
    "layer_norm_bfloat16": (run_layer_norm, (4000, 96), torch.bfloat16, torch.bfloat16),
}


def make_large_call(name: str, device: str):
    run, shape, x_dtype, dy_dtype = LARGE_CALLS[name]
    x, dy = (torch.randn(shape, generator=make_generator(seed), dtype=torch.float64) for seed in (0, 1))
    return functools.partial(run, (x + 3).to(x_dtype).to(device), dy.to(dy_dtype).to(device))


@pytest.mark.parametrize("name", LARGE_CALLS)
def test_bits_do_not_depend_on_the_number_of_threads(name, device):
    assert_repeats_bits(make_large_call(name, device))


@pytest.mark.parametrize("name", ["batch_norm_planes", "batch_norm_rows"])
def test_merged_slices_match_reference(name, device):
    x, dy = make_large_call(name, device).args
    moments = reference.bn_stats(x)
    saved = reference.bn_forward(x, moments=moments)[1]
    assert_close_enough(ops.bn_stats(x), moments, row="bn_stats")
    (sums,) = ops.bn_reduce(x, dy, saved)
    assert_close_enough(sums, reference.bn_reduce(x, dy, saved)[0], row="bn_reduce")


def test_ops_in_several_python_threads_give_the_bits_of_one(device_option):
    """The threads call ops at the same time, and share the threads of OpenMP."""
    if device_option == "cuda_model":
        pytest.skip("the model of CUDA runs in one thread")
    calls = [make_large_call(name, device_option) for name in LARGE_CALLS]
    expected, errors, barrier = [call() for call in calls], [], threading.Barrier(4)

    def call_all(first: int):
        try:
            barrier.wait(20)
            for i in range(2 * len(calls)):
                i = (first + i) % len(calls)
                assert_same_bits(calls[i](), expected[i])
        except Exception as error:
            errors.append(error)

    old_num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    threads = [threading.Thread(target=call_all, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        torch.set_num_threads(old_num_threads)
    assert not errors
