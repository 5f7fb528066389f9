"""torch: functions that run in half, in float32, or in the widest dtype of their arguments."""

import torch

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch

_DIMENSIONS = (1, 2, 3)

FP16_FUNCS = [
    *("mm", "mv", "bmm", "matmul", "addmm", "addmv", "addr", "addbmm", "baddbmm"),
    *("prelu", "conv_tbc"),
    *(f"conv{n}d" for n in _DIMENSIONS),
    *(f"conv_transpose{n}d" for n in _DIMENSIONS),
]

FP32_FUNCS = [
    # one by one
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log2", "log10", "pow"),
    *("reciprocal", "rsqrt"),
    # sums and the like
    *("sum", "prod", "cumsum", "cumprod", "std", "var", "norm", "dist", "renorm"),
]

CASTS = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot"]
"""Functions that refuse mixed dtypes; torch promotes the arguments of arithmetic and comparisons itself."""

SEQUENCE_CASTS = ["cat", "stack"]
