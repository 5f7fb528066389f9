"""The layouts, dtypes and activations of the tests of ops and layers, and which combinations run when."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch

from fastvit import _checks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CORE_DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS, INVERTIBLE = list(_checks.ACTIVATIONS), list(_checks.INVERTIBLE_ACTIVATIONS)
ACTIVATION_PARAM = 0.2  # the slope of leaky_relu, or the alpha of elu


def name_of(value: object) -> str:
    """Returns the id of a parameter in a test's name, such as float32 for torch.float32."""
    return str(value).removeprefix("torch.")


def to_channels_last(x):
    """Returns images or volumes in channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


class Layout(NamedTuple):
    """A layout of tensors in memory."""

    make_values: Callable[[Callable[..., torch.Tensor]], torch.Tensor]  # takes make_randn's function
    channel_dim: int


# Most sizes are odd, so that vectors do not divide them. `_c1` has one channel, `_c96` 96 channels, and `_s1`
# one element in each plane. `r(*shape)` returns a float64 tensor of random numbers.
LAYOUTS = {
    "nchw": Layout(lambda r: r(6, 5, 7, 11), 1),
    "nchw_wide": Layout(lambda r: r(3, 3, 61, 67), 1),
    "nchw_c1": Layout(lambda r: r(6, 1, 13, 11), 1),
    "nchw_s1": Layout(lambda r: r(7, 5, 1, 1), 1),
    "ncl": Layout(lambda r: r(5, 19, 23), 1),
    "ncdhw": Layout(lambda r: r(2, 7, 3, 5, 4), 1),
    "nc": Layout(lambda r: r(37, 29), 1),
    "nc_2049": Layout(lambda r: r(5, 2049), 1),
    "nhwc_c96": Layout(lambda r: to_channels_last(r(3, 96, 5, 7)), 1),
    "nhwc_c384": Layout(lambda r: to_channels_last(r(2, 384, 3, 5)), 1),
    "nhwc_c13": Layout(lambda r: to_channels_last(r(6, 13, 7, 11)), 1),
    "ndhwc": Layout(lambda r: to_channels_last(r(2, 19, 3, 5, 4)), 1),
    "tokens": Layout(lambda r: r(3, 17, 48), 2),
    "tokens_c192": Layout(lambda r: r(2, 65, 192), 2),
    "nhwc_last": Layout(lambda r: r(2, 5, 7, 24), 3),
    "cropped": Layout(lambda r: r(6, 9, 9, 11)[1:, 2:7, 1:-1, 2:-1], 1),
    "cropped_nhwc": Layout(lambda r: to_channels_last(r(3, 12, 9, 8))[:, 2:9, 1:-1, 1:], 1),
    "transposed": Layout(lambda r: r(7, 6, 11, 5).permute(1, 3, 0, 2), 1),
    "transposed_nc": Layout(lambda r: r(29, 37).t(), 1),
    "every_other": Layout(lambda r: r(4, 6, 9, 10)[:, :, ::2, ::2], 1),
    "one_sample": Layout(lambda r: r(1, 8, 14, 14), 1),
}
CORE_LAYOUTS = ["nchw", "nhwc_c13", "tokens", "cropped"]
# The walks of csrc/cuda/plan.h: rows and planes, folded planes, with and without vectors of 16 bytes, one
# slice and several, one outer dimension and two.
CUDA_LAYOUTS = [*CORE_LAYOUTS, "nchw_wide", "ncdhw", "tokens_c192", "cropped_nhwc", "one_sample"]
CUDA_DTYPES = [torch.float32, torch.bfloat16]


def op_cases(
    activations: Sequence[str] = ACTIVATIONS,
    core_layouts: Sequence[str] = CORE_LAYOUTS,
    nightly_activations: Sequence[str] = (),
) -> list:
    """Returns the parameters `layout, dtype, activation` of a test of ops, marked by when they run.

    A push runs every layout with every dtype and one activation, which changes from case to case, and every
    activation with `core_layouts` and CORE_DTYPES. The other combinations run nightly: `core_layouts` with
    all activations, and all layouts with `nightly_activations`.

    On the model of CUDA a push runs the push's cases of CUDA_LAYOUTS and CUDA_DTYPES, but each activation on
    tokens alone, and one case of each other dtype and activation.
    """
    cases, in_turn = [], {}
    for (i, layout), (j, dtype) in product(enumerate(LAYOUTS), enumerate(DTYPES)):
        in_turn[layout, dtype] = activations[(i + 2 * j) % len(activations)]
    for layout, dtype, activation in product(LAYOUTS, DTYPES, activations):
        is_in_turn = activation == in_turn[layout, dtype]
        is_core = layout in core_layouts
        if is_in_turn or (is_core and dtype in CORE_DTYPES):
            marks = []
        elif is_core or activation in nightly_activations:
            marks = [pytest.mark.nightly]
        else:
            continue
        is_on_model = layout in CUDA_LAYOUTS and dtype in CUDA_DTYPES and is_in_turn
        is_on_model |= layout == "tokens" and not marks
        is_on_model |= layout == "nchw" and is_in_turn
        if not is_on_model:
            marks.append(pytest.mark.cuda_model("nightly"))
        name = f"{layout}-{name_of(dtype)}-{activation}"
        cases.append(pytest.param(layout, dtype, activation, marks=marks, id=name))
    return cases
