"""`NormAct` is BatchNorm followed by leaky_relu, in one of five implementations.

The implementations differ in speed, in memory, and in the ranks that share statistics. On one rank their
results are the same. Their state_dict keys and initial values are equal, so one can load another's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..inplace_abn import InPlaceABN, InPlaceABNSync
from ..sync_batch_norm import SyncBatchNorm

__all__ = ["NORMS", "NormAct"]

# Each factory takes the number of channels, whether the input is `(N, L, C)` tokens, and leaky_relu's slope.
_NORM_FACTORIES: dict[str, Callable[[int, bool, float], nn.Module]] = {
    "torch": lambda c, tokens, slope: nn.BatchNorm1d(c) if tokens else nn.BatchNorm2d(c),
    "torch-sync": lambda c, tokens, slope: nn.SyncBatchNorm(c),
    "fastvit-sync": lambda c, tokens, slope: SyncBatchNorm(c, channel_last=tokens),
    "inplace-abn": lambda c, tokens, slope: InPlaceABN(c, activation_param=slope, channel_last=tokens),
    "inplace-abn-sync": lambda c, tokens, slope: InPlaceABNSync(
        c, activation_param=slope, channel_last=tokens
    ),
}

NORMS = tuple(_NORM_FACTORIES)
"""The values of the argument `norm`."""


class NormAct(nn.Module):
    """Applies BatchNorm and leaky_relu to the channels of `(N, C, H, W)` images or `(N, L, C)` tokens.

    Args:
        num_features: the number of channels C.
        norm: `torch` (nn.BatchNorm), `torch-sync` (nn.SyncBatchNorm, which synchronises on CUDA alone),
            `fastvit-sync` (fastvit.SyncBatchNorm), `inplace-abn` (fastvit.InPlaceABN) or
            `inplace-abn-sync` (fastvit.InPlaceABNSync).
        tokens: whether the input is `(N, L, C)`, with the channels in the last dimension.
        slope: the slope of leaky_relu for negative values.

    `forward(x)` returns a tensor of the shape and dtype of `x`. The in-place norms overwrite `x` and
    return it, so `x` must be the new output of a convolution or matrix product, and no other op may read it.

    Raises:
        ValueError: `norm` is not one of the names above.
    """

    def __init__(self, num_features: int, norm: str, *, tokens: bool = False, slope: float = 0.01) -> None:
        super().__init__()
        if norm not in _NORM_FACTORIES:
            raise ValueError(f"NormAct: norm must be one of {', '.join(NORMS)}, got {norm!r}")
        self.norm = _NORM_FACTORIES[norm](num_features, tokens, slope)
        is_in_place = norm.startswith("inplace-abn")
        self.act = nn.Identity() if is_in_place else nn.LeakyReLU(slope, inplace=True)
        # torch's layers take channels in dimension 1. Tokens as (N * L, C) have the same statistics, and
        # need no copy, unlike tokens as (N, C, L). fastvit's layers take (N, L, C).
        self.flattens_tokens = tokens and norm.startswith("torch")

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "flat" in state:  # the attribute's name in pickles of fastvit 0.1
            state["flattens_tokens"] = state.pop("flat")
        super().__setstate__(state)

    def forward(self, x: Tensor) -> Tensor:
        if self.flattens_tokens:
            return self.act(self.norm(x.flatten(0, 1))).view_as(x)
        return self.act(self.norm(x))
