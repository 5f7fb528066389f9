"""BatchNorm followed by leaky_relu, by name.

The five names differ in speed, in memory, and in the samples that share statistics. On one rank they compute
the same. They have the same state_dict keys and initial values, so weights can be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..inplace_abn import InPlaceABN, InPlaceABNSync
from ..sync_batch_norm import SyncBatchNorm

__all__ = ["NORMS", "NormAct"]

# By the number of channels, whether the input is tokens, and the slope.
_MAKERS: dict[str, Callable[[int, bool, float], nn.Module]] = {
    "torch": lambda c, tokens, slope: nn.BatchNorm1d(c) if tokens else nn.BatchNorm2d(c),
    "torch-sync": lambda c, tokens, slope: nn.SyncBatchNorm(c),
    "fastvit-sync": lambda c, tokens, slope: SyncBatchNorm(c, channel_last=tokens),
    "inplace-abn": lambda c, tokens, slope: InPlaceABN(c, activation_param=slope, channel_last=tokens),
    "inplace-abn-sync": lambda c, tokens, slope: InPlaceABNSync(
        c, activation_param=slope, channel_last=tokens
    ),
}

NORMS = tuple(_MAKERS)
"""Values of `norm=`."""


class NormAct(nn.Module):
    """BatchNorm and leaky_relu over the channels of `(N, C, H, W)` images or `(N, L, C)` tokens.

    Args:
        num_features: C.
        norm: `torch` (nn.BatchNorm), `torch-sync` (nn.SyncBatchNorm, which synchronises on CUDA alone),
            `fastvit-sync` (fastvit.SyncBatchNorm), `inplace-abn` (fastvit.InPlaceABN) or
            `inplace-abn-sync` (fastvit.InPlaceABNSync).
        tokens: the input is `(N, L, C)` and C is its last dimension.
        slope: of leaky_relu for negative values.

    `forward(x)` returns a tensor of the shape and dtype of `x`. The in-place norms overwrite `x` and
    return it, so `x` must be a new result of a convolution or matrix product that no other op reads.

    Raises:
        ValueError: `norm` is not one of the names above.
    """

    def __init__(self, num_features: int, norm: str, *, tokens: bool = False, slope: float = 0.01) -> None:
        super().__init__()
        if norm not in _MAKERS:
            raise ValueError(f"NormAct: norm must be one of {', '.join(NORMS)}, got {norm!r}")
        self.norm = _MAKERS[norm](num_features, tokens, slope)
        in_place = norm.startswith("inplace-abn")
        self.act = nn.Identity() if in_place else nn.LeakyReLU(slope, inplace=True)
        # torch's layers take channels in dimension 1. As (N * L, C) tokens have the same statistics without
        # a copy; as (N, C, L) they would need one. fastvit's layers take (N, L, C).
        self.flat = tokens and norm.startswith("torch")

    def forward(self, x: Tensor) -> Tensor:
        if self.flat:
            return self.act(self.norm(x.flatten(0, 1))).view_as(x)
        return self.act(self.norm(x))
