"""FastLayerNorm over torch's layer_norm, for any width; apex's takes some widths only."""

from torch import Tensor

from ..normalization.fused_layer_norm import (
    MixedFusedLayerNorm,
    as_function,
    mixed_dtype_fused_layer_norm_affine,
)


def _fast_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False
) -> Tensor:
    """LayerNorm in the dtype of the weight."""
    shape = tuple(weight.shape)
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape, epsilon, memory_efficient)


FastLayerNormFN = as_function(_fast_layer_norm)


class FastLayerNorm(MixedFusedLayerNorm):
    """LayerNorm over the last dimension; the output has the dtype of the weight.

    Args:
        memory_efficient: has no effect, and warns once.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps  # subclasses read it
