"""What changes between two steps of a converted model: eager's bits, and what a new conversion would keep."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vit_models import DIM, TOKENS, Block, LayerScale, Mlp, differing, kept, step

import fastvit


class Branches(nn.Module):
    """Blocks with a dropout, a BatchNorm, ops in place, and what the changes below switch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [Block(mlp=lambda: Mlp(drop=0.1)), Block(scale=lambda: LayerScale(inplace=True))]
        )
        self.norm = fastvit.BatchNormAct(DIM, activation="silu", channel_last=True)
        self.head = nn.Linear(DIM, DIM)
        self.write = self.branch = lambda x: x

    def forward(self, x):
        for block in self.blocks:
            x = block(self.branch(x))
        y = self.norm(x)
        return self.head(F.relu(self.write(y), inplace=True)) + y


def tokens(n=8, length=TOKENS):
    return torch.randn(n, length, DIM, generator=torch.Generator().manual_seed(3))


OTHER = nn.Linear(DIM, DIM).state_dict()


def square_in_data(y):
    y.data.mul_(y.data)
    return y


def add_a_hook(model):
    model.blocks[0].norm1.register_forward_hook(lambda module, args, y: y * 2.0)


CHANGES = {  # name -> what it does to the model, and to the input
    "size": (None, lambda x: x[:3]),
    "length": (None, lambda x: x[:, :20]),
    "dtype": (lambda model: model.double(), lambda x: x.double()),
    "evaluation": (lambda model: model.eval(), None),
    "frozen": (lambda model: model.blocks.requires_grad_(False), None),
    "frozen bias": (lambda model: model.blocks[1].norm1.bias.requires_grad_(False), None),
    "eps": (lambda model: setattr(model.blocks[0].norm1, "eps", 0.1), None),
    "hook": (add_a_hook, None),
    "branch": (lambda model: setattr(model, "branch", lambda x: x * torch.sigmoid(x)), None),
    "branch of the same saves": (lambda model: setattr(model, "branch", lambda x: x + x), None),
    "write": (lambda model: setattr(model, "write", lambda y: y.mul_(0.5)), None),
    "write without a version": (lambda model: setattr(model, "write", square_in_data), None),
    "memory of a layer": (lambda model: setattr(model.norm, "memory", "keep"), None),
    "other parameters": (lambda model: model.head.load_state_dict(OTHER), None),
}


def same(model, eager, x, context=contextlib.nullcontext):
    assert not differing(step(model, x, context), step(eager, x, context))


def pair(**options):
    eager = Branches()
    return eager, fastvit.convert(copy.deepcopy(eager), **options)


@pytest.mark.parametrize("products", [False, True], ids=["", "products"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps(change, products):
    """The changed model has a step, then the one before again, then the changed one."""
    on_model, on_input = CHANGES[change]
    eager, model = pair(products=products)
    x = tokens()
    other = on_input(x) if on_input else x
    for _ in range(2):
        same(model, eager, x)
    for one in (model, eager):
        if on_model:
            on_model(one)
    for given in (other, x.to(other.dtype), other):
        same(model, eager, given)
    fresh = fastvit.convert(copy.deepcopy(fastvit.revert(copy.deepcopy(model))), products=products)
    assert kept(model, other) == kept(fresh, other)


def test_autocast_on_and_off():
    eager, model = pair()
    for enabled in (False, True, False, True):
        same(model, eager, tokens(), lambda: torch.autocast("cpu", torch.bfloat16, enabled=enabled))  # noqa: B023


def test_two_models_in_one_scope():
    """One after the other, and in the other order: neither goes by what was decided for the other."""
    models = [Branches(), Branches()]
    models[1].norm.memory = "keep"
    results = []
    for context in (contextlib.nullcontext, fastvit.recompute_scope):
        for order in (models, models[::-1]):
            with context():
                results.append({model: step(model, tokens()) for model in order})
    for got in results[1:]:
        for model, want in results[0].items():
            names = differing(got[model], want)
            assert all(name.startswith("buffer ") for name in names), names  # running statistics go on


def test_threads():
    """Two threads run one model at once; it has no state of a step but the parameters."""
    eager, model = pair()
    inputs = [tokens(4), tokens(8)]
    model.eval(), eager.eval()
    want = [torch.autograd.grad(eager(x).sum(), list(eager.parameters())) for x in inputs]
    failed = []

    def work(index):
        for _ in range(10):
            got = torch.autograd.grad(model(inputs[index]).sum(), list(model.parameters()))
            if not all(map(torch.equal, got, want[index])):
                failed.append(index)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
        assert not thread.is_alive()
    assert not failed
