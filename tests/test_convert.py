"""fastvit.convert: what is found, what is proven, and that a converted model is what it was."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit.conversion import adopted, prove


def conv(channels=8, features=8):
    return nn.Conv2d(channels, features, 3, padding=1, bias=False)


def spread(model):
    """Weights of both signs and biases, as training leaves them: fresh ones are all 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)[::3] *= -1
                module.bias.normal_(0, 0.3)
    return model


def images(n=4, channels=8, size=6):
    return torch.randn(n, channels, size, size)


def modes(report):
    return {layer.name: layer.mode for layer in report}


class Plain(nn.Module):
    """Two pairs with modules of their own, one with a module that is used twice, and a residual."""

    def __init__(self, act=nn.GELU, **options):
        super().__init__()
        self.conv1, self.bn1, self.act1 = conv(), nn.BatchNorm2d(8), act(**options)
        self.conv2, self.bn2 = conv(), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = conv(), nn.BatchNorm2d(8)
        self.again = act(**options)
        self.head = conv()

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        y = self.again(self.bn2(self.conv2(x)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.head(self.again(y))


ACTS = {
    "relu": lambda: nn.ReLU(),
    "relu_": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(),
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "leaky_relu_": lambda: nn.LeakyReLU(0.2, inplace=True),
    "leaky_relu_0": lambda: nn.LeakyReLU(0.0),
    "elu": lambda: nn.ELU(0.7),
    "gelu": lambda: nn.GELU(),
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("memory", ["auto", "recompute", "keep"])
def test_every_activation_gives_the_same_step(act, memory):
    model = spread(Plain(ACTS[act]))
    converted, report = fastvit.convert(model, memory, images())
    assert converted is model
    expected = "inplace" if memory == "auto" and act in ("leaky_relu", "leaky_relu_", "elu") else memory
    expected = "recompute" if expected == "auto" else expected
    assert modes(report) == {"bn1": expected, "bn2": expected, "bn3": "left"}
    assert "add" in report["bn3"].reason
    for training in (True, False):
        result = fastvit.verify(model.train(training), images())
        assert result, result


@pytest.mark.parametrize("training", [True, False])
def test_models_in_float32_and_under_no_grad(training):
    model = spread(Plain()).train(training)
    x = images()
    with torch.no_grad():
        want = copy.deepcopy(model)(x)
        fastvit.convert(model)
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.eval()(x), fastvit.revert(copy.deepcopy(model))(x), rtol=1e-4, atol=1e-5
        )


def test_keeps_everything_but_the_classes():
    model = Plain()
    model.bn1.weight.requires_grad_(False)
    model.bn2.eval()
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flags = {name: module.training for name, module in model.named_modules()}
    modules, types = list(model.modules()), [type(module) for module in model.modules()]
    attributes = [dict(module.__dict__) for module in modules]
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastvit.convert(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(tensors) and all(after[name] is tensors[name] for name in after)
    assert list(model.state_dict()) == keys and list(model.modules()) == modules
    assert flags == {name: module.training for name, module in model.named_modules()}
    for module, kind in zip(modules, types, strict=True):
        assert isinstance(module, kind)
    assert isinstance(model.bn1, fastvit.BatchNormAct) and model.bn1.activation == "gelu"
    model(images()).sum().backward()
    optimizer.step()
    assert calls == [1] and model.bn1.weight.grad is None and model.bn1.bias.grad is not None
    assert fastvit.revert(model) is model
    assert [type(module) for module in model.modules()] == types
    assert [set(module.__dict__) for module in modules] == [set(before) for before in attributes]


def test_weights_move_both_ways():
    original, converted = spread(Plain()), Plain()
    fastvit.convert(converted)
    converted.load_state_dict(original.state_dict())
    x = images()
    torch.testing.assert_close(converted.eval()(x), original.eval()(x), rtol=1e-4, atol=1e-5)
    original.load_state_dict(converted.state_dict())


def test_converting_again_replaces_the_conversion():
    model = Plain(nn.LeakyReLU)
    fastvit.convert(model, "recompute")
    _, report = fastvit.convert(model)
    assert report["bn1"].mode == "inplace" and model.bn1.memory == "inplace"
    fastvit.revert(model)
    assert not any(isinstance(module, adopted.Adopted) for module in model.modules())


# --- in place: every case in which overwriting x would be wrong, and nothing would say so


class InPlaceCase(nn.Module):
    """conv -> bn -> leaky_relu -> conv, with room for someone else who reads x."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act, self.out = conv(), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), conv()

    def forward(self, x):
        return self.out(self.act(self.bn(self.conv(x))))


class Residual(InPlaceCase):
    def forward(self, x):
        x = self.conv(x)
        return self.out(self.act(self.bn(x))) + x


class Sibling(InPlaceCase):
    def forward(self, x):
        x = self.conv(x)
        y = self.act(self.bn(x))
        return self.out(y) * torch.tanh(x)


class ViewReadLater(InPlaceCase):
    def forward(self, x):
        x = self.conv(x)
        pooled = x.flatten(2)
        return self.out(self.act(self.bn(x))) + pooled.mean(2)[..., None, None]


class CallersInput(InPlaceCase):
    def forward(self, x):
        return self.out(self.act(self.bn(x)))


class CallersView(InPlaceCase):
    def forward(self, x):
        return self.out(self.act(self.bn(x[:, :, :, :])))


class Returned(InPlaceCase):
    def forward(self, x):
        x = self.conv(x)
        return self.out(self.act(self.bn(x))), x


class KeptByItself(InPlaceCase):
    """sigmoid saves its result, which is x."""

    def forward(self, x):
        return self.out(self.act(self.bn(torch.sigmoid(self.conv(x)))))


class OverwrittenOutput(InPlaceCase):
    def forward(self, x):
        y = self.act(self.bn(self.conv(x)))
        y += 1
        return self.out(y)


class OnlyInEvaluation(InPlaceCase):
    """Training proves nothing about evaluation."""

    def forward(self, x):
        x = self.conv(x)
        y = self.out(self.act(self.bn(x)))
        return y if self.training else y + x


SILENT = [Residual, Sibling, ViewReadLater, CallersInput, CallersView, Returned]
LOUD = [KeptByItself, OverwrittenOutput]


def test_in_place_where_it_is_proven():
    model = spread(InPlaceCase())
    _, report = fastvit.convert(model, example_inputs=images())
    assert modes(report) == {"bn": "inplace"}
    result = fastvit.verify(model, images())
    assert result, result


@pytest.mark.parametrize("case", [*SILENT, *LOUD, OnlyInEvaluation])
def test_not_in_place_where_somebody_else_reads(case):
    model = spread(case())
    _, report = fastvit.convert(copy.deepcopy(model))
    assert modes(report) == {"bn": "recompute"} and "not in place: " in report["bn"].reason
    for training in (True, False):
        result = fastvit.verify(model.train(training), images())
        assert result, result
    _, report = fastvit.convert(model, "inplace")
    assert modes(report) == {"bn": "left"} and not isinstance(model.bn, fastvit.BatchNormAct)


@pytest.mark.parametrize("case", [*SILENT, *LOUD])
def test_what_the_proof_is_there_for(case, monkeypatch):
    """The same models in place: silently wrong, or an error; so the proof decides something."""
    model = spread(case())
    monkeypatch.setattr(prove, "against_overwriting", lambda *_: None)
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn": "inplace"}
    if case in LOUD:
        with pytest.raises(RuntimeError, match="inplace operation"):
            fastvit.verify(model, images())
        return
    assert not fastvit.verify(model, images())


def test_under_no_grad_the_callers_tensor_is_left_alone(monkeypatch):
    x = images()
    before = x.clone()
    model = CallersInput()
    fastvit.convert(model)
    with torch.no_grad():
        model(x)
    assert torch.equal(x, before)
    monkeypatch.setattr(prove, "against_overwriting", lambda *_: None)
    fastvit.convert(model)
    with torch.no_grad():
        model(x)
    assert not torch.equal(x, before)


@pytest.mark.parametrize("module", ["conv", "bn"])
def test_a_hook_that_keeps_x(module):
    kept = []

    def hook(_, inputs, output):
        kept.append(output if module == "conv" else inputs[0])

    model = InPlaceCase()
    getattr(model, module).register_forward_hook(hook)
    _, report = fastvit.convert(copy.deepcopy(model))
    assert report["bn"].mode != "inplace" and "hook" in report["bn"].reason
    # one that comes after the conversion
    later, x = InPlaceCase(), images()
    _, report = fastvit.convert(later)
    assert report["bn"].mode == "inplace"
    handle = getattr(later, module).register_forward_hook(hook)
    later(x)
    assert torch.equal(kept[-1], later.conv(x))
    handle.remove()


def test_a_hook_on_a_container_sees_what_it_saw():
    model = nn.Sequential(nn.Sequential(conv(), nn.BatchNorm2d(8)), nn.GELU(), conv())
    fastvit.convert(model)
    assert model[0][1].activation == "gelu"
    seen = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output))
    x = images()
    model(x)
    want = fastvit.revert(copy.deepcopy(model))[0](x)
    torch.testing.assert_close(seen[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:BatchNormAct.8.. .bias.:UserWarning")
@pytest.mark.parametrize("weight,bias", [(0.0, 0.5), (1e-12, 1.0)])
def test_not_in_place_with_a_vanishing_weight(weight, bias):
    model = InPlaceCase()
    with torch.no_grad():
        model.bn.weight[2] = weight
        model.bn.bias[2] = bias
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn": "recompute"} and "|weight| is as small as" in report["bn"].reason
    result = fastvit.verify(model, images())
    assert result, result
    model.bn.memory = "inplace"  # what the proof is there for: xhat cannot be recovered from y = bias
    result = fastvit.verify(model, images())
    assert not result and "bn.weight" in str(result) and "output 0" not in str(result)


def test_not_in_place_with_a_bias_too_large_for_the_dtype():
    """Which may be autocast's, whatever the weights are."""
    model = InPlaceCase()
    with torch.no_grad():
        model.bn.weight.fill_(0.05)
        model.bn.bias.fill_(2.0)
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn": "recompute"} and "torch.bfloat16" in report["bn"].reason
    _, report = fastvit.convert(model.double())
    assert modes(report) == {"bn": "inplace"}


# --- what is found


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
    """LeViT's way: (N, L, C) flattened for the layer and viewed as it was before the activation."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Hardswish()

    def forward(self, x):
        x = self.linear(x)
        x = self.bn(x.flatten(0, 1)).reshape_as(x)
        return self.linear(self.act(x))


class Transposed(Tokens):
    """A reshape that copies: the activation sees another tensor than the layer made."""

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
    """Untraceable, and reads the layer's output from between: nothing but running tells."""

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
    """A subclass that changes nothing about the forward."""


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

    assert "OwnForward has a forward of its own" in reason("own forward")
    assert "Tanh" in reason("other activation")
    assert "InPlaceABN already" in reason("fused already")
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
    """By name, so a module of theirs need not be installed."""

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


def test_what_is_refused():
    with pytest.raises(ValueError, match="memory is 'half'; one of auto, recompute, inplace, keep expected"):
        fastvit.convert(Plain(), "half")
    with pytest.raises(ValueError, match="GraphModule"):
        fastvit.convert(torch.fx.symbolic_trace(Plain()))


# --- a converted model in its life


def trained(model, x):
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.fixture
def pair():
    """A model in float64 and its converted copy."""
    model = spread(Plain()).double()
    converted, _ = fastvit.convert(copy.deepcopy(model))
    return model, converted


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy of a pickle": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how, pair):
    model, converted = pair
    copied = COPIES[how](converted)
    x = images().double()
    assert isinstance(copied.bn1, fastvit.BatchNormAct) and isinstance(copied, Plain)
    assert live_outputs(copied, x) == live_outputs(converted, x)
    assert_same(trained(copied, x), trained(model, x))
    assert type(fastvit.revert(copied)) is Plain and isinstance(converted.bn1, fastvit.BatchNormAct)


def live_outputs(model, x):
    """How many bytes the tensors hold that a forward leaves for backward, each storage once."""
    storages, seen = {}, set()
    out = model(x)
    functions = [out.grad_fn]
    while functions:
        function = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for name in dir(function):
            if name.startswith("_raw_saved_"):
                saved = getattr(function, name)
                # what a hook has packed is read without asking for it to be rebuilt
                for one in saved if isinstance(saved, (tuple, list)) else [saved]:
                    value = one.data if hasattr(one, "data") else one
                    tensor = getattr(value, "tensor", value)
                    if isinstance(tensor, torch.Tensor):
                        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        functions += [after for after, _ in function.next_functions]
    return sum(storages.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.tail = Plain(), Plain(nn.LeakyReLU)

        def forward(self, x):
            return self.tail(checkpoint(self.body, x, use_reentrant=reentrant))

    model = spread(Checkpointed()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert len(report.converted) == 4
    x = images().double().requires_grad_()
    assert_same(trained(converted, x), trained(model, x))


def test_an_exception_closes_the_scope(pair):
    _, converted = pair
    with pytest.raises(RuntimeError):
        converted(torch.randn(2, 5, 6, 6).double())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert converted.bn1(images().double()).grad_fn is not None


def test_outside_the_traced_forward_a_layer_is_what_it_was(pair):
    model, converted = pair
    x = images().double()
    assert torch.equal(converted.bn1(x), model.bn1(x))
    assert torch.equal(converted.act1(x), model.act1(x))


class Optional(Plain):
    """Returns what lies between on demand: the trace is of a call that does not ask for it."""

    def forward(self, x, between=False):
        z = self.bn1(self.conv1(x))
        y = self.head(self.act1(z))
        return (y, z) if between else y


@pytest.mark.parametrize("call", [lambda m, x: m(x, True), lambda m, x: m(x, between=True)])
def test_a_call_with_other_arguments_is_not_the_one_that_was_traced(call):
    model = spread(Optional()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert report["bn1"].mode == "recompute"
    x = images().double()
    for want, got in zip(call(model, x), call(converted, x), strict=True):
        assert torch.equal(want, got)
    torch.testing.assert_close(converted(x, False), model(x))


def test_modules_that_were_replaced_after_the_conversion(pair):
    model, converted = pair
    x = images().double()
    for changed in (model, converted):
        changed.act1 = nn.Tanh()
    assert_same(trained(converted, x), trained(model, x))


def test_a_global_hook_sees_what_it_saw(pair):
    model, converted = pair
    x, seen = images().double(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, _, out: seen.append(out.detach()))
    try:
        model(x)
        converted(x)
    finally:
        handle.remove()
    for want, got in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unusual_models():
    block = [conv(), nn.BatchNorm2d(8), nn.SiLU(), conv()]
    weighed = nn.utils.parametrizations.weight_norm(conv())
    models = {
        "script inside": nn.Sequential(torch.jit.script(nn.Sequential(*copy.deepcopy(block))), *block),
        "graph module inside": nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(*copy.deepcopy(block)))),
        "parametrised": nn.Sequential(weighed, *copy.deepcopy(block[1:])),
        "data parallel": nn.DataParallel(nn.Sequential(*copy.deepcopy(block))),
    }
    x = images()
    for name, model in models.items():
        want = copy.deepcopy(spread(model))(x)
        _, report = fastvit.convert(model)
        assert report.converted, name
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    part = models["script inside"][1:3]  # a slice is made by the class of the whole
    torch.testing.assert_close(part(x), part[1](part[0](x)))


def test_a_converted_model_inside_another():
    model = spread(nn.Sequential(Plain(), nn.BatchNorm2d(8), nn.GELU(), Plain())).double()
    x = images().double()
    want = trained(copy.deepcopy(model), x)
    fastvit.convert(model[0])
    assert_same(trained(model, x), want)
    fastvit.convert(model)
    assert_same(trained(model, x), want)


def test_autocast():
    model = spread(Plain())
    converted, _ = fastvit.convert(copy.deepcopy(model))
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(x), converted(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    got.float().sum().backward()


def test_compiled_as_plain_ops(pair):
    model, converted = pair
    x = images().double()
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    assert_same(trained(torch.compile(converted, backend=backend, fullgraph=True), x), trained(model, x))
    assert len(graphs) == 1 and not any("fastvit" in target for target in graphs[0])


class Broken(Plain):
    def forward(self, x):
        z = self.bn1(self.conv1(x))
        torch._dynamo.graph_break()
        return self.act1(z)


def test_compiled_in_pieces():
    model = spread(Broken()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert report["bn1"].mode == "recompute"
    x = images().double()
    want = model(x)
    torch.testing.assert_close(torch.compile(converted, backend="eager")(x), want)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["act1", "bn1"])
def test_a_part_compiled_by_itself(name, pair):
    model, converted = pair
    x = images().double()
    getattr(converted, name).compile(backend="eager")
    torch.testing.assert_close(converted(x), model(x))


def test_export_of_the_evaluated_model_is_plain(pair):
    model, converted = pair
    x = images().double()
    program = torch.export.export(converted.eval(), (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("fastvit" in target for target in targets)
    assert any("batch_norm" in target for target in targets)
    torch.testing.assert_close(program.module()(x), model.eval()(x))
    traced = torch.jit.trace(converted, x)
    torch.testing.assert_close(traced(x), model(x))


def _train_ddp(rank, world):
    torch.manual_seed(0)
    model = spread(Plain()).double()
    x = torch.randn(2 * world, 8, 6, 6, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    fastvit.convert(model)
    assert_same(trained(nn.parallel.DistributedDataParallel(model), x), trained(plain, x))


def test_distributed_data_parallel(ranks):
    ranks.run(2, _train_ddp)


def test_the_report_prints_as_a_table():
    _, report = fastvit.convert(Plain(), example_inputs=images())
    text = str(report)
    assert text.splitlines()[0].split() == ["layer", "was", "activation", "memory", "saves", "why"]
    assert "its output goes to act1 alone" in text and "1 left, 2 recompute" in text
    # gelu keeps its input and the convolution after it the output
    assert report["bn1"].saved_bytes == 2 * images().nbytes and report["bn3"].saved_bytes == 0
    assert report["bn1"].kept_bytes == images().nbytes  # its input
    assert report.saved_bytes == 4 * images().nbytes
    assert fastvit.convert(Plain())[1].saved_bytes is None
    with pytest.raises(KeyError):
        report["bn4"]


def test_verify_tells_a_wrong_gradient():
    model = spread(Plain())
    fastvit.convert(model)
    assert fastvit.verify(model, images())
    model.bn1.activation = "silu"
    result = fastvit.verify(model, images())
    assert not result and "output 0" in str(result) and "gradient of conv1.weight" in result.differences


def test_verify_knows_what_is_zero_but_for_roundings():
    """A running mean, and a convolution's bias: normalisation takes both away."""
    biased = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(
        nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.GELU(), biased
    )
    result = fastvit.verify(nn.Sequential(model, nn.BatchNorm2d(8), nn.ReLU()), images())
    assert result, result


def test_verify_converts_a_copy(pair):
    model = pair[0].float()
    before = [p.clone() for p in model.parameters()]
    result = fastvit.verify(model, {"x": images()})
    assert result and "gradient of input 0" in result.differences
    assert type(model) is Plain and all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
