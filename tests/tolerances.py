"""The largest allowed errors of each op against the float64 reference, with the reason.

An error is the largest absolute difference over the largest reference value. A row is named after an op; the
suffix FROM_OUTPUT marks an op that recovers xhat from y. An op without a row fails its test. u is the unit
roundoff of a dtype: float64 1.1e-16, float32 6e-8, float16 4.9e-4, bfloat16 3.9e-3.
"""

import torch

FROM_OUTPUT = " from_output"
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Moments and sums are returned in the accumulation type, whatever the dtype of x.
_SUMMED = {F64: 1e-13, F32: 2e-6, F16: 2e-6, BF16: 2e-6}
# An output is rounded to storage once, after a few roundings of the accumulation type.
_ROUNDED = {F64: 1e-13, F32: 2e-6, F16: 6e-4, BF16: 4.5e-3}
# The reference is rounded to storage too, so the two may differ by one unit in the last place.
_ONE_UNIT = {F64: 1e-13, F32: 2e-6, F16: 1e-3, BF16: 8e-3}

TOLERANCES = {
    "bn_stats": (_SUMMED, "up to 2048 values in the accumulation type, merged in float64"),
    "bn_forward": (_ROUNDED, "one rounding to storage"),
    "bn_apply": (_ROUNDED, "one rounding to storage"),
    "bn_forward_inplace": (_ROUNDED, "one rounding to storage"),
    "bn_reduce": (
        {F64: 1e-12, F32: 1e-5, F16: 1e-5, BF16: 1e-5},
        "sums of mixed sign cancel: relative to the largest channel's sum only",
    ),
    "bn_reduce" + FROM_OUTPUT: (
        {F64: 1e-12, F32: 2e-5, F16: 2e-5, BF16: 2e-5},
        "as bn_reduce, and xhat recovered through log1p near saturation loses some digits",
    ),
    "bn_backward": (_ROUNDED, "one rounding to storage"),
    "bn_backward" + FROM_OUTPUT: (
        {F64: 1e-12, F32: 3e-5, F16: 7e-4, BF16: 5e-3},
        "one rounding to storage; elu near saturation multiplies the accumulation type's rounding",
    ),
    "running": ({F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 8e-3}, "one rounding to the buffer's dtype"),
    "layer_norm_forward": (_ONE_UNIT, "one unit of storage"),
    "layer_norm_saved": (_SUMMED, "a row's mean and deviation in the accumulation type"),
    "layer_norm_backward": (_ONE_UNIT, "one unit of storage"),
    "layer_norm_sums": (
        {F64: 1e-12, F32: 1e-5, F16: 1e-5, BF16: 1e-5},
        "sums of mixed sign cancel: relative to the largest column's sum only",
    ),
    "act_forward": (_ONE_UNIT, "one unit of storage"),
    "act_backward": (_ONE_UNIT, "one unit of storage"),
    # Layers are compared with torch's, whose float32 statistics have an error of about 1e-6.
    "layer": (
        {F64: 1e-11, F32: 2e-5, F16: 3e-3, BF16: 2.5e-2},
        "torch rounds an intermediate result to storage, which a fused layer never makes",
    ),
    "in_place_layer": (
        {F64: 1e-10, F32: 1e-4, F16: 1e-2, BF16: 6e-2},
        "xhat recovered from y: u * sqrt(1 + (bias / weight)^2), and the negative side's 1 / slope",
    ),
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor, least_scale: float = 1e-30) -> float:
    """Returns the largest absolute difference over the largest expected value.

    That value counts as `least_scale` if it is smaller.
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
        least_scale: The size of a sum without cancellation, for sums that may cancel.
    """
    limits, reason = TOLERANCES[row]
    dtype = dtype or actual.dtype
    measured, limit = relative_error(actual, expected, least_scale), limits[dtype]
    assert measured <= limit, f"{row} {dtype}: error {measured:.3g} > {limit:.3g} ({reason})"
