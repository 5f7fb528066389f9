"""Tests how many of the bytes that a training forward keeps are freed, in forms of models in use."""

from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conversion.models import (
    DIM,
    LEVELS,
    FunctionModel,
    assert_eager_bits,
    convert_at,
    make_images,
    make_step,
    make_tokens,
)
from conversion.vit_models import measure_kept_bytes


def share_kept(make, x, level="default"):
    """The bytes that a converted model keeps, as a share of those of the model. Its bits are eager's."""
    assert_eager_bits(make_step(make, x), **LEVELS[level])
    return measure_kept_bytes(convert_at(level, make()), x) / measure_kept_bytes(make(), x)


# --- in place, as out of place


def norm_and_activation(norm, activation, dimensions=3, depth=3):
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    channels = [3, *[16] * depth]
    parts = [(conv(i, 16, 3, padding=1), norm(16), activation()) for i in channels[:-1]]
    return nn.Sequential(*sum(parts, ()))


def volumes():
    return torch.randn(2, 3, 12, 12, 12, generator=torch.Generator().manual_seed(5))


def squares():
    return make_images(size=24)


INSTANCE_NORMS = {
    "3d": (lambda c: nn.InstanceNorm3d(c, affine=True), 3, volumes),
    "3d, without affine": (nn.InstanceNorm3d, 3, volumes),
    "2d": (lambda c: nn.InstanceNorm2d(c, affine=True), 2, squares),
    "2d, without affine": (nn.InstanceNorm2d, 2, squares),
    "2d, with statistics": (
        lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
        2,
        squares,
    ),
}
ACTIVATIONS = {
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.01, inplace),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": lambda inplace: nn.ELU(1.0, inplace),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", INSTANCE_NORMS)
def test_an_activation_in_place_after_an_instance_norm(norm, activation, level):
    make_norm, dimensions, inputs = INSTANCE_NORMS[norm]
    inside, outside = (
        share_kept(make, inputs(), level) * measure_kept_bytes(make(), inputs())
        for make in (
            partial(norm_and_activation, make_norm, partial(ACTIVATIONS[activation], inplace), dimensions)
            for inplace in (True, False)
        )
    )
    assert inside <= 1.02 * outside + 4096


VIEWS = {  # a view of a result, an op in place on it, and what is the same out of place
    "view": lambda h: h.unflatten(-1, (8, DIM // 8)),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "transpose": lambda h: h.transpose(1, 2),
    "permute": lambda h: h.permute(2, 0, 1),
}
IN_PLACE = {
    "relu": (torch.relu_, torch.relu),
    "silu": (lambda h: F.silu(h, inplace=True), F.silu),
    "leaky_relu": (F.leaky_relu_, F.leaky_relu),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", IN_PLACE)
@pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])
def test_a_write_to_a_view_of_a_result(norm, write, view):
    def make(write):
        def function(m, x):
            for i in range(3):
                h = m.linears[i](x)
                h = m.norms[i](h) if norm == "layer_norm" else m.norms[i](h.transpose(1, 2)).transpose(1, 2)
                x = write(VIEWS[view](h)).reshape(-1).view(8, 16, DIM)
            return m.head(x)

        norms = [nn.LayerNorm(DIM) if norm == "layer_norm" else nn.GroupNorm(8, DIM) for _ in range(3)]
        linears = [nn.Linear(DIM, DIM) for _ in range(3)]
        return FunctionModel(
            function, norms=nn.ModuleList(norms), linears=nn.ModuleList(linears), head=nn.Linear(DIM, DIM)
        )

    inside, outside = (share_kept(lambda: make(one), make_tokens()) for one in IN_PLACE[write])  # noqa: B023
    before = [measure_kept_bytes(make(one), make_tokens()) for one in IN_PLACE[write]]
    assert inside * before[0] <= 1.02 * outside * before[1] + 4096


def mlp(activation, depth=3):
    parts = [
        (nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), activation(), nn.Linear(4 * DIM, DIM))
        for _ in range(depth)
    ]
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


BOUNDS = {"default": 0.52, "products": 0.3, "least": 0.05}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ["silu", "leaky_relu", "elu", "relu"])
def test_an_activation_in_place_after_a_linear_of_tokens(activation, level):
    """The result of such a Linear is a view of a product."""
    sizes = []
    for inplace in (True, False):
        make = lambda: mlp(lambda: ACTIVATIONS[activation](inplace))  # noqa: B023, E731
        sizes.append(share_kept(make, make_tokens(), level) * measure_kept_bytes(make(), make_tokens()))
    assert sizes[0] <= 1.02 * sizes[1] + 4096
    if activation == "silu":
        assert sizes[0] <= BOUNDS[level] * measure_kept_bytes(make(), make_tokens())


# --- hooks


def hooked(make, register):
    """All modules have a hook that changes nothing."""
    model = make()
    for module in model.modules():
        register(module)
    return model


HOOKS = {
    "full backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "numpy": lambda m: m.register_forward_hook(lambda m, x, y: (y.detach().numpy().std(), None)[1]),
    "numpy of a copy on the CPU": lambda m: m.register_forward_hook(
        lambda m, x, y: (y.detach().cpu().numpy().std(), None)[1]
    ),
    "asarray": lambda m: m.register_forward_hook(lambda m, x, y: (numpy.asarray(y.detach()).mean(), None)[1]),
    "a cast to numpy": lambda m: m.register_forward_hook(
        lambda m, x, y: (y.detach().float().numpy().mean(), None)[1]
    ),
    "tolist": lambda m: m.register_forward_hook(lambda m, x, y: (y.detach().std().tolist(), None)[1]),
    "item": lambda m: m.register_forward_hook(lambda m, x, y: (y.detach().abs().max().item(), None)[1]),
    "requires_grad_": lambda m: m.register_forward_hook(
        lambda m, x, y: (y.detach().requires_grad_(), None)[1]
    ),
    "retain_grad": lambda m: m.register_forward_hook(lambda m, x, y: (y.retain_grad(), None)[1]),
    "a hook of the gradient": lambda m: m.register_forward_hook(
        lambda m, x, y: (y.register_hook(lambda dy: None), None)[1]
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_change_nothing(name, level):
    share = share_kept(lambda: hooked(lambda: mlp(nn.GELU), HOOKS[name]), make_tokens(), level)
    assert share <= BOUNDS[level] + 0.01


READS = {"numpy": lambda t: t.detach().numpy().mean(), "address": lambda t: t.untyped_storage().data_ptr()}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("read", READS)
def test_a_read_after_the_blocks_have_ended(read, level):
    def make(reads):
        def function(m, x):
            outputs = [x]
            for block in m.blocks:
                outputs.append(block(outputs[-1]))
            for y in outputs[1:] if reads else ():
                READS[read](y)
            return outputs[-1]

        return FunctionModel(function, blocks=nn.ModuleList(mlp(nn.GELU) for _ in range(3)))

    without = share_kept(lambda: make(False), make_tokens(), level)
    assert share_kept(lambda: make(True), make_tokens(), level) <= without + 0.001


@pytest.mark.parametrize("kind", ["full backward", "full backward pre"])
def test_backward_hooks_of_convolutions(kind):
    make = lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3))  # noqa: E731
    plain = share_kept(make, squares())
    assert share_kept(lambda: hooked(make, HOOKS[kind]), squares()) <= plain + 0.01


NAMES = {  # methods whose names end as those of writes do
    "requires_grad_": lambda h: h.detach().requires_grad_(),
    "requires_grad_ of the result": lambda h: h.requires_grad_(),
    "retains_grad": lambda h: h.retain_grad(),
    "unsqueeze_": lambda h: h.detach().unsqueeze_(0),
    "transpose_": lambda h: h.detach().transpose_(0, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_write_is_not_a_write(name):
    def make():
        def function(m, x):
            h = m.norm(m.first(x))
            NAMES[name](h)
            return m.head(F.gelu(h))

        parts = {"first": nn.Linear(DIM, DIM), "norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, DIM)}
        return FunctionModel(function, **parts)

    assert share_kept(make, make_tokens()) <= 0.6


# --- structures


class Tree(nn.Module):
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", ["the model", "in a model", "a block"])
def test_a_module_that_calls_itself(place, level):
    makes = {
        "the model": Tree,
        "in a model": lambda: nn.Sequential(Tree(), nn.Linear(DIM, 4)),
        "a block": lambda: nn.Sequential(nn.Sequential(Tree(), Tree()), nn.Linear(DIM, 4)),
    }
    assert share_kept(makes[place], make_tokens(), level) <= BOUNDS[level] + 0.1


class Split(nn.Module):
    """A module round a norm, as of norms by domain or by part of a batch."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.norm(x)


class WithActivation(Split):
    def forward(self, x):
        return F.silu(self.norm(x))


@pytest.mark.parametrize("module", [Split, WithActivation])
def test_least_keeps_no_more_than_the_default_with_a_module_round_a_norm(module):
    def make():
        parts = [(nn.Conv2d(i, 16, 3), module(16), nn.SiLU()) for i in (3, 16, 16)]
        return nn.Sequential(*sum(parts, ()), nn.Conv2d(16, 4, 1))

    default, least = (share_kept(make, squares(), level) for level in ("default", "least"))
    assert least <= default <= 0.4
