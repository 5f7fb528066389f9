"""The functions that apex casts, by name, for scripts that change these lists before `initialize`.

O1 uses autocast's lists, with those changes.
"""

from collections.abc import Callable
from typing import Any

import torch

from .functions import float_function, half_function, uncast_function


class functional_overrides:
    """torch.nn.functional: functions that run in half, or in float32."""

    FP16_FUNCS = ["linear", "conv_tbc", *(f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3))]
    FP32_FUNCS = """
        gelu softplus softmax softmin log_softmax layer_norm group_norm local_response_norm normalize
        cosine_similarity grid_sample interpolate l1_loss smooth_l1_loss mse_loss kl_div nll_loss
        poisson_nll_loss ctc_loss cross_entropy binary_cross_entropy_with_logits soft_margin_loss
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss margin_ranking_loss
        triplet_margin_loss cosine_embedding_loss hinge_embedding_loss
    """.split()


def _listed() -> dict[str, Callable[..., Any]]:
    half = dict.fromkeys(functional_overrides.FP16_FUNCS, half_function)
    return half | dict.fromkeys(functional_overrides.FP32_FUNCS, float_function)


_AT_FIRST = _listed()


class AmpHandle:
    """Under O1 `_amp_state.handle`. There are no casts while `_is_active` is False.

    It applies the changes that a script has made to the lists to casts under autocast. A function that was
    removed from all lists gets its arguments without a cast.
    """

    def __init__(self) -> None:
        self._is_active = True
        self._functions: dict[str, Any] = {}
        listed = _listed()
        for name in _AT_FIRST.keys() | listed.keys():
            cast = listed.get(name)
            if cast is not _AT_FIRST.get(name) and hasattr(torch.nn.functional, name):
                function = self._functions[name] = getattr(torch.nn.functional, name)
                function = uncast_function(function)  # not as autocast would do inside
                setattr(torch.nn.functional, name, cast(function) if cast else function)

    def _deactivate(self) -> None:
        """Ends the casts, and restores torch's functions."""
        self._is_active = False
        for name, function in self._functions.items():
            setattr(torch.nn.functional, name, function)
