"""A small ViT of plain torch layers for the tests of `report`, `verify` and budgets, and its peaks."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fastvit.memory import peak_bytes

WIDTH = 64  # features of a token
TIMELINES = ["as it was", "as converted", "least"]  # The names of the steps in a report.


class SmallViTBlock(nn.Module):
    def __init__(self, drop=0.0, width=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.mix_tokens(x)
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm2(x)))))

    def mix_tokens(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

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


class ConvStage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.conv2, self.norm2 = nn.Conv2d(2 * width, width, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def make_vit_example():
    torch.manual_seed(0)
    return SmallViT(), torch.randn(16, 48, WIDTH)


def make_conv_example():
    torch.manual_seed(0)
    # For smaller batches oneDNN's convolutions allocate less than on paper.
    return nn.Sequential(*(ConvStage(16) for _ in range(4))), torch.randn(16, 16, 28, 28)


EXAMPLES = {"vit": make_vit_example, "convolutions": make_conv_example}  # These return model and input.


def policy_of(model):
    """Returns the policy of the scopes of a converted model."""
    return next(hook.policy for hook in model._forward_pre_hooks.values())


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


def measure_adamw_peak(model, batch) -> int:
    """Returns the peak bytes of two steps of a copy of the model with AdamW. `batch()` makes the inputs."""

    def train():
        copied = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(copied.parameters())
        x = batch()
        for _ in range(2):  # the first step allocates the optimizer's state
            optimizer.zero_grad()
            copied(x).sum().backward()
            optimizer.step()

    return peak_bytes(train)
