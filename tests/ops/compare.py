"""Comparisons of ops with the reference (reference.py), and of the bits of two calls."""

from collections.abc import Iterable

import torch

from fastvit import ops
from ops import reference
from ops.inputs import LayerInputs, clone_with_strides
from ops.tolerances import FROM_OUTPUT, assert_close_enough

# For each op, the rows of TOLERANCES of the tensors that the op writes or returns, in this order.
TOLERANCE_ROWS = {
    "bn_stats": ["bn_stats"],
    "bn_forward": ["bn_forward", "bn_stats"],
    "bn_forward_inplace": ["bn_forward_inplace", "bn_stats"],
    "bn_reduce": ["bn_reduce"],
    "bn_backward": ["bn_backward", "bn_backward", "bn_reduce"],
    "act_forward": ["act_forward"],
    "act_backward": ["act_backward", "act_backward"],
}


def assert_matches_reference(
    op: str,
    x: torch.Tensor,
    *arguments,
    running: LayerInputs | None = None,
    least_scales: Iterable[float] = (),
    **options,
) -> list[torch.Tensor]:
    """Raises unless an op and the reference write and return the same tensors within TOLERANCES.

    Returns x if the op writes to x, then the tensors that the op returned, then the buffers after the op. The
    op gets copies of the buffers of `running`. `least_scales` are those of `assert_close_enough`, for each of
    the tensors that the op writes or returns.
    """
    results = []
    for module in (ops, reference):
        buffers = running.copy_buffers() if running else {}
        writable = [clone_with_strides(x)] if op == "bn_forward_inplace" else []
        outputs = getattr(module, op)(*(writable or [x]), *arguments, **buffers, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results.append([*writable, *outputs, *buffers.values()])
    suffix = FROM_OUTPUT if options.get("from_output") else ""
    rows = [*(row + suffix for row in TOLERANCE_ROWS[op]), *["running"] * 3]
    scales = [*least_scales, *[1e-30] * len(rows)]
    for row, least_scale, *pair in zip(rows, scales, *results, strict=False):
        actual, expected = (t if t.is_floating_point() else t.float() for t in pair)
        assert_close_enough(actual, expected, row=row, least_scale=least_scale)
    return results[0]


def assert_same_bits(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Raises unless the tensors of two sequences have the same values, dtypes and strides."""
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def assert_repeats_bits(run) -> None:
    """Raises unless repeated calls of `run()` return tensors of the same bits, with any number of threads."""
    old_num_threads = torch.get_num_threads()
    try:
        expected = run()
        for num_threads in (1, 2, 3, 1):
            torch.set_num_threads(num_threads)
            for a, b in zip(expected, run(), strict=True):
                assert torch.equal(a, b), f"{num_threads} threads"
    finally:
        torch.set_num_threads(old_num_threads)


def assert_layer_norm_matches_reference(x, dy, weight, bias, output_dtype=None, eps=1e-5) -> None:
    y, saved = ops.layer_norm_forward(x, weight, bias, eps, output_dtype)
    expected_y, expected_saved = reference.layer_norm_forward(x, weight, bias, eps, output_dtype)
    assert y.dtype == expected_y.dtype and y.is_contiguous()
    assert_close_enough(y, expected_y, row="layer_norm_forward")
    assert_close_enough(saved, expected_saved, row="layer_norm_saved", dtype=x.dtype)

    dx, sums = ops.layer_norm_backward(x, dy, expected_saved, weight)
    expected_dx, expected_sums = reference.layer_norm_backward(x, dy, expected_saved, weight)
    assert dx.dtype == x.dtype and dx.is_contiguous()
    # The scale is that of dx before its mean is subtracted: of a row of one value dx is 0.
    invstd = expected_saved.chunk(2)[1].double().view(*x.shape[:-1], 1)
    unreduced_dx = invstd * dy.double() * (1 if weight is None else weight.double())
    scale = unreduced_dx.abs().max().item() if x.numel() else 1.0
    assert_close_enough(dx, expected_dx, row="layer_norm_backward", least_scale=scale)
    scale = max(x.numel() / x.shape[-1], 1) ** 0.5
    assert_close_enough(sums, expected_sums, row="layer_norm_sums", dtype=x.dtype, least_scale=scale)
    dx_alone, no_sums = ops.layer_norm_backward(x, dy, expected_saved, weight, False)
    assert torch.equal(dx_alone, dx) and no_sums.numel() == 0
