"""layer_norm_forward and layer_norm_backward against the float64 reference."""

from itertools import product

import pytest
import torch

from ops.compare import assert_layer_norm_matches_reference
from ops.inputs import make_generator
from ops.matrix import DTYPES, name_of

pytestmark = pytest.mark.cuda_model

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# The dtype of x, and that of y.
CORE_DTYPE_PAIRS = [(F32, F32), (BF16, BF16)]
DTYPE_PAIRS = [*CORE_DTYPE_PAIRS, (F64, F64), (F16, F16), (F32, BF16), (F32, F16)]
# Columns: one, odd, whole vectors, several warps and several parts of a row. Rows: one, few, many slices.
SHAPES = [
    *((5, 1), (1, 1), (257,), (7, 13), (3, 17, 48), (70, 64), (2, 65, 192), (2100, 33)),
    *((4, 3, 768), (5, 2049), (40, 1024), (3, 4100), (2, 9001), (2, 1, 3, 1, 2, 24)),
]
# Rows without whole vectors, of whole vectors, of several warps, and of several parts.
CORE_SHAPES = [(7, 13), (3, 17, 48), (4, 3, 768), (5, 2049)]


def make_row_cases() -> list:
    """Returns each shape with the core dtypes, and each core shape with all; other cases are nightly."""
    cases = []
    for shape, (x_dtype, y_dtype) in product(SHAPES, DTYPE_PAIRS):
        is_core = (x_dtype, y_dtype) in CORE_DTYPE_PAIRS or shape in CORE_SHAPES
        name = f"{'x'.join(map(str, shape))}-{name_of(x_dtype)}-{name_of(y_dtype)}"
        marks = [] if is_core else [pytest.mark.nightly]
        if shape[-1] > 4096:  # tests/cuda_host has such rows
            marks.append(pytest.mark.cuda_model("nightly"))
        cases.append(pytest.param(shape, x_dtype, y_dtype, marks=marks, id=name))
    return cases


def make_row_inputs(shape, x_dtype, y_dtype, device, parameters=F32) -> list[torch.Tensor]:
    """Returns x, dy, weight and bias."""
    g = make_generator()

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=F64)

    x, dy = randn(*shape) * 2 + 3, randn(*shape)
    weight, bias = randn(shape[-1]) + 1, randn(shape[-1])
    if x_dtype == F64:
        parameters = F64
    dtypes = x_dtype, y_dtype, parameters, parameters
    return [t.to(dtype).to(device) for t, dtype in zip((x, dy, weight, bias), dtypes, strict=True)]


@pytest.mark.parametrize("shape,x_dtype,y_dtype", make_row_cases())
def test_layer_norm_ops_match_reference(shape, x_dtype, y_dtype, device):
    x, dy, weight, bias = make_row_inputs(shape, x_dtype, y_dtype, device)
    assert_layer_norm_matches_reference(x, dy, weight, bias, y_dtype)


@pytest.mark.parametrize("parameters", DTYPES, ids=name_of)
def test_parameters_may_have_any_dtype_or_be_missing(parameters, device):
    x, dy, weight, bias = make_row_inputs((9, 40), F32, F32, device, parameters)
    for given_parameters in ((weight, bias), (weight, None), (None, bias), (None, None)):
        assert_layer_norm_matches_reference(x, dy, *given_parameters, eps=0.1)


VIEWS = {
    "cropped": lambda t: t[1:, ::2],
    "transposed": lambda t: t.transpose(0, 1),
    "columns_not_fastest": lambda t: t.permute(0, 2, 1).contiguous().permute(0, 2, 1),
    "expanded": lambda t: t[:1].expand(6, 5, 48),
    "not_at_16_bytes": lambda t: t.flatten()[1:-47].view(-1, 48),
}


@pytest.mark.parametrize("name", VIEWS)
def test_operands_may_be_any_views(name, device):
    x, dy, weight, bias = make_row_inputs((6, 5, 48), F32, F32, device)
    assert_layer_norm_matches_reference(VIEWS[name](x), VIEWS[name](dy), weight, bias)
    assert_layer_norm_matches_reference(VIEWS[name](x), VIEWS[name](dy).clone(), weight, bias)


def test_a_gradient_may_be_one_number(device):
    x, dy, weight, bias = make_row_inputs((6, 5, 48), F32, F32, device)
    assert_layer_norm_matches_reference(x, dy[:, :1, :1].expand(6, 5, 48), weight, bias)
