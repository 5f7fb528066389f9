"""Small models for the tests of fastvit.convert, and a step through them."""

import torch
from torch import nn


def conv(channels=8, features=8):
    return nn.Conv2d(channels, features, 3, padding=1, bias=False)


def spread(model):
    """Random weights of both signs and biases, as after training; new layers have 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)[::3] *= -1
                module.bias.normal_(0, 0.3)
    return model


def images(n=4, channels=8, size=6):
    return torch.randn(n, channels, size, size)


def modes(report):
    return {layer.name: layer.mode for layer in report}


class Plain(nn.Module):
    """Three BatchNorm layers with activations, two of which are one module; a residual before the last."""

    def __init__(self, act=nn.GELU, **options):
        super().__init__()
        self.conv1, self.bn1, self.act1 = conv(), nn.BatchNorm2d(8), act(**options)
        self.conv2, self.bn2 = conv(), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = conv(), nn.BatchNorm2d(8)
        self.again = act(**options)
        self.head = conv()

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        y = self.again(self.bn2(self.conv2(x)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.head(self.again(y))


def trained(model, x):
    """The output of a step, and all gradients."""
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
