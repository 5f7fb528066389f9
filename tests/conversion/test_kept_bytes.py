"""A converted model frees most of the bytes that a forward keeps, in forms of models that are in use."""

from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conversion.cases import add_in_turn, select_each_pair, select_each_value
from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    TokenModel,
    WrappedNorm,
    assert_eager_bits,
    convert_at,
    make_images,
    make_step,
    make_tokens,
)
from conversion.vit_models import measure_kept_bytes


def measure_converted_bytes(make, x, level="default"):
    """Returns the bytes that a forward of the converted model keeps. Raises unless its bits are eager's."""
    assert_eager_bits(make_step(make, x), **LEVELS[level])
    return measure_kept_bytes(convert_at(level, make()), x)


def measure_kept_share(make, x, level="default"):
    """Returns the bytes that the converted model keeps, as a share of those that the eager model keeps."""
    return measure_converted_bytes(make, x, level) / measure_kept_bytes(make(), x)


def assert_in_place_keeps_no_more(make, x, level="default"):
    """Raises if the model `make(inplace=True)` keeps more than `make(inplace=False)`, both converted."""
    in_place, out_of_place = (
        measure_converted_bytes(partial(make, inplace=inplace), x, level) for inplace in (True, False)
    )
    assert in_place <= 1.02 * out_of_place + 4096


# --- ops in place keep no more than ops out of place


def make_volumes():
    return torch.randn(2, 3, 12, 12, 12, generator=torch.Generator().manual_seed(5))


def make_squares():
    return make_images(size=24)


INSTANCE_NORMS = {
    "3d": lambda: nn.InstanceNorm3d(16, affine=True),
    "3d, without affine": lambda: nn.InstanceNorm3d(16),
    "2d": lambda: nn.InstanceNorm2d(16, affine=True),
    "2d, without affine": lambda: nn.InstanceNorm2d(16),
    "2d, with statistics": lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
}
ACTIVATIONS = {
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.01, inplace),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": lambda inplace: nn.ELU(1.0, inplace),
}


@pytest.mark.parametrize(
    ("norm", "activation", "level"),
    [
        *add_in_turn(select_each_value(INSTANCE_NORMS, ACTIVATIONS), ["default"]),
        ("3d, without affine", "leaky_relu", "default"),
        ("3d", "silu", "products"),
        ("2d", "leaky_relu", "least"),
    ],
)
def test_an_activation_in_place_after_an_instance_norm_keeps_no_more(norm, activation, level):
    conv, x = (nn.Conv3d, make_volumes()) if norm.startswith("3d") else (nn.Conv2d, make_squares())

    def make(inplace):
        parts = [
            (conv(channels, 16, 3, padding=1), INSTANCE_NORMS[norm](), ACTIVATIONS[activation](inplace))
            for channels in (3, 16, 16)
        ]
        return nn.Sequential(*sum(parts, ()))

    assert_in_place_keeps_no_more(make, x, level)


VIEWS = {
    "view": lambda h: h.unflatten(-1, (8, DIM // 8)),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "transpose": lambda h: h.transpose(1, 2),
    "permute": lambda h: h.permute(2, 0, 1),
}
WRITES = {
    "relu": lambda h, inplace: F.relu(h, inplace),
    "silu": lambda h, inplace: F.silu(h, inplace),
    "leaky_relu": lambda h, inplace: F.leaky_relu(h, inplace=inplace),
}
NORMS = {
    "layer_norm": (lambda: nn.LayerNorm(DIM), lambda norm, h: norm(h)),
    "group_norm": (
        lambda: nn.GroupNorm(8, DIM),
        lambda norm, h: norm(h.transpose(1, 2)).transpose(1, 2),
    ),
}


@pytest.mark.parametrize(("view", "norm", "write"), add_in_turn(select_each_pair(VIEWS, NORMS), WRITES))
def test_a_write_to_a_view_of_a_norm_keeps_no_more(view, norm, write):
    make_norm, normalize = NORMS[norm]

    def make(inplace):
        def function(m, x):
            for linear, module in zip(m.linears, m.norms, strict=True):
                h = VIEWS[view](normalize(module, linear(x)))
                x = WRITES[write](h, inplace).reshape(-1).view(8, 16, DIM)
            return m.head(x)

        linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        norms = nn.ModuleList(make_norm() for _ in range(3))
        return FunctionModel(function, norms=norms, linears=linears, head=nn.Linear(DIM, DIM))

    assert_in_place_keeps_no_more(make, make_tokens())


def make_mlps(make_activation=nn.GELU, depth=3):
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), make_activation(), nn.Linear(4 * DIM, DIM)
            )
            for _ in range(depth)
        )
    )


# The largest shares of eager's bytes that MLPs keep.
LARGEST_SHARES = {"default": 0.52, "products": 0.3, "least": 0.05}


@pytest.mark.parametrize(("activation", "level"), select_each_value(ACTIVATIONS, LEVELS))
def test_an_activation_in_place_after_a_linear_of_tokens_keeps_no_more(activation, level):
    """The result of such a Linear is a view of a product."""

    def make(inplace):
        return make_mlps(lambda: ACTIVATIONS[activation](inplace))

    assert_in_place_keeps_no_more(make, make_tokens(), level)


@pytest.mark.parametrize("level", LEVELS)
def test_mlps_with_an_activation_in_place_keep_a_small_share(level):
    eager = measure_kept_bytes(make_mlps(nn.SiLU), make_tokens())
    kept = measure_converted_bytes(lambda: make_mlps(lambda: nn.SiLU(True)), make_tokens(), level)
    assert kept <= LARGEST_SHARES[level] * eager


# --- hooks and reads that change nothing


def add_to_modules(register, model):
    """Registers a hook in all modules, and returns the model."""
    for module in model.modules():
        register(module)
    return model


def after_forward(read):
    """Returns a function that registers a forward hook, which calls `read(y)` and changes no output."""

    def hook(module, x, y):
        read(y)

    return lambda module: module.register_forward_hook(hook)


HOOKS = {
    "full backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "numpy": after_forward(lambda y: y.detach().numpy().std()),
    "numpy of a copy on the CPU": after_forward(lambda y: y.detach().cpu().numpy().std()),
    "asarray": after_forward(lambda y: numpy.asarray(y.detach()).mean()),
    "a cast to numpy": after_forward(lambda y: y.detach().float().numpy().mean()),
    "tolist": after_forward(lambda y: y.detach().std().tolist()),
    "item": after_forward(lambda y: y.detach().abs().max().item()),
    "requires_grad_": after_forward(lambda y: y.detach().requires_grad_()),
    "retain_grad": after_forward(lambda y: y.retain_grad()),
    "a hook of the gradient": after_forward(lambda y: y.register_hook(lambda dy: None)),
}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *select_each_pair(HOOKS, ["default"]),
        *add_in_turn([(name,) for name in [*HOOKS][::4]], ["products", "least"]),
    ],
)
def test_models_with_hooks_that_change_nothing_keep_a_small_share(name, level):
    make = partial(add_to_modules, HOOKS[name])
    share = measure_kept_share(lambda: make(make_mlps()), make_tokens(), level)
    assert share <= LARGEST_SHARES[level] + 0.01


READS = {"numpy": lambda t: t.detach().numpy().mean(), "address": lambda t: t.untyped_storage().data_ptr()}


@pytest.mark.parametrize(("read", "level"), [*select_each_pair(["numpy"], LEVELS), ("address", "default")])
def test_reads_after_the_blocks_have_ended_keep_no_more(read, level):
    def make(reads):
        def function(m, x):
            outputs = []
            for block in m.blocks:
                outputs.append(x := block(x))
            for y in outputs if reads else ():
                READS[read](y)
            return x

        return FunctionModel(function, blocks=nn.ModuleList(make_mlps() for _ in range(3)))

    shares = [measure_kept_share(lambda: make(reads), make_tokens(), level) for reads in (False, True)]  # noqa: B023
    assert shares[1] <= shares[0] + 0.001


@pytest.mark.parametrize("kind", ["full backward", "full backward pre"])
def test_convolutions_with_backward_hooks_keep_no_more(kind):
    def make():
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3))

    without = measure_kept_share(make, make_squares())
    share = measure_kept_share(lambda: add_to_modules(HOOKS[kind], make()), make_squares())
    assert share <= without + 0.01


# Methods whose names end as those of writes do.
CALLS_LIKE_WRITES = {
    "requires_grad_": lambda h: h.detach().requires_grad_(),
    "requires_grad_ of the result": lambda h: h.requires_grad_(),
    "retains_grad": lambda h: h.retain_grad(),
    "unsqueeze_": lambda h: h.detach().unsqueeze_(0),
    "transpose_": lambda h: h.detach().transpose_(0, 1),
}


@pytest.mark.parametrize("name", CALLS_LIKE_WRITES)
def test_a_method_with_the_name_of_a_write_that_writes_nothing_keeps_no_more(name):
    def function(m, x):
        h = m.norm(m.first(x))
        CALLS_LIKE_WRITES[name](h)
        return m.head(F.gelu(h))

    assert measure_kept_share(lambda: TokenModel(function), make_tokens()) <= 0.6


# --- structures


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, depth=2):
        if depth:
            x = self(x, depth - 1)
        for _ in range(3):
            x = x + self.b(F.gelu(self.a(self.norm(x))))
        return x


PLACES = {
    "the model": Recursive,
    "in a model": lambda: nn.Sequential(Recursive(), nn.Linear(DIM, 4)),
    "a block": lambda: nn.Sequential(nn.Sequential(Recursive(), Recursive()), nn.Linear(DIM, 4)),
}


@pytest.mark.parametrize(
    ("place", "level"),
    [*select_each_value(PLACES, LEVELS), ("in a model", "default"), ("a block", "default")],
)
def test_a_module_that_calls_itself_keeps_a_small_share(place, level):
    assert measure_kept_share(PLACES[place], make_tokens(), level) <= LARGEST_SHARES[level] + 0.1


class WrappedNormAct(WrappedNorm):
    def forward(self, x):
        return F.silu(self.norm(x))


@pytest.mark.parametrize("module", [WrappedNorm, WrappedNormAct])
def test_least_keeps_no_more_than_the_default_with_a_module_round_a_norm(module):
    def make():
        parts = [(nn.Conv2d(i, 16, 3), module(16), nn.SiLU()) for i in (3, 16, 16)]
        return nn.Sequential(*sum(parts, ()), nn.Conv2d(16, 4, 1))

    default, least = (measure_kept_share(make, make_squares(), level) for level in ("default", "least"))
    assert least <= default <= 0.4
