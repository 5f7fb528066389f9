"""A model, its data and its steps for the tests of fastvit.compat.apex.amp."""

import torch
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit.compat.apex import amp

LEVELS = ["O0", "O1", "O2", "O3"]
HALF = torch.bfloat16  # the half precision of the CPU


def make_network(seed: int = 0) -> nn.Module:
    """Returns a model for images `(N, 1, 8, 8)` and 4 classes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        fastvit.InPlaceABN(6),
        nn.Conv2d(6, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(6 * 16, 4),
    )


def draw_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images `(8, 1, 8, 8)` and labels `(8,)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator)


def initialized(level: str, make=None, model=None, **options):
    model = make_network() if model is None else model
    make = make or (lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9))
    return amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)


def loss_of(model, seed: int = 0) -> torch.Tensor:
    images, labels = draw_batch(seed)
    return F.cross_entropy(model(images), labels)


def scaled_backward(loss, optimizer, **options) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def backward(model, optimizer, seed: int = 0, factor: float = 1.0, **options) -> None:
    scaled_backward(factor * loss_of(model, seed), optimizer, **options)


def train_step(model, optimizer, seed: int = 0, infinite: bool = False) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, seed), optimizer) as scaled_loss:
        scaled_loss.backward()
        if infinite:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
    optimizer.step()


def record_forwards(module, look=lambda module, output: output.dtype) -> list:
    """Returns a list that gets the result of `look` in each forward of `module`."""
    results = []
    module.register_forward_hook(lambda module, args, output: results.append(look(module, output)))
    return results


def call_under_o1(function, x):
    """Returns `function(x)`, called in the forward of a model under O1."""
    results, model = [], nn.Identity()
    model.forward = lambda x: results.append(function(x)) or x
    amp.initialize(model, opt_level="O1", verbosity=0)(x)
    return results[0]


def flat_gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def flat_parameters(model) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])
