"""The largest allowed errors of each op against the float64 reference, with the reason.

An error is the largest absolute difference divided by the largest absolute reference value. A row is named
after an op, with the suffix FROM_OUTPUT if the op recovers xhat from y. An op without a row fails its test. u
is the unit roundoff of a dtype: float64 1.1e-16, float32 6e-8, float16 4.9e-4, bfloat16 3.9e-3.
"""

from typing import NamedTuple

import torch

FROM_OUTPUT = " from_output"
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


class Tolerance(NamedTuple):
    """The largest allowed error for each dtype, and the reason."""

    limits: dict[torch.dtype, float]
    reason: str


# Moments and sums are returned in the accumulation type, whatever the dtype of x.
_SUM_LIMITS = {F64: 1e-13, F32: 2e-6, F16: 2e-6, BF16: 2e-6}
# An output is rounded once to the storage type, after a few roundings to the accumulation type.
_ROUNDING_LIMITS = {F64: 1e-13, F32: 2e-6, F16: 6e-4, BF16: 4.5e-3}
# The reference is rounded to the storage type too, so that both may differ by one unit in the last place.
_ONE_UNIT_LIMITS = {F64: 1e-13, F32: 2e-6, F16: 1e-3, BF16: 8e-3}

TOLERANCES = {
    "bn_stats": Tolerance(_SUM_LIMITS, "up to 2048 values in the accumulation type, merged in float64"),
    "bn_forward": Tolerance(_ROUNDING_LIMITS, "one rounding to storage"),
    "bn_apply": Tolerance(_ROUNDING_LIMITS, "one rounding to storage"),
    "bn_forward_inplace": Tolerance(_ROUNDING_LIMITS, "one rounding to storage"),
    "bn_reduce": Tolerance(
        {F64: 1e-12, F32: 1e-5, F16: 1e-5, BF16: 1e-5},
        "values of mixed sign cancel in a sum, so only the largest channel's sum is the scale",
    ),
    "bn_reduce" + FROM_OUTPUT: Tolerance(
        {F64: 1e-12, F32: 2e-5, F16: 2e-5, BF16: 2e-5},
        "as for bn_reduce; xhat also loses digits when log1p recovers it near elu's saturation",
    ),
    "bn_backward": Tolerance(_ROUNDING_LIMITS, "one rounding to storage"),
    "bn_backward" + FROM_OUTPUT: Tolerance(
        {F64: 1e-12, F32: 3e-5, F16: 7e-4, BF16: 5e-3},
        "one rounding to storage; elu near saturation enlarges the rounding of the accumulation type",
    ),
    "running": Tolerance({F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 8e-3}, "one rounding to the buffer"),
    "layer_norm_forward": Tolerance(_ONE_UNIT_LIMITS, "one unit of storage"),
    "layer_norm_saved": Tolerance(_SUM_LIMITS, "a row's mean and deviation in the accumulation type"),
    "layer_norm_backward": Tolerance(_ONE_UNIT_LIMITS, "one unit of storage"),
    "layer_norm_sums": Tolerance(
        {F64: 1e-12, F32: 1e-5, F16: 1e-5, BF16: 1e-5},
        "values of mixed sign cancel in a sum, so only the largest column's sum is the scale",
    ),
    "act_forward": Tolerance(_ONE_UNIT_LIMITS, "one unit of storage"),
    "act_backward": Tolerance(_ONE_UNIT_LIMITS, "one unit of storage"),
    # Layers are compared with torch's, whose float32 statistics have an error of about 1e-6.
    "layer": Tolerance(
        {F64: 1e-11, F32: 2e-5, F16: 3e-3, BF16: 2.5e-2},
        "torch rounds an intermediate result to storage; a fused layer has no such result",
    ),
    "in_place_layer": Tolerance(
        {F64: 1e-10, F32: 1e-4, F16: 1e-2, BF16: 6e-2},
        "recovering xhat from y multiplies u by sqrt(1 + (bias / weight)^2) and, below 0, by 1 / slope",
    ),
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor, least_scale: float = 1e-30) -> float:
    """Returns the largest absolute difference divided by the largest absolute expected value.

    The divisor is at least `least_scale`.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, {tuple(expected.shape)} expected"
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places than expected"
    difference = (actual - expected).abs().nan_to_num(0.0, posinf=float("inf"))
    scale = expected.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return difference.max().item() / max(scale, least_scale)


def assert_close_enough(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    row: str,
    dtype: torch.dtype | None = None,
    least_scale: float = 1e-30,
) -> None:
    """Raises unless the error is at most the tolerance of a row of TOLERANCES.

    Args:
        actual: The result.
        expected: The reference's result.
        row: The row of TOLERANCES.
        dtype: The dtype whose tolerance applies; that of `actual` by default.
        least_scale: The least divisor of the error. For sums that may cancel it is their size without
            cancellation.
    """
    limits, reason = TOLERANCES[row]
    dtype = dtype or actual.dtype
    measured, limit = relative_error(actual, expected, least_scale), limits[dtype]
    assert measured <= limit, f"{row} {dtype}: error {measured:.3g} > {limit:.3g} ({reason})"
