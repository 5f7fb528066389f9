"""A scope changes no forward, and notes no call that a mode or a subclass has changed: eager's bits."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode, is_tensor_like

import fastvit
from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    assert_eager_bits,
    assert_same_bits,
    list_gradients,
    make_images,
    make_step,
    make_tokens,
)
from conversion.vit_models import measure_kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

# --- paths that torch's modules and programs choose where there is a mode

PADDED = torch.tensor([[0] * 16, [0] * 9 + [1] * 7]).bool()


def layer():
    return nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)


ENCODERS = {  # in evaluation, under no_grad or frozen
    "encoder": lambda: nn.TransformerEncoder(layer(), 1),
    "two layers": lambda: nn.TransformerEncoder(layer(), 2),
    "layer": layer,
    "attention": lambda: nn.MultiheadAttention(DIM, 4, batch_first=True),
    "transformer": lambda: nn.Transformer(DIM, 4, 1, 1, 2 * DIM, batch_first=True),
}


def encode(name, encoder, x):
    if name == "attention":
        return encoder(x, x, x, key_padding_mask=PADDED, need_weights=False)[0]
    if name == "transformer":
        return encoder(x, x, src_key_padding_mask=PADDED)
    return encoder(x, src_key_padding_mask=PADDED)


@pytest.mark.parametrize("kind", ["no_grad", "frozen", "frozen, with others", "scope"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_fast_path_of_a_frozen_encoder(name, kind):
    def function(m, x):
        with torch.no_grad() if kind == "no_grad" else contextlib.nullcontext():
            h = encode(name, m.encoder, x)
        return m.head(F.gelu(m.norm(h)))

    def make():
        encoder = ENCODERS[name]().eval().requires_grad_(False)
        return FunctionModel(function, encoder=encoder, norm=nn.LayerNorm(DIM), head=nn.Linear(DIM, 2))

    step = make_step(make, make_tokens(2))
    if kind == "scope":
        with fastvit.recompute_scope():
            actual = step(lambda model: model)
        assert_same_bits(actual, step(lambda model: model))
    elif kind == "frozen, with others":  # a block of its own, between blocks that are trained
        step = make_step(
            lambda: nn.Sequential(nn.Sequential(make(), nn.LayerNorm(2)), nn.Linear(2, 2)), make_tokens(2)
        )
        assert_eager_bits(step)
    else:
        assert_eager_bits(step)


ASKS = {
    "has_torch_function": lambda x: torch.overrides.has_torch_function((x,)),
    "of several": lambda x: torch.overrides.has_torch_function((x, None, 3.0)),
    "is enabled": lambda x: not torch._C._is_torch_function_enabled(),
    "is_tensor_like": lambda x: not is_tensor_like(x),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_view_of_what_a_hook_returns_is_written_to_without_gradients(level):
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
        frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        return FunctionModel(
            function, first=nn.Linear(DIM, DIM), norm=norm, frozen=frozen, head=nn.Linear(DIM, 3)
        )

    assert_eager_bits(make_step(make, make_tokens()), **LEVELS[level])


@pytest.mark.parametrize("ask", ASKS)
def test_a_forward_that_asks_for_modes(ask):
    def function(m, x):
        y = m.norm(m.first(x))
        return m.head(y.sin() if ASKS[ask](y) else F.gelu(y))

    def make():
        return FunctionModel(
            function, first=nn.Linear(DIM, DIM), norm=nn.LayerNorm(DIM), head=nn.Linear(DIM, 2)
        )

    assert_eager_bits(make_step(make, make_tokens()))


# --- modes outside and inside that change a call


class Changes(TorchFunctionMode):
    """`change(func, args, kwargs)` returns the result of a call."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.change(func, args, dict(kwargs or {}))


NOISE = torch.rand(8, 16, DIM, generator=torch.Generator().manual_seed(3))


def norm_operands(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return input, weight, bias


def another_eps(func, args, kwargs):
    if func is F.layer_norm:
        args, kwargs = args[:4], kwargs | {"eps": 0.1}
    return func(*args, **kwargs)


def another_eps_of_groups(func, args, kwargs):
    if func is F.group_norm:
        args, kwargs = args[:4], kwargs | {"eps": 0.1}
    return func(*args, **kwargs)


def another_number(func, args, kwargs):
    return func(args[0], 3.0) if func in (torch.add, torch.Tensor.add) else func(*args, **kwargs)


def another_dropout(func, args, kwargs):
    return args[0] * NOISE if func is F.dropout else func(*args, **kwargs)


def another_bias(func, args, kwargs):
    if func is F.linear and len(args) > 2 and args[2] is not None:
        args = *args[:2], args[2] * 2
    return func(*args, **kwargs)


def another_order(func, args, kwargs):
    """The norm is written out, and its last op is a sum with a weight."""
    if func is F.layer_norm:
        x, w, b = norm_operands(*args, **kwargs)
        return (x - x.mean(-1, True)) * (x.var(-1, keepdim=True) + 0.1).rsqrt() * w + b
    return func(*args, **kwargs)


CHANGES = [another_eps, another_eps_of_groups, another_number, another_dropout, another_bias, another_order]


def changed(m, x):
    h = F.layer_norm(m.first(x) * 0.1, (DIM,), m.w, m.b, 1e-5)
    h = F.gelu(F.group_norm(h.flatten(0, 1), 8, m.w, m.b, 1e-5)).view(h.shape)
    h = F.dropout(F.gelu(torch.add(m.second(h), 1.0)), 0.3)
    return m.head(h)


def make_changed(frozen=False):
    parts = {name: nn.Linear(DIM, DIM) for name in ("first", "second", "head")}
    parts["second"].bias.requires_grad_(not frozen)
    b = torch.randn(DIM) if frozen else nn.Parameter(torch.randn(DIM))
    return FunctionModel(changed, **parts, w=nn.Parameter(torch.ones(DIM)), b=b)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_mode_outside_that_changes_calls(change, frozen, level):
    assert_eager_bits(
        make_step(lambda: make_changed(frozen), make_tokens(), lambda: Changes(change)), **LEVELS[level]
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_mode_inside_that_changes_calls(change, frozen, level):
    def make():
        model = make_changed(frozen)

        def function(m, x):
            with Changes(change):
                return changed(m, x)

        model.function = function
        return model

    assert_eager_bits(make_step(make, make_tokens()), **LEVELS[level])


# --- subclasses of tensors


class Image(torch.Tensor):
    """Has data of its own, as tensors of medical images do."""


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
    """Counts what is called with it, and reads of its attributes."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def conv_net():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("subclass", [Image, Counts])
def test_an_input_that_is_a_subclass(subclass, level):
    x = make_images(size=32).as_subclass(subclass)
    assert_eager_bits(make_step(conv_net, x), **LEVELS[level])
    eager, model = conv_net(), fastvit.convert(conv_net(), **LEVELS[level])
    assert measure_kept_bytes(model, x) <= 0.55 * measure_kept_bytes(eager, x)
    assert type(model(x)) is subclass


@pytest.mark.parametrize("level", LEVELS)
def test_a_converted_model_calls_a_subclass_as_often(level):
    counts = []
    for convert in (lambda model: model, lambda model: fastvit.convert(model, **LEVELS[level])):
        model = convert(make_changed())
        for name in ("weight", "bias"):
            model.second.register_parameter(
                name, nn.Parameter(getattr(model.second, name).detach().as_subclass(Counts))
            )
        Counts.calls = 0
        y = model(make_tokens())
        counts.append(Counts.calls)
        y.as_subclass(torch.Tensor).sum().backward()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_weight_with_a_norm_of_its_own(frozen):
    def function(m, x):
        return m.head(F.gelu(F.layer_norm(m.first(x), (DIM,), m.w, m.b, 0.5)))

    def make():
        w = nn.Parameter(torch.randn(DIM).as_subclass(OwnNorm))
        b = torch.randn(DIM) if frozen else nn.Parameter(torch.randn(DIM))
        return FunctionModel(function, first=nn.Linear(DIM, DIM), head=nn.Linear(DIM, 3), w=w, b=b)

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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", EXPANDED)
def test_gradients_of_each_sample(name, level):
    """Expanded weights refuse reads of their attributes."""
    make, inputs = EXPANDED[name]

    def run(convert):
        torch.manual_seed(0)
        model = convert(make())
        y = call_for_per_sample_grads(model)(inputs())
        y.square().sum().backward()
        return [y.detach(), *(p.grad_sample for p in model.parameters()), *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_jagged_tensors(level):
    parts = [torch.randn(40, DIM), torch.randn(20, DIM)]

    def run(convert):
        torch.manual_seed(0)
        model = convert(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        )
        y = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
        y.values().square().sum().backward()
        return [y.values().detach(), *list_gradients(model)]

    assert_eager_bits(run, **LEVELS[level])
