"""Parameters, gradients and steps for the tests of fastvit.compat.apex.optimizers."""

import torch
from torch import nn

from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

SHAPES = [(5, 7), (7,), (3, 2, 2), (1,), (4,)]
MAKERS = {
    "adam": lambda p: FusedAdam(p, 1e-2, weight_decay=0.1),
    "adam_without_correction": lambda p: FusedAdam(p, 1e-2, bias_correction=False),
    "sgd": lambda p: FusedSGD(p, 1e-2, 0.9, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, 1e-2),
    "novograd": lambda p: FusedNovoGrad(p, 1e-2, weight_decay=0.1),
}


def make_parameters(dtype=torch.float32) -> list[nn.Parameter]:
    """Returns parameters of all `SHAPES`, the last of which is 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES[:-1]]
    return [nn.Parameter(t.to(dtype)) for t in (*tensors, torch.zeros(SHAPES[-1]))]


def draw_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def set_gradients(parameters, step: int) -> None:
    for parameter, gradient in zip(parameters, draw_gradients(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def take_steps(optimizer, parameters, steps: int, first: int = 0):
    """Returns the parameters after the steps `first`, `first + 1`, ..."""
    for step in range(first, first + steps):
        set_gradients(parameters, step)
        optimizer.step()
    return parameters


def step_by_formula(update, steps: int, begins=(0, 0, 0, 0, 0)) -> list[torch.Tensor]:
    """Returns what `w = update(w, gradient, memory, step, norm of all gradients)` makes of the parameters.

    Arithmetic is in float64. Steps count from 1. Parameter i has gradients from step `begins[i] + 1` on.
    """
    values = [p.detach().double() for p in make_parameters()]
    memories = [{} for _ in values]
    for step in range(steps):
        gradients = [gradient.double() for gradient in draw_gradients(step)]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for i, begin in enumerate(begins):
            if step >= begin:
                values[i] = update(values[i], gradients[i], memories[i], step + 1, norm)
    return values


def update_moments(gradient, memory, beta1, beta2, average=True):
    memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1 if average else 1) * gradient
    memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * gradient * gradient
    return memory["m"], memory["v"]


def adam_by_formula(counts, begins=(0, 0, 0, 0, 0)) -> list[torch.Tensor]:
    """Returns what Adam of rate 0.1 makes of the parameters, with these counts in its bias corrections."""

    def update(w, gradient, memory, step, norm):
        m, v = update_moments(gradient, memory, 0.9, 0.999)
        count = counts[step - 1]
        return w - 0.1 * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)

    return step_by_formula(update, len(counts), begins)


def assert_all_close(actual, expected, rtol=2e-5, atol=1e-6) -> None:
    for tensor, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), other.double(), rtol=rtol, atol=atol)
