"""The functions that apex casts, by name, for scripts that change these lists before `initialize`.

O1 uses autocast's lists, with those changes.
"""

from typing import Any

import torch

from .functions import float_function, half_function, promote_function, uncast_function
from .handle import AmpHandle

__all__ = ["follow_changed_lists", "functional_overrides", "tensor_overrides", "torch_overrides"]

_CONVOLUTIONS = ["conv_tbc", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))]


class functional_overrides:
    """torch.nn.functional: functions that run in half, or in float32."""

    MODULE = torch.nn.functional
    FP16_FUNCS = ["linear", *_CONVOLUTIONS]
    FP32_FUNCS = [
        # exponentials and normalisation
        *("gelu", "softplus", "softmax", "softmin", "log_softmax"),
        *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
        # sampling
        *("grid_sample", "interpolate"),
        # losses
        *("l1_loss", "smooth_l1_loss", "mse_loss", "kl_div", "nll_loss", "poisson_nll_loss", "ctc_loss"),
        *("cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss"),
        *("multilabel_margin_loss", "multilabel_soft_margin_loss", "margin_ranking_loss"),
        *("triplet_margin_loss", "cosine_embedding_loss", "hinge_embedding_loss"),
    ]


class torch_overrides:
    """torch: functions that run in half, in float32, or in the widest dtype of their arguments."""

    MODULE = torch
    FP16_FUNCS = [
        *("mm", "mv", "bmm", "matmul", "addmm", "addmv", "addr", "addbmm", "baddbmm", "prelu"),
        *_CONVOLUTIONS,
    ]
    FP32_FUNCS = [
        # one by one
        *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log2", "log10", "pow"),
        *("reciprocal", "rsqrt"),
        # sums and the like
        *("sum", "prod", "cumsum", "cumprod", "std", "var", "norm", "dist", "renorm"),
    ]
    # Functions that refuse mixed dtypes; torch promotes the arguments of arithmetic and comparisons itself.
    CASTS = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot"]
    SEQUENCE_CASTS = ["cat", "stack"]


def _methods(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(torch.Tensor, name)]


class tensor_overrides:
    """Methods of torch.Tensor: those of `torch_overrides` and the operators."""

    MODULE = torch.Tensor
    FP16_FUNCS = ["__matmul__", *_methods(torch_overrides.FP16_FUNCS)]
    FP32_FUNCS = ["__pow__", "__rpow__", "__ipow__", "cpu", *_methods(torch_overrides.FP32_FUNCS)]
    CASTS = _methods(torch_overrides.CASTS)


_OVERRIDES: tuple[Any, ...] = (functional_overrides, torch_overrides, tensor_overrides)
_CASTS = {
    "FP16_FUNCS": half_function,
    "FP32_FUNCS": float_function,
    "CASTS": promote_function,
    "SEQUENCE_CASTS": promote_function,
}


def _listed(overrides: Any) -> dict[str, str]:
    return {name: kind for kind in _CASTS for name in getattr(overrides, kind, ())}


_AT_FIRST = [_listed(overrides) for overrides in _OVERRIDES]


def follow_changed_lists(handle: AmpHandle) -> None:
    """Applies changes that a script has made to the lists to casts under autocast, until
    `handle._deactivate()`. A function that was removed from all lists gets its arguments without a cast.
    """
    for overrides, before in zip(_OVERRIDES, _AT_FIRST, strict=True):
        now = _listed(overrides)
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                handle.replace(overrides.MODULE, name, uncast_function)  # not as autocast would do inside
                if name in now:
                    handle.replace(overrides.MODULE, name, _CASTS[now[name]])
