"""A stack of every kind of layer, its inputs on a GPU, and its steps."""

import torch
from torch import nn

from fastvit import InPlaceABN, InPlaceABNSync, SyncBatchNorm

DEVICE = "cuda"

# In the first two, several blocks share a channel, and one of them merges their partial results.
SHAPES = {
    "planes": ((16, 8, 40, 40), torch.contiguous_format),
    "rows": ((16, 24, 40, 40), torch.channels_last),
    "small": ((4, 8, 3, 3), torch.contiguous_format),
}


def make_images(name: str, seed: int = 0) -> torch.Tensor:
    """Returns random images of a shape of SHAPES."""
    shape, memory_format = SHAPES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    return x.to(DEVICE).contiguous(memory_format=memory_format)


class Stack(nn.Module):
    """Has every kind of layer, with a residual and a cumulative average."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = InPlaceABN(channels, activation="elu", activation_param=1.0)
        self.second = SyncBatchNorm(channels, momentum=None, fuse_relu=True)
        self.third = InPlaceABNSync(channels)
        for layer in self.children():
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.1)

    def forward(self, x):
        x = self.first(x * 1.5)
        return self.third(self.second(x * 0.5, x) * 2.0)


def make_stack(name: str) -> Stack:
    """Returns a stack for images of a shape of SHAPES."""
    return Stack(SHAPES[name][0][1]).to(DEVICE)


def run_step(model: nn.Module, leaf: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Returns the output and the gradients of the input and the parameters."""
    y = model(leaf)
    return [y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy)]


def copy_results(results: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """Returns copies of the results of a step and of the model's buffers."""
    return [t.detach().clone() for t in (*results, *model.buffers())]
