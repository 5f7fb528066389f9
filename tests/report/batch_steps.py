"""Measures the memory of training steps with AdamW."""

import copy

import torch

from fastvit.memory import peak_bytes


def measure_training(model, inputs) -> int:
    """Returns the peak bytes of two steps of a copy of the model with AdamW. `inputs()` makes the batch."""

    def train():
        copied = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(copied.parameters())
        x = inputs()
        for _ in range(2):  # the first step allocates the optimizer's state
            optimizer.zero_grad()
            copied(x).sum().backward()
            optimizer.step()

    return peak_bytes(train)
