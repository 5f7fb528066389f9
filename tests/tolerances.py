"""Largest differences of an op from the float64 reference, with the reason. A missing row fails the test.

A row has the name of an op, with FROM_OUTPUT behind it where the op recovers xhat from y. An error is the
largest absolute difference over the largest reference value. u is the rounding of a dtype: float64 1.1e-16,
float32 6e-8, float16 4.9e-4, bfloat16 3.9e-3.
"""

import torch

FROM_OUTPUT = " from_output"
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# The packed outputs are in the accumulation type, whatever the activation's dtype.
_SUMMED = {F64: 1e-13, F32: 2e-6, F16: 2e-6, BF16: 2e-6}
# An activation is rounded once on its way out, after a few roundings of the accumulation type.
_ROUNDED = {F64: 1e-13, F32: 2e-6, F16: 6e-4, BF16: 4.5e-3}
# The reference is rounded too, so that what lies between two numbers may go to either.
_EITHER = {F64: 1e-13, F32: 2e-6, F16: 1e-3, BF16: 8e-3}

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
    "layer_norm_forward": (_EITHER, "one unit of storage"),
    "layer_norm_saved": (_SUMMED, "a row's mean and deviation in the accumulation type"),
    "layer_norm_backward": (_EITHER, "one unit of storage"),
    "layer_norm_sums": (
        {F64: 1e-12, F32: 1e-5, F16: 1e-5, BF16: 1e-5},
        "sums of mixed sign cancel: relative to the largest column's sum only",
    ),
    "act_forward": (_EITHER, "one unit of storage"),
    "act_backward": (_EITHER, "one unit of storage"),
    # Whole layers against torch, whose own float32 statistics carry an error of some 1e-6.
    "layer": (
        {F64: 1e-11, F32: 2e-5, F16: 3e-3, BF16: 2.5e-2},
        "torch rounds its intermediate activation to storage, which ours never makes",
    ),
    "in_place_layer": (
        {F64: 1e-10, F32: 1e-4, F16: 1e-2, BF16: 6e-2},
        "xhat recovered from y: u * sqrt(1 + (bias / weight)^2), and the negative side's 1 / slope",
    ),
}


def error(got: torch.Tensor, want: torch.Tensor, least_scale: float = 1e-30) -> float:
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, {tuple(want.shape)} expected"
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places than expected"
    difference = (got - want).abs().nan_to_num(0.0, posinf=float("inf"))
    scale = want.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return difference.max().item() / max(scale, least_scale)


def check(
    op: str,
    got: torch.Tensor,
    want: torch.Tensor,
    dtype: torch.dtype | None = None,
    least_scale: float = 1e-30,
) -> None:
    """`least_scale`: for sums that may cancel, their size without cancellation."""
    table, reason = TOLERANCES[op]
    limit = table[dtype or got.dtype]
    measured = error(got, want, least_scale)
    assert measured <= limit, f"{op} {dtype or got.dtype}: error {measured:.3g} > {limit:.3g} ({reason})"
