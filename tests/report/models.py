"""A small ViT of plain torch layers for the tests of `report`, `verify` and budgets."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fastvit.memory import peak_bytes

WIDTH = 64  # features of a token


class SmallViTBlock(nn.Module):
    def __init__(self, drop=0.0, width=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm2(x)))))

    def act(self, x):
        return F.gelu(x)


class SmallViT(nn.Module):
    def __init__(self, blocks=4, drop=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(SmallViTBlock(drop) for _ in range(blocks))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x)
        return x if mask is None else x * mask


def hold_graph_tensor(model, x):
    """Returns the model with a tensor of a graph as an attribute, so that the model cannot be copied."""
    model.last = model(x)
    return model


def measure_step_peak(model, x):
    """Returns the peak bytes of a step of a copy of the model, which frees each weight's gradient at once."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def run_step():
        y = copied(x)
        y.backward(torch.ones_like(y))

    run_step()
    run_step()  # one-time allocations must not be in the peak
    return peak_bytes(run_step)
