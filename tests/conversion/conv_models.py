"""A small model of convolutions, norms and activations, and its input."""

import torch
from torch import nn

from conversion.models import make_images

C = 8  # channels


def make_conv_images(n=4):
    return make_images(n, C, 12)


def make_conv():
    return nn.Conv2d(C, C, 3, padding=1, bias=False)


class ConvStage(nn.Module):
    """A convolution, a norm and an activation, three times, and a convolution."""

    def __init__(self, make_norm=lambda: nn.BatchNorm2d(C), make_activation=nn.GELU):
        super().__init__()
        torch.manual_seed(1)
        layers = [layer for _ in range(3) for layer in (make_conv(), make_norm(), make_activation())]
        self.layers, self.last = nn.Sequential(*layers), make_conv()
        for layer in layers:
            if getattr(layer, "weight", None) is not None and layer.weight.dim() == 1:
                nn.init.normal_(layer.weight)
                nn.init.normal_(layer.bias)

    def forward(self, x):
        return self.last(self.layers(x))
