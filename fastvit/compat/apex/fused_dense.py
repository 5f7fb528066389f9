"""apex.fused_dense over torch.nn.functional.linear, on the CPU and on CUDA.

Under autocast the layers compute in the dtype of autocast.

apex does not initialise the weights; here they are drawn as those of torch.nn.Linear.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from .normalization.fused_layer_norm import as_autograd_function


def _dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


def _dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    # The GELU of cublasLt, which apex calls, is the approximation by tanh.
    return F.linear(F.gelu(F.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


FusedDenseFunc = DenseNoBiasFunc = as_autograd_function(_dense)
FusedDenseGeluDenseFunc = as_autograd_function(_dense_gelu_dense)


class FusedDense(nn.Linear):
    """torch.nn.Linear under apex's name."""


class FusedDenseGeluDense(nn.Module):
    """A linear layer, GELU approximated by tanh, and a linear layer; both linear layers have a bias."""

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if not bias:
            raise ValueError("FusedDenseGeluDense: bias takes True, got False; use two FusedDense instead")
        self.in_features, self.intermediate_features = in_features, intermediate_features
        self.out_features = out_features
        self.weight1, self.bias1 = nn.Linear(in_features, intermediate_features).parameters()
        self.weight2, self.bias2 = nn.Linear(intermediate_features, out_features).parameters()

    def forward(self, input: Tensor) -> Tensor:
        return _dense_gelu_dense(input, self.weight1, self.bias1, self.weight2, self.bias2)
