"""The ops of batch norm against the float64 reference, and against each other bit by bit."""

import math

import pytest
import torch

from fastvit import ops
from ops import reference
from ops.compare import assert_matches_reference, assert_same_bits
from ops.inputs import LayerInputs, clone_with_strides, make_differently_strided
from ops.matrix import ACTIVATION_PARAM, CORE_DTYPES, CORE_LAYOUTS, DTYPES, INVERTIBLE, name_of, op_cases
from ops.tolerances import assert_close_enough

pytestmark = pytest.mark.cuda_model


def activation_options(case: LayerInputs, activation: str) -> dict:
    return {
        "activation": activation,
        "activation_param": ACTIVATION_PARAM,
        "channel_dim": case.channel_dim,
    }


@pytest.mark.parametrize(
    "layout,dtype,activation", op_cases(nightly_activations=["identity", "relu", "gelu"])
)
def test_batch_norm_ops_match_reference_and_each_other(layout, dtype, activation, device):
    """Each op matches the reference, and an op that computes its statistics has the bits of two ops."""
    case = LayerInputs(layout, dtype, device)
    options, old_x = activation_options(case, activation), case.x.clone()
    for residual in (None, case.residual):
        shared = case.weight, case.bias, residual
        (moments,) = assert_matches_reference("bn_stats", case.x, case.channel_dim)
        y, saved, *buffers = assert_matches_reference(
            "bn_forward", case.x, *shared, moments=moments, running=case, **options
        )
        assert y.stride() == torch.empty_like(case.x).stride() and torch.equal(case.x, old_x)
        new = case.copy_buffers()
        in_one_op = ops.bn_forward(case.x, *shared, **new, **options)
        assert_same_bits([*in_one_op, *new.values()], [y, saved, *buffers])
        assert_same_bits([ops.bn_apply(case.x, saved, *shared, **options)], [y])
        in_evaluation, constants = ops.bn_forward(
            case.x, *shared, **case.copy_buffers(), **options, training=False
        )
        assert torch.equal(ops.bn_apply(case.x, constants, *shared, **options), in_evaluation)

        arguments = case.x, case.dy, saved, *shared
        (sums,) = assert_matches_reference("bn_reduce", *arguments, **options)
        gradients = assert_matches_reference("bn_backward", *arguments, **options, global_sums=sums[0])
        assert_same_bits(ops.bn_backward(*arguments, **options), (*gradients[:2], sums[0]))
        assert_matches_reference("bn_backward", *arguments, **options, training=False)


@pytest.mark.parametrize("layout,dtype,activation", op_cases(INVERTIBLE, nightly_activations=INVERTIBLE))
def test_ops_that_invert_y_match_reference(layout, dtype, activation, device):
    """y is written over x or to new memory, and the backward reads y."""
    case = LayerInputs(layout, dtype, device)
    parameters, options = (case.weight, case.bias), activation_options(case, activation)
    (moments,) = assert_matches_reference("bn_stats", case.x, case.channel_dim)
    y, saved, *buffers = assert_matches_reference(
        "bn_forward_inplace", case.x, *parameters, moments=moments, running=case, **options
    )
    written, new = clone_with_strides(case.x), case.copy_buffers()
    in_one_op = ops.bn_forward_inplace(written, *parameters, **new, **options)
    assert_same_bits([in_one_op, written, *new.values()], [saved, y, *buffers])
    for given_moments in (moments, None):
        other_y, other_saved = ops.bn_forward(
            case.x, *parameters, moments=given_moments, **case.copy_buffers(), **options, invertible=True
        )
        # y may have other strides.
        assert torch.equal(other_y, y) and torch.equal(other_saved, saved)

    arguments, options = (y, case.dy, saved, *parameters), options | {"from_output": True}
    (sums,) = assert_matches_reference("bn_reduce", *arguments, **options)
    gradients = assert_matches_reference("bn_backward", *arguments, **options, global_sums=sums[0])
    assert_same_bits(ops.bn_backward(*arguments, **options), (*gradients[:2], sums[0]))
    assert_matches_reference("bn_backward", *arguments, **options, training=False)


def assert_step_matches_reference(case: LayerInputs, dy, *shared, in_place=False, **options) -> tuple:
    """Compares each op of a training step with the reference; returns y, `saved` and dresidual."""
    moments = ops.bn_stats(case.x, case.channel_dim)
    forward = "bn_forward_inplace" if in_place else "bn_forward"
    y, saved, *_ = assert_matches_reference(
        forward, case.x, *shared, moments=moments, running=case, **options
    )
    arguments = y if in_place else case.x, dy, saved, *shared
    options["from_output"] = in_place
    (sums,) = assert_matches_reference("bn_reduce", *arguments, **options)
    _, dresidual, _ = assert_matches_reference("bn_backward", *arguments, **options, global_sums=sums[0])
    return y, saved, dresidual


@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_residual_and_gradient_may_have_strides_of_their_own(layout, dtype, device):
    """The gradient of a residual has the strides of the residual."""
    case = LayerInputs(layout, dtype, device)
    options = activation_options(case, "gelu")
    gradients = make_differently_strided(case.dy) | {"number": case.dy[0, 0, 0, 0].expand_as(case.dy)}
    for dy in gradients.values():
        assert_step_matches_reference(case, dy, case.weight, case.bias, None, **options)
    for residual in make_differently_strided(case.residual).values():
        assert residual.stride() != case.x.stride()
        shared = case.weight, case.bias, residual
        y, saved, dresidual = assert_step_matches_reference(case, case.dy, *shared, **options)
        assert dresidual.stride() == torch.empty_like(residual).stride()
        assert_same_bits([ops.bn_apply(case.x, saved, *shared, **options)], [y])


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_parameters_and_buffers_may_have_16_bits(layout, dtype, parameters, device):
    case = LayerInputs(layout, dtype, device, parameters=parameters)
    options = activation_options(case, "leaky_relu")
    assert_step_matches_reference(case, case.dy, case.weight, case.bias, case.residual, **options)
    assert_step_matches_reference(case, case.dy, case.weight, case.bias, in_place=True, **options)


@pytest.mark.parametrize("op", ["bn_forward", "bn_forward_inplace"])
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_evaluation_normalizes_by_running_statistics_and_keeps_them(layout, op, device):
    """Weight, bias or both may be missing."""
    case = LayerInputs(layout, torch.float32, device)
    for weight, bias in ((None, None), (case.weight, None), (None, case.bias)):
        options = {"weight": weight, "bias": bias, **activation_options(case, "leaky_relu")}
        _, saved, *buffers = assert_matches_reference(op, case.x, running=case, **options, training=False)
        assert saved[-2:].tolist() == [math.inf, 0]
        assert all(map(torch.equal, buffers, case.copy_buffers().values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_running_statistics_match_reference(dtype, device):
    """The variance is unbiased, buffers have any dtype, and averages may be cumulative."""
    case = LayerInputs("nchw", torch.float32, device, parameters=dtype)
    ours, theirs = case.copy_buffers(), case.copy_buffers()
    for step, momentum in enumerate((0.1, None, 0.0, 1.0, None)):
        x = case.x + step
        moments = ops.bn_stats(x)
        in_one_op = {name: value.clone() for name, value in ours.items()}
        ops.bn_forward(x, **in_one_op, momentum=momentum)
        ops.bn_forward(x, moments=moments, **ours, momentum=momentum)
        assert_same_bits(in_one_op.values(), ours.values())
        reference.bn_forward(x, moments=moments, **theirs, momentum=momentum)
        assert_close_enough(ours["running_mean"], theirs["running_mean"], row="running")
        assert_close_enough(ours["running_var"], theirs["running_var"], row="running")
        assert ours["num_batches_tracked"] == 4 + step
        theirs = {name: value.clone() for name, value in ours.items()}  # roundings must not pile up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 6), (0, 4, 0, 2)], ids=str)
def test_merged_moments_of_ranks_equal_those_of_one_big_batch(sizes, dtype, device):
    x = (torch.randn(sum(sizes), 7, 5, 3, dtype=torch.float64) * 3 + 100).to(dtype).to(device)
    moments = reference.merge_moments(torch.stack([ops.bn_stats(part) for part in x.split(sizes)]))
    whole, whole_saved = ops.bn_forward(x, moments=ops.bn_stats(x), activation="relu")
    parts = [ops.bn_forward(part, moments=moments, activation="relu") for part in x.split(sizes)]
    for _, saved in parts:
        assert_close_enough(saved, whole_saved, row="bn_stats")
        assert torch.equal(saved, parts[0][1])
    assert_close_enough(torch.cat([y for y, _ in parts]), whole, row="bn_stats")
