"""fastvit.convert: the layers that are found, the kind of trace, and the reasons against others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from convert_models import Plain, assert_same, conv, images, modes, spread, trained
from torch import nn

import fastvit


class Twice(nn.Module):
    """One layer called twice, each time followed by the same activation."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = conv(), nn.BatchNorm2d(8), nn.SiLU()

    def forward(self, x):
        for _ in range(2):
            x = self.act(self.bn(self.conv(x)))
        return x


class TwiceDifferently(Twice):
    def forward(self, x):
        return self.bn(self.conv(self.act(self.bn(self.conv(x)))))


class TwoReaders(Twice):
    def forward(self, x):
        z = self.bn(self.conv(x))
        return self.act(z) * z


class Functional(Twice):
    def forward(self, x):
        return self.conv(F.gelu(self.bn(self.conv(x))))


class Tokens(nn.Module):
    """As in LeViT: (N, L, C) is flattened for the layer, and viewed as (N, L, C) before the activation."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Hardswish()

    def forward(self, x):
        x = self.linear(x)
        x = self.bn(x.flatten(0, 1)).reshape_as(x)
        return self.linear(self.act(x))


class Transposed(Tokens):
    """A reshape that copies: the activation's input is not the layer's output."""

    def forward(self, x):
        x = self.linear(x).transpose(1, 2)
        return self.act(self.bn(x).flatten(0, 1))


class Untraceable(nn.Module):
    """Its control flow depends on values, so only the block inside can be traced."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.Identity(), nn.GELU(), conv())
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.block(x)
        return self.bn(x) if x.sum() != 0 else x


class ByShape(nn.Module):
    """Its control flow depends on shapes: torch.export can follow, symbolic tracing cannot."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.conv1, self.bn1, self.between, self.act = conv(), nn.BatchNorm2d(8), nn.Identity(), act()
        self.conv2, self.bn2 = conv(), nn.BatchNorm2d(8)
        self.pair = nn.Sequential(conv(), nn.BatchNorm2d(8))

    def forward(self, x):
        if x.shape[-1] > 3:
            x = self.act(self.between(self.bn1(self.conv1(x))))
        y = self.bn2(self.conv2(x))
        y += x
        return self.conv2(F.gelu(self.pair(y)))


class PeeksInside(nn.Module):
    """Untraceable, and reads the layer's output before the activation, which only a run shows."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.GELU())

    def forward(self, x):
        x = self.block[0](x)
        between = self.block[1](x)
        return self.block[2](between) + between if x.sum() != 0 else x


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).tanh()


class OwnCheck(nn.BatchNorm2d):
    """A subclass with an unchanged forward."""


class Apex(nn.Module):
    """SyncBatchNorm as apex has it: the residual is the layer's second argument."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = conv(), fastvit.SyncBatchNorm(8, fuse_relu=True)
        self.bn2, self.bn3 = fastvit.SyncBatchNorm(8, fuse_relu=True), fastvit.SyncBatchNorm(8)

    def forward(self, x):
        z = self.conv(x)
        y = self.bn1(self.conv(z), z)
        y = self.bn2(self.conv(y), z=y)  # y is rebuilt itself
        return self.conv(self.bn3(self.conv(y), y))


class Standardised(nn.Conv2d):
    """Weight standardisation by functional batch_norm, as in timm's ScaledStdConv2d."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True).view_as(self.weight)
        return F.conv2d(x, weight, padding=1)


def sequential(*layers):
    return nn.Sequential(*layers)


FOUND = {
    "twice": (Twice, images, {"bn": "recompute"}),
    "twice differently": (TwiceDifferently, images, {"bn": "recompute"}),
    "two readers": (TwoReaders, images, {"bn": "inplace"}),
    "functional": (Functional, images, {"bn": "inplace"}),
    "tokens": (Tokens, lambda: torch.randn(3, 5, 8), {"bn": "recompute"}),
    "transposed": (Transposed, lambda: torch.randn(3, 5, 8), {"bn": "recompute"}),
    "untraceable": (Untraceable, images, {"block.1": "recompute", "bn": "left"}),
    "peeks inside": (PeeksInside, images, {"block.1": "recompute"}),
    "own forward": (lambda: sequential(conv(), OwnForward(8), nn.ReLU()), images, {"1": "left"}),
    "own name": (lambda: sequential(conv(), OwnCheck(8), nn.ReLU(), conv()), images, {"1": "recompute"}),
    "instance norm": (lambda: sequential(conv(), nn.InstanceNorm2d(8), nn.ReLU()), images, {}),
    "standardised": (lambda: sequential(Standardised(8, 8, 3), nn.ReLU()), images, {}),
    "other activation": (lambda: sequential(conv(), nn.BatchNorm2d(8), nn.Tanh()), images, {"1": "left"}),
    "to a convolution": (lambda: sequential(conv(), nn.BatchNorm2d(8), conv()), images, {"1": "inplace"}),
    "in one dimension": (
        lambda: sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ELU(), nn.Linear(8, 8)),
        lambda: torch.randn(9, 8),
        {"1": "inplace"},
    ),
    "in three": (
        lambda: sequential(nn.Conv3d(2, 4, 1), nn.BatchNorm3d(4), nn.SiLU()),
        lambda: torch.randn(2, 2, 3, 4, 5),
        {"1": "recompute"},
    ),
    "synchronised": (
        lambda: sequential(conv(), fastvit.SyncBatchNorm(8), nn.GELU(), conv()), images, {"1": "recompute"},
    ),
    "synchronised, channels last": (
        lambda: sequential(
            nn.Linear(8, 8), fastvit.SyncBatchNorm(8, channel_last=True), nn.SiLU(), nn.Linear(8, 8)
        ),
        lambda: torch.randn(3, 5, 8),
        {"1": "recompute"},
    ),
    "synchronised, with relu": (
        lambda: sequential(conv(), fastvit.SyncBatchNorm(8, fuse_relu=True), conv()), images,
        {"1": "recompute"},
    ),
    "synchronised, with residuals": (Apex, images, {"bn1": "recompute", "bn2": "left", "bn3": "left"}),
    "without weights": (
        lambda: sequential(conv(), nn.BatchNorm2d(8, affine=False, track_running_stats=False), nn.GELU()),
        images,
        {"1": "recompute"},
    ),
    "average of all batches": (
        lambda: sequential(conv(), nn.BatchNorm2d(8, momentum=None), nn.GELU()), images, {"1": "recompute"},
    ),
    "a layer by itself": (lambda: nn.BatchNorm2d(8), images, {"": "left"}),
    "fused already": (lambda: sequential(conv(), fastvit.InPlaceABN(8)), images, {"1": "left"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    make, inputs, expected = FOUND[name]
    model = spread(make())
    _, report = fastvit.convert(model)
    assert modes(report) == expected, str(report)
    for training in (True, False):
        result = fastvit.verify(model.train(training), inputs())
        assert result, result


@pytest.mark.parametrize("act,mode", [(nn.GELU, "recompute"), (nn.LeakyReLU, "inplace")])
def test_layers_that_only_an_export_reaches(act, mode):
    model = spread(ByShape(act))
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn1": "left", "bn2": "left", "pair.1": "left"}
    _, report = fastvit.convert(model, example_inputs=images())
    assert modes(report) == {"bn1": mode, "bn2": "left", "pair.1": "inplace"}, str(report)
    assert model.bn1.activation == {"recompute": "gelu", "inplace": "leaky_relu"}[mode]
    for training in (True, False):
        result = fastvit.verify(model.train(training), images())
        assert result, result
    # a hook on the Identity between, which an export does not show, must see what it saw
    seen = []
    model.between.register_forward_hook(lambda _, __, output: seen.append(output))
    x = images()
    model(x)
    torch.testing.assert_close(seen[0], fastvit.revert(copy.deepcopy(model)).bn1(model.conv1(x)))


def test_an_export_with_regions():
    class Region(ByShape):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                z = self.pair(x)
            return super().forward(x) + z

    model = spread(Region())
    _, report = fastvit.convert(model, example_inputs=images())
    assert report["bn1"].mode == "recompute"
    result = fastvit.verify(model, images())
    assert result, result


def test_hooks_are_not_run_by_looking():
    model, seen = ByShape(), []
    model.conv1.register_forward_hook(lambda *_: seen.append(1))
    fastvit.convert(model)
    assert not seen


def test_reasons_name_what_stands_in_the_way():
    def reason(name):
        _, report = fastvit.convert(FOUND[name][0]())
        return next(iter(report)).reason

    assert "OwnForward overrides forward" in reason("own forward")
    assert "Tanh" in reason("other activation")
    assert "already a InPlaceABN" in reason("fused already")
    _, report = fastvit.convert(Untraceable())
    assert "no trace reaches it" in report["bn"].reason and report.untraced == ["Untraceable"]


def test_torch_sync_batch_norm_becomes_synchronised():
    model = spread(nn.Sequential(conv(), nn.SyncBatchNorm(8), nn.ReLU(), conv()))
    fastvit.convert(model)
    assert isinstance(model[1], fastvit.BatchNormActSync) and isinstance(model[1], nn.SyncBatchNorm)
    plain = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv())
    plain.load_state_dict(model.state_dict())
    x = images()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_mapillarys_abn():
    """By name, so that the packages need not be installed."""

    class ABN(nn.Module):
        def __init__(self, features, activation, slope):
            super().__init__()
            self.num_features, self.affine, self.eps, self.momentum = features, True, 1e-5, 0.1
            self.activation, self.activation_param = activation, slope
            self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
            self.register_buffer("running_mean", torch.zeros(features))
            self.register_buffer("running_var", torch.ones(features))

        def forward(self, x):
            x = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum,
                self.eps,
            )  # fmt: skip
            return F.relu(x) if self.activation == "relu" else F.leaky_relu(x, self.activation_param)

    ABN.__module__ = "inplace_abn.abn"
    model = nn.Sequential(conv(), ABN(8, "relu", 0.0), conv(), ABN(8, "leaky_relu", 0.1), conv())
    keys = list(model.state_dict())
    _, report = fastvit.convert(model)
    assert modes(report) == {"1": "recompute", "3": "inplace"}
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict())
    result = fastvit.verify(model, images())
    assert result, result
    fastvit.revert(model)
    assert type(model[1]) is ABN and model[1].activation == "relu" and "memory" not in model[1].__dict__


def test_abn_by_its_look_alike():
    from fastvit.compat.inplace_abn import ABN

    model = nn.Sequential(conv(), ABN(8, activation="relu"), conv(), ABN(8, activation_param=0.1), conv())
    _, report = fastvit.convert(model)
    assert modes(report) == {"1": "recompute", "3": "inplace"}
    result = fastvit.verify(model, images())
    assert result, result


@pytest.mark.parametrize("layer", ["InPlaceABN", "InPlaceABNSync"])
def test_in_place_layers_with_a_slope_of_0_are_relu(layer):
    from fastvit.compat import inplace_abn

    model = nn.Sequential(conv(), getattr(inplace_abn, layer)(8, activation_param=0.0), conv()).double()
    with torch.no_grad():
        model[1].weight[::3] *= -1
        model[1].bias.normal_()
    plain = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv()).double()
    plain.load_state_dict({key.replace("2.", "3."): value for key, value in model.state_dict().items()})
    with torch.no_grad():
        plain[1].weight.copy_(plain[1].weight.abs() + plain[1].eps)
    x = images().double()
    want, got = trained(plain, x), trained(model, x)
    want[2] *= torch.sign(model[1].weight)  # of |weight| + eps
    assert_same(got, want)
    assert_same(trained(copy.deepcopy(model), x), want)
    assert "leaky_relu[0" in repr(model[1])
    with torch.no_grad():
        before = x.clone()
        model[1](x)
        assert torch.equal(x, before)


def test_lazy_layers_are_left():
    _, report = fastvit.convert(nn.Sequential(conv(), nn.LazyBatchNorm2d(), nn.ReLU()))
    assert modes(report) == {"1": "left"}


def test_a_forward_leaves_no_trace_of_tracing():
    class Remembers(Plain):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = x
            self.all.append(x)
            return super().forward(x)

    model = Remembers()
    model.all = []
    fastvit.convert(model)
    assert model.calls == 0 and "last" not in model.__dict__ and model.all == []
    copy.deepcopy(model)
