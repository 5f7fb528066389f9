"""LayerNorm by fastvit's kernels: one pass, and under autocast no cast behind it."""

import torch
from torch import Tensor, nn

from . import _checks, _library, functional

__all__ = ["LayerNorm"]


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm with the same constructor and `state_dict`, and other bits.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.LayerNorm.
        output_dtype: dtype of the result; None is the input's dtype, or under autocast, for a float32 input,
            autocast's. torch's own gives float32 under autocast, which the next Linear then casts. For a
            result that is added to the residual (post-norm), say float32.

    Statistics and sums are in float32, or float64 for float64; parameters have their own dtype. Keeps the
    input for backward, and two numbers a row. See `fastvit.functional.layer_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        output_dtype: torch.dtype | None = None,
    ):
        _library.require_kernels("fastvit.LayerNorm")
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        _checks.check_eps("LayerNorm", self.eps)
        _checks.check_dtype("LayerNorm", "output_dtype", output_dtype)
        self.output_dtype = output_dtype

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, output_dtype=self.output_dtype
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.output_dtype is None else f"{text}, output_dtype={self.output_dtype}"
