"""Function modes, subclasses of tensors and torch's fast paths keep eager's bits in a converted model."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode, is_tensor_like

import fastvit
from conversion.cases import select_each_pair, select_each_value
from conversion.models import (
    DIM,
    LEVELS,
    TokenModel,
    assert_eager_bits,
    assert_same_bits,
    leave_unconverted,
    list_gradients,
    make_images,
    make_step,
    make_tokens,
)
from conversion.vit_models import measure_kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

# --- paths that torch's modules and programs choose if there is a mode

PADDED = torch.tensor([[0] * 16, [0] * 9 + [1] * 7]).bool()


def make_encoder_layer():
    return nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)


def call_with_mask(encoder, x):
    return encoder(x, src_key_padding_mask=PADDED)


def call_attention(attention, x):
    return attention(x, x, x, key_padding_mask=PADDED, need_weights=False)[0]


def call_transformer(transformer, x):
    return transformer(x, x, src_key_padding_mask=PADDED)


# Modules that have a fast path in evaluation, and their calls.
ENCODERS = {
    "encoder": (lambda: nn.TransformerEncoder(make_encoder_layer(), 1), call_with_mask),
    "two layers": (lambda: nn.TransformerEncoder(make_encoder_layer(), 2), call_with_mask),
    "layer": (make_encoder_layer, call_with_mask),
    "attention": (lambda: nn.MultiheadAttention(DIM, 4, batch_first=True), call_attention),
    "transformer": (lambda: nn.Transformer(DIM, 4, 1, 1, 2 * DIM, batch_first=True), call_transformer),
}


def make_model_with_frozen_encoder(name, needs_grad=True):
    make_encoder, call = ENCODERS[name]

    def function(m, x):
        with torch.set_grad_enabled(needs_grad):
            h = call(m.encoder, x)
        return m.head(F.gelu(m.norm(h)))

    encoder = make_encoder().eval().requires_grad_(False)
    return TokenModel(function, encoder=encoder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *select_each_pair(ENCODERS, ["frozen"]),
        *select_each_pair(["encoder", "attention"], ["no_grad", "between trained blocks"]),
    ],
)
def test_a_frozen_encoder_takes_the_path_of_eager(name, kind):
    def make():
        model = make_model_with_frozen_encoder(name, needs_grad=kind != "no_grad")
        if kind != "between trained blocks":
            return model
        return nn.Sequential(nn.Sequential(model, nn.LayerNorm(DIM)), nn.Linear(DIM, 2))

    assert_eager_bits(make_step(make, make_tokens(2)))


@pytest.mark.parametrize("name", ["encoder", "layer"])
def test_a_frozen_encoder_in_a_scope_takes_the_path_of_eager(name):
    step = make_step(lambda: make_model_with_frozen_encoder(name), make_tokens(2))
    with fastvit.recompute_scope():
        actual = step(leave_unconverted)
    assert_same_bits(actual, step(leave_unconverted))


@pytest.mark.parametrize("level", LEVELS)
def test_a_view_of_what_a_hook_returns_may_be_written_to_without_gradients(level):
    """torch refuses to tell the node of such a view."""

    def function(m, x):
        y = m.first(x)
        h = m.norm(y)
        with torch.no_grad():
            m.frozen(F.leaky_relu_(h.flatten(1).view_as(h)))
        return m.head(F.gelu(y))

    def make():
        norm = nn.LayerNorm(DIM)
        norm.register_full_backward_pre_hook(lambda module, gradients: None)
        return TokenModel(function, norm=norm, frozen=nn.Linear(DIM, DIM).requires_grad_(False))

    assert_eager_bits(make_step(make, make_tokens()), **LEVELS[level])


# Questions whose answer is the same with and without a scope.
QUESTIONS = {
    "has_torch_function": lambda x: torch.overrides.has_torch_function((x,)),
    "has_torch_function of several": lambda x: torch.overrides.has_torch_function((x, None, 3.0)),
    "is enabled": lambda x: not torch._C._is_torch_function_enabled(),
    "is_tensor_like": lambda x: not is_tensor_like(x),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_forward_that_asks_for_modes_finds_none_of_ours(question):
    def function(m, x):
        y = m.norm(m.first(x))
        return m.head(y.sin() if QUESTIONS[question](y) else F.gelu(y))

    assert_eager_bits(make_step(lambda: TokenModel(function), make_tokens()))


# --- modes outside and inside that change a call


class ChangesCalls(TorchFunctionMode):
    """`change(func, args, kwargs)` returns the result of a call."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.change(func, args, dict(kwargs or {}))


NOISE = torch.rand(8, 16, DIM, generator=torch.Generator().manual_seed(3))


def norm_operands(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return input, weight, bias


def change_eps(norm):
    def change(func, args, kwargs):
        if func is norm:
            args, kwargs = args[:4], kwargs | {"eps": 0.1}
        return func(*args, **kwargs)

    return change


def change_number(func, args, kwargs):
    return func(args[0], 3.0) if func in (torch.add, torch.Tensor.add) else func(*args, **kwargs)


def change_dropout(func, args, kwargs):
    return args[0] * NOISE if func is F.dropout else func(*args, **kwargs)


def change_bias(func, args, kwargs):
    if func is F.linear and len(args) > 2 and args[2] is not None:
        args = *args[:2], args[2] * 2
    return func(*args, **kwargs)


def change_order(func, args, kwargs):
    """Writes the norm out as several ops, the last of which is a sum with a weight."""
    if func is F.layer_norm:
        x, w, b = norm_operands(*args, **kwargs)
        return (x - x.mean(-1, True)) * (x.var(-1, keepdim=True) + 0.1).rsqrt() * w + b
    return func(*args, **kwargs)


CHANGES = {
    "eps": change_eps(F.layer_norm),
    "eps of groups": change_eps(F.group_norm),
    "number": change_number,
    "dropout": change_dropout,
    "bias": change_bias,
    "order": change_order,
}


def run_ops_to_change(m, x):
    h = F.layer_norm(m.first(x) * 0.1, (DIM,), m.w, m.b, 1e-5)
    h = F.gelu(F.group_norm(h.flatten(0, 1), 8, m.w, m.b, 1e-5)).view(h.shape)
    h = F.dropout(F.gelu(torch.add(m.second(h), 1.0)), 0.3)
    return m.head(h)


def make_model_to_change(function=run_ops_to_change, is_frozen=False):
    second = nn.Linear(DIM, DIM)
    second.bias.requires_grad_(not is_frozen)
    b = torch.randn(DIM) if is_frozen else nn.Parameter(torch.randn(DIM))
    return TokenModel(function, second=second, w=nn.Parameter(torch.ones(DIM)), b=b)


@pytest.mark.parametrize(
    ("change", "biases", "place", "level"),
    select_each_pair(CHANGES, ["trained", "frozen"], ["outside", "inside"], LEVELS),
)
def test_a_mode_that_changes_calls_changes_those_of_recipes(change, biases, place, level):
    def use_mode():
        return ChangesCalls(CHANGES[change])

    def run_in_mode(m, x):
        with use_mode():
            return run_ops_to_change(m, x)

    def make():
        function = run_in_mode if place == "inside" else run_ops_to_change
        return make_model_to_change(function, is_frozen=biases == "frozen")

    context = use_mode if place == "outside" else None
    assert_eager_bits(make_step(make, make_tokens(), context), **LEVELS[level])


# --- subclasses of tensors


class Image(torch.Tensor):
    """A subclass without methods, as tensors of medical images are."""


class OwnNorm(torch.Tensor):
    """A weight with a layer norm of its own, which ends with a product and a sum."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.layer_norm:
            x, w, b = norm_operands(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return (x - x.mean(-1, True)) * w.as_subclass(torch.Tensor) + b
        return super().__torch_function__(func, types, args, kwargs or {})


class Counts(torch.Tensor):
    """Counts the calls with it, and the reads of its attributes."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


SUBCLASSES = {"Image": Image, "Counts": Counts}


@pytest.mark.parametrize(
    ("name", "level"), [*select_each_pair(["Counts"], LEVELS), ("Image", "default"), ("Image", "least")]
)
def test_an_input_of_a_subclass_has_eager_bits_and_less_is_kept(name, level):
    def make():
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3))

    x = make_images(size=32).as_subclass(SUBCLASSES[name])
    assert_eager_bits(make_step(make, x), **LEVELS[level])
    eager, model = make(), fastvit.convert(make(), **LEVELS[level])
    assert measure_kept_bytes(model, x) <= 0.55 * measure_kept_bytes(eager, x)
    assert type(model(x)) is SUBCLASSES[name]


@pytest.mark.parametrize("level", LEVELS)
def test_a_converted_model_calls_a_subclass_as_often(level):
    counts = []
    for convert in (leave_unconverted, partial(fastvit.convert, **LEVELS[level])):
        model = convert(make_model_to_change())
        for name in ("weight", "bias"):
            parameter = getattr(model.second, name).detach().as_subclass(Counts)
            model.second.register_parameter(name, nn.Parameter(parameter))
        Counts.calls = 0
        y = model(make_tokens())
        counts.append(Counts.calls)
        y.as_subclass(torch.Tensor).sum().backward()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_a_weight_with_a_norm_of_its_own_has_eager_bits(kind):
    def function(m, x):
        return m.head(F.gelu(F.layer_norm(m.first(x), (DIM,), m.w, m.b, 0.5)))

    def make():
        w = nn.Parameter(torch.randn(DIM).as_subclass(OwnNorm))
        b = torch.randn(DIM) if kind == "frozen" else nn.Parameter(torch.randn(DIM))
        return TokenModel(function, w=w, b=b)

    assert_eager_bits(make_step(make, make_tokens()))


EXPANDED = {
    "linear": (lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4)), make_tokens),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 1)), make_images),
    "norms": (
        lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.GELU(), nn.Linear(DIM, 4)),
        make_tokens,
    ),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), make_images),
}


@pytest.mark.parametrize(
    ("name", "level"), [*select_each_value(EXPANDED, LEVELS), ("norms", "default"), ("conv", "least")]
)
def test_expanded_weights_give_eager_gradients_of_each_sample(name, level):
    """Expanded weights refuse reads of their attributes."""
    make, make_input = EXPANDED[name]

    def run(convert):
        torch.manual_seed(0)
        model = convert(make())
        y = call_for_per_sample_grads(model)(make_input())
        y.square().sum().backward()
        return [y.detach(), *(p.grad_sample for p in model.parameters()), *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_jagged_tensors_have_eager_bits(level):
    parts = [torch.randn(40, DIM), torch.randn(20, DIM)]

    def run(convert):
        torch.manual_seed(0)
        layers = nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
        model = convert(nn.Sequential(*layers))
        y = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
        y.values().square().sum().backward()
        return [y.values().detach(), *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])
