"""apex.mlp over torch.nn.functional.linear, on the CPU and on CUDA; under autocast in autocast's dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .normalization.fused_layer_norm import as_autograd_function

_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Applies linear layers, each followed by the activation, the last layer too.

    Args:
        bias: 1 with biases, 0 without.
        activation: 0 for none, 1 for relu, 2 for sigmoid.
        args: the input, the weights `(out, in)` in order, then the biases `(out,)`.
    """
    x, num_layers = args[0], len(args) // 2 if bias else len(args) - 1
    apply_activation = list(_ACTIVATIONS.values())[activation]
    for layer in range(1, num_layers + 1):
        x = apply_activation(F.linear(x, args[layer], args[layer + num_layers] if bias else None))
    return x


MlpFunction = as_autograd_function(mlp_function)


class MLP(nn.Module):
    """Linear layers, each followed by the activation, the last layer too.

    Args:
        mlp_sizes: width of the input, then of each layer.
        activation: none, relu or sigmoid.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(f"apex.mlp.MLP: activation takes {', '.join(_ACTIVATIONS)}, got {activation!r}")
        self.mlp_sizes, self.num_layers = list(mlp_sizes), len(mlp_sizes) - 1
        self.bias, self.activation = int(bool(bias)), list(_ACTIVATIONS).index(activation)
        for layer, (in_features, out_features) in enumerate(zip(mlp_sizes, mlp_sizes[1:], strict=False)):
            self.register_parameter(f"weight_{layer}", nn.Parameter(torch.empty(out_features, in_features)))
            if bias:
                self.register_parameter(f"bias_{layer}", nn.Parameter(torch.empty(out_features)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight_{layer}") for layer in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        return [getattr(self, f"bias_{layer}") for layer in range(self.num_layers * self.bias)]

    def reset_parameters(self) -> None:
        """Draws weights with variance 2 / (in + out), biases with variance 1 / out."""
        for weight in self.weights:
            nn.init.xavier_normal_(weight)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, bias.numel() ** -0.5)

    def forward(self, input: Tensor) -> Tensor:
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)
