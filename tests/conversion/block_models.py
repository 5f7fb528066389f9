"""Models of equal blocks, which are called in several ways."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64  # features of a token


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    name: str = "state"


class KeywordLayer(Layer):
    def forward(self, *, hidden):
        return {"hidden": super().forward(hidden)}


class StateLayer(Layer):
    def forward(self, state):
        return State(super().forward(state.hidden))


class NestedLayer(Layer):
    def forward(self, parts):
        return ("out", [{"hidden": super().forward(parts[1][0]["hidden"])}])


# The classes of blocks by how their tensors are passed, and their calls.
LAYERS = {
    "positions": (Layer, lambda block, x: block(x)),
    "keywords": (KeywordLayer, lambda block, x: block(hidden=x)["hidden"]),
    "dataclasses": (StateLayer, lambda block, x: block(State(x)).hidden),
    "structures": (NestedLayer, lambda block, x: block(("in", [{"hidden": x}]))[1][0]["hidden"]),
}


class LayerModel(nn.Module):
    """A Linear and six blocks of LAYERS, in a list or as attributes of the model."""

    def __init__(self, kind="positions", uses_list=True):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.stem = kind, nn.Linear(WIDTH, WIDTH)
        holder = nn.ModuleList() if uses_list else self
        self.names = [str(i) if uses_list else f"b{i}" for i in range(6)]
        for name in self.names:
            holder.add_module(name, LAYERS[kind][0]())
        if uses_list:
            self.blocks = holder

    def forward(self, x):
        x, holder = self.stem(x), getattr(self, "blocks", self)
        for name in self.names:
            x = LAYERS[self.kind][1](getattr(holder, name), x)
        return x
