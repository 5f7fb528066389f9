"""A recipe runs as its op ran: autocast, flags of backends, strides and dtypes, whatever the backward has."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    assert_eager_bits,
    list_gradients,
    make_images,
    make_step,
    make_tokens,
)
from conversion.programs.names import matmul_precision

HALF = [torch.bfloat16, torch.float16]
PRECISIONS = {  # name -> a context of the forward
    "float32": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


# --- autocast, and parameters that are frozen in part


def biases(parameters):
    return [p for name, p in parameters if name.endswith("bias")]


def norms_alone(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)


def weights_alone(model):
    for one in biases(model.named_parameters()):
        one.requires_grad_(False)


def biases_alone(model):
    model.requires_grad_(False)
    for one in biases(model.named_parameters()):
        one.requires_grad_(True)


def last_half(model):
    for one in list(model.children())[: len(model) // 2]:
        one.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen Linear with a trained product of low rank beside it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.frozen = nn.Linear(inner, outer).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def mlp(linear, n=2):
    parts = [[nn.LayerNorm(DIM), linear(DIM, 2 * DIM), nn.GELU(), linear(2 * DIM, DIM)] for _ in range(n)]
    return nn.Sequential(*sum(parts, []), nn.Linear(DIM, 4))


def make_frozen(freeze, linear=nn.Linear):
    model = mlp(linear)
    freeze(model)
    return model


FROZEN = {
    "norms alone": partial(make_frozen, norms_alone),
    "weights alone": partial(make_frozen, weights_alone),
    "biases alone": partial(make_frozen, biases_alone),
    "last half": partial(make_frozen, last_half),
    "adapters": partial(make_frozen, lambda model: None, Adapted),
    "frozen norms": partial(make_frozen, lambda model: [model[i].requires_grad_(False) for i in (0, 4)]),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_under_autocast(frozen, precision, level):
    assert_eager_bits(make_step(FROZEN[frozen], make_tokens(), PRECISIONS[precision]), **LEVELS[level])


NORMS = {  # with a bias without gradient, which autocast gives the op in a dtype that the graph lacks
    "group_norm": lambda m, h: F.group_norm(h.flatten(0, 1), 8, m.w, m.b),
    "batch_norm": lambda m, h: F.batch_norm(h.flatten(0, 1), None, None, m.w, m.b, True),
    "layer_norm": lambda m, h: F.layer_norm(h, (DIM,), m.w, m.b),
    "instance_norm": lambda m, h: F.instance_norm(h.mT, None, None, m.w, m.b).mT,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_with_a_frozen_bias_under_autocast(norm, precision, level):
    def make():
        def function(m, x):
            return m.head(F.gelu(NORMS[norm](m, m.first(x))))

        parts = {"first": nn.Linear(DIM, DIM), "head": nn.Linear(DIM, 3), "b": torch.randn(DIM)}
        return FunctionModel(function, **parts, w=nn.Parameter(torch.ones(DIM)))

    assert_eager_bits(make_step(make, make_tokens(), PRECISIONS[precision]), **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("forward", PRECISIONS)
@pytest.mark.parametrize("backward", PRECISIONS)
def test_a_backward_under_another_autocast(forward, backward, level):
    def run(convert):
        torch.manual_seed(0)
        model = convert(mlp(nn.Linear))
        with PRECISIONS[forward]():
            y = model(make_tokens())
        with PRECISIONS[backward]():
            (y.float() ** 2).sum().backward()
        return list_gradients(model)

    assert_eager_bits(run, **LEVELS[level])


# --- flags of backends and modes of torch

MKLDNN_OFF = partial(torch.backends.mkldnn.flags, enabled=False)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


FLAGS = {
    "mkldnn": MKLDNN_OFF,
    "deterministic": deterministic,
    "precision of products": partial(matmul_precision, "medium"),
    "default dtype": default_dtype,
}


def convolutions(*between):
    parts = nn.Conv2d(3, DIM, 3), *between, nn.GELU(), nn.Conv2d(DIM, 4, 1), nn.SiLU()
    return nn.Sequential(*parts)


MODELS = {
    "gelu": (lambda: nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)), make_tokens),
    "convolutions": (lambda: convolutions(nn.BatchNorm2d(DIM)), make_images),
    "half": (lambda: mlp(nn.Linear).bfloat16(), lambda: make_tokens().bfloat16()),
    "half convolutions": (
        lambda: convolutions(nn.ReLU(), nn.Conv2d(DIM, DIM, 3)).bfloat16(),
        lambda: make_images().bfloat16(),
    ),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", ["forward", "backward", "part"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", MODELS)
def test_flags_are_those_of_the_forward(name, flag, place, level):
    """They are set round the forward, round the backward, or round a part of the forward."""
    make, inputs = MODELS[name]
    inside = {one: FLAGS[flag] if one == place else contextlib.nullcontext for one in ("forward", "backward")}

    def run(convert):
        torch.manual_seed(0)
        model, x = make(), inputs()
        if place == "part":
            model = nn.Sequential(Wrapped(FLAGS[flag], model), nn.GELU())
        model = convert(model)
        with inside["forward"]():
            y = model(x)
        with inside["backward"]():
            (y * y).sum().backward()
        return [y, *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])


class Wrapped(nn.Module):
    """The second half of a model runs in a context."""

    def __init__(self, context, model):
        super().__init__()
        self.context, self.model = context, model

    def forward(self, x):
        half = len(self.model) // 2
        x = self.model[:half](x)
        with self.context():
            return self.model[half:](x)


# --- strides and dtypes


def cast_then(view, **options):
    """A cast whose memory format is given, and a view that needs its strides."""

    def function(m, x):
        h = m.norm(m.first(x)).transpose(1, 2).to(torch.bfloat16, **options)
        return F.gelu(view(h) + 1.0)

    return function


CASTS = {
    "contiguous": cast_then(lambda h: h.view(8, -1), memory_format=torch.contiguous_format),
    "contiguous, without a view": cast_then(lambda h: h, memory_format=torch.contiguous_format),
    "contiguous, rows": cast_then(lambda h: h.view(-1, 16), memory_format=torch.contiguous_format),
    "preserved": cast_then(lambda h: h.transpose(1, 2).view(8, -1), memory_format=torch.preserve_format),
    "a copy": cast_then(lambda h: h.transpose(1, 2).view(8, -1), copy=True),
    "then contiguous": cast_then(lambda h: h.contiguous().view(8, -1)),
    "of a slice": cast_then(lambda h: h[:, ::2].reshape(8, -1)),
}


def channels_last(m, x):
    h = m.norm(m.first(x)).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    h = h.to(torch.bfloat16, memory_format=torch.channels_last)
    return F.gelu(h.permute(0, 2, 3, 1).view(8, -1) + 1.0)


CASTS["channels_last"] = channels_last


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_has_the_strides_that_were_asked_for(cast, level):
    make = partial(FunctionModel, CASTS[cast])
    step = make_step(lambda: make(first=nn.Linear(DIM, DIM), norm=nn.LayerNorm(DIM)), make_tokens())
    assert_eager_bits(step, **LEVELS[level])


LAYOUTS = {  # of the input of a BatchNorm1d over the features of tokens
    "transposed": lambda h: h.transpose(1, 2),
    "contiguous": lambda h: h.transpose(1, 2).contiguous(),
    "rows": lambda h: h.flatten(0, 1),
    "cut": lambda h: h.transpose(1, 2)[:, :, ::2],
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", ""])
@pytest.mark.parametrize("tracks", [True, False], ids=["statistics", ""])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_norm_of_any_strides_and_dtype(layout, tracks, affine, kind, training):
    dtype = {"autocast": torch.float32}.get(kind) or getattr(torch, kind)

    def make():
        norm = nn.BatchNorm1d(DIM, affine=affine, track_running_stats=tracks)

        def function(m, x):
            y = m.norm(LAYOUTS[layout](m.first(x)))
            return m.head(y if y.dim() == 2 else y.transpose(1, 2))

        model = FunctionModel(function, first=nn.Linear(DIM, DIM), norm=norm, head=nn.Linear(DIM, DIM)).to(
            dtype
        )
        norm.float() if kind == "float16" else None  # as of models whose norms are in float32
        return model.train(training)

    context = PRECISIONS["bfloat16" if kind == "autocast" else "float32"]
    assert_eager_bits(make_step(make, make_tokens().to(dtype), context))
