"""A recipe runs under the settings of its op, autocast and flags of backends, whatever the backward has."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conversion.cases import add_in_turn, select_each_pair
from conversion.models import (
    DIM,
    LEVELS,
    TokenModel,
    assert_eager_bits,
    list_gradients,
    make_autocast,
    make_images,
    make_step,
    make_tokens,
)
from conversion.programs.names import matmul_precision

# The precisions of a forward, and their contexts.
PRECISIONS = {
    "float32": contextlib.nullcontext,
    "bfloat16": make_autocast(),
    "float16": make_autocast(torch.float16),
    "no cache": make_autocast(cache_enabled=False),
}


# --- autocast, and parameters that are frozen in part


def find_biases(model):
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def train_norms_alone(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)


def train_weights_alone(model):
    for bias in find_biases(model):
        bias.requires_grad_(False)


def train_biases_alone(model):
    model.requires_grad_(False)
    for bias in find_biases(model):
        bias.requires_grad_(True)


def train_last_half(model):
    for module in list(model.children())[: len(model) // 2]:
        module.requires_grad_(False)


def freeze_norms(model):
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)


class AdaptedLinear(nn.Module):
    """A frozen Linear with a trained product of low rank beside it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.frozen = nn.Linear(inner, outer).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def make_mlps(freeze=lambda model: None, linear=nn.Linear):
    """Returns two MLPs with norms and a head, in which `freeze(model)` has frozen parameters."""
    parts = [[nn.LayerNorm(DIM), linear(DIM, 2 * DIM), nn.GELU(), linear(2 * DIM, DIM)] for _ in range(2)]
    model = nn.Sequential(*sum(parts, []), nn.Linear(DIM, 4))
    freeze(model)
    return model


FROZEN = {
    "norms alone": partial(make_mlps, train_norms_alone),
    "weights alone": partial(make_mlps, train_weights_alone),
    "biases alone": partial(make_mlps, train_biases_alone),
    "last half": partial(make_mlps, train_last_half),
    "adapters": partial(make_mlps, linear=AdaptedLinear),
    "frozen norms": partial(make_mlps, freeze_norms),
}


@pytest.mark.parametrize(
    ("frozen", "level", "precision"), add_in_turn(select_each_pair(FROZEN, LEVELS), PRECISIONS)
)
def test_models_that_are_frozen_in_part_have_eager_bits(frozen, level, precision):
    assert_eager_bits(make_step(FROZEN[frozen], make_tokens(), PRECISIONS[precision]), **LEVELS[level])


# Norms whose bias has no gradient. Autocast gives the op the bias in a dtype that the graph lacks.
NORMS = {
    "group_norm": lambda m, h: F.group_norm(h.flatten(0, 1), 8, m.w, m.b),
    "batch_norm": lambda m, h: F.batch_norm(h.flatten(0, 1), None, None, m.w, m.b, True),
    "layer_norm": lambda m, h: F.layer_norm(h, (DIM,), m.w, m.b),
    "instance_norm": lambda m, h: F.instance_norm(h.mT, None, None, m.w, m.b).mT,
}


@pytest.mark.parametrize(
    ("norm", "level", "precision"),
    [
        *add_in_turn(select_each_pair(NORMS, LEVELS), PRECISIONS),
        ("instance_norm", "least", "float32"),  # a recipe whose output has other strides
    ],
)
def test_a_norm_with_a_frozen_bias_has_eager_bits_under_autocast(norm, level, precision):
    def function(m, x):
        return m.head(F.gelu(NORMS[norm](m, m.first(x))))

    def make():
        return TokenModel(function, b=torch.randn(DIM), w=nn.Parameter(torch.ones(DIM)))

    assert_eager_bits(make_step(make, make_tokens(), PRECISIONS[precision]), **LEVELS[level])


@pytest.mark.parametrize(
    ("forward", "backward", "level"),
    add_in_turn(
        [
            ("float32", "bfloat16"),
            ("float32", "no cache"),
            ("bfloat16", "float32"),
            ("bfloat16", "float16"),
            ("bfloat16", "bfloat16"),
            ("no cache", "bfloat16"),
            ("float16", "no cache"),
            ("float16", "float16"),
        ],
        LEVELS,
    ),
)
def test_a_backward_under_another_autocast_has_eager_bits(forward, backward, level):
    def run(convert):
        torch.manual_seed(0)
        model = convert(make_mlps())
        with PRECISIONS[forward]():
            y = model(make_tokens())
        with PRECISIONS[backward]():
            (y.float() ** 2).sum().backward()
        return list_gradients(model)

    assert_eager_bits(run, **LEVELS[level])


# --- flags of backends and modes of torch


@contextlib.contextmanager
def set_and_restore(setter, value, old_value):
    setter(value)
    try:
        yield
    finally:
        setter(old_value)


FLAGS = {
    "mkldnn": partial(torch.backends.mkldnn.flags, enabled=False),
    "deterministic": partial(set_and_restore, torch.use_deterministic_algorithms, True, False),
    "precision of products": partial(matmul_precision, "medium"),
    "default dtype": partial(set_and_restore, torch.set_default_dtype, torch.float64, torch.float32),
}


def make_convolutions(*between):
    return nn.Sequential(nn.Conv2d(3, DIM, 3), *between, nn.GELU(), nn.Conv2d(DIM, 4, 1), nn.SiLU())


def make_linears():
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


MODELS = {
    "linears": (make_linears, make_tokens),
    "convolutions": (lambda: make_convolutions(nn.BatchNorm2d(DIM)), make_images),
    "half linears": (lambda: make_mlps().bfloat16(), lambda: make_tokens().bfloat16()),
    "half convolutions": (
        lambda: make_convolutions(nn.ReLU(), nn.Conv2d(DIM, DIM, 3)).bfloat16(),
        lambda: make_images().bfloat16(),
    ),
}


class HalfInContext(nn.Module):
    """Runs the second half of a model in a context."""

    def __init__(self, context, model):
        super().__init__()
        self.context, self.model = context, model

    def forward(self, x):
        half = len(self.model) // 2
        x = self.model[:half](x)
        with self.context():
            return self.model[half:](x)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    ("name", "flag", "place", "level"),
    select_each_pair(MODELS, FLAGS, ["forward", "backward", "half of the forward"], LEVELS),
)
def test_a_flag_set_in_a_part_of_a_step_leaves_eager_bits(name, flag, place, level):
    make, make_input = MODELS[name]
    contexts = {place: FLAGS[flag]}

    def run(convert):
        torch.manual_seed(0)
        model, x = make(), make_input()
        if place == "half of the forward":
            model = nn.Sequential(HalfInContext(FLAGS[flag], model), nn.GELU())
        model = convert(model)
        with contexts.get("forward", contextlib.nullcontext)():
            y = model(x)
        with contexts.get("backward", contextlib.nullcontext)():
            (y * y).sum().backward()
        return [y, *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])
