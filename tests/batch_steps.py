"""A real training step with AdamW, whose bytes are counted with those of the model."""

import copy

import torch

from fastvit.memory import peak_bytes


def measure_training(model, inputs) -> int:
    """Peak bytes of a model, of AdamW's state, and of steps; `inputs()` makes a batch."""

    def train():
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters())
        x = inputs()
        for _ in range(2):  # the first step makes the optimizer's state
            optimizer.zero_grad()
            own(x).sum().backward()
            optimizer.step()

    return peak_bytes(train)
