"""convert_syncbn_model and revert_syncbn_model change classes only."""

import copy
import itertools
import warnings

import pytest
import torch
from on_ranks import on_ranks
from ops.inputs import OtherActivation, TimmBatchNorm, describe_model
from packages import import_or_skip
from torch import nn

import fastvit
from fastvit import SyncBatchNorm, convert_syncbn_model, revert_syncbn_model
from fastvit.compat import inplace_abn
from fastvit.convert_syncbn import SyncBatchNormAct


class OwnForward(nn.BatchNorm2d):
    """Has a forward of its own, as FrozenBatchNorm and NaiveSyncBatchNorm of many projects do."""

    def forward(self, x):
        return super().forward(x).relu()


class OwnName(nn.BatchNorm2d):
    """Has the forward of its base."""


class EveryNorm(nn.Module):
    """Has norms that are synchronised and norms that are not, one of them twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.first = nn.BatchNorm2d(4)
        self.again = self.first
        self.rest = nn.ModuleDict({"bn": OwnName(4), "instance": nn.InstanceNorm2d(4), "own": OwnForward(4)})
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.BatchNorm1d(5))

    def forward(self, x):
        x = self.again(self.first(self.conv(x)))
        return self.head(self.rest["own"](self.rest["instance"](self.rest["bn"](x))))


@pytest.fixture
def model():
    model = EveryNorm()
    model(torch.randn(2, 3, 6, 6))
    return model


def test_conversion_keeps_everything_but_the_class_which_revert_gives_back(model):
    model.first.weight.requires_grad_(False)
    model.head[2].eval()
    model.rest["bn"].momentum = None
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    before, eager = describe_model(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"not synchronised: OwnForward \(1\), which overrides forward$"):
        assert convert_syncbn_model(model) is model
    assert describe_model(model)[1:4] == before[1:4]
    changed = {name for name, module in model.named_modules() if type(module) is SyncBatchNorm}
    assert changed == {"first", "rest.bn", "head.2"} and not model.head[2].training
    copied, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
    y = model(x)
    assert len(calls) == 2
    torch.testing.assert_close(y, eager(x))
    y.sum().backward()
    optimizer.step()
    assert model.first.weight.grad is None and model.first.bias.grad is not None
    assert describe_model(revert_syncbn_model(model)) == before
    assert describe_model(revert_syncbn_model(copied))[0] == before[0]


def test_layers_built_as_synchronised_ones_are_reverted_if_torch_has_their_options():
    model = nn.Sequential(
        SyncBatchNorm(3), SyncBatchNorm(3, fuse_relu=True), SyncBatchNorm(3, channel_last=True)
    )
    with pytest.warns(
        UserWarning, match="because no BatchNorm of torch has their fuse_relu or channel_last: 1, 2"
    ):
        revert_syncbn_model(model)
    assert isinstance(model[0], nn.modules.batchnorm._BatchNorm) and not isinstance(model[0], SyncBatchNorm)
    for shape in ((4, 3), (4, 3, 2), (4, 3, 2, 2, 2)):
        assert model[0](torch.randn(shape)).shape == shape
    with pytest.raises(RuntimeError, match="should contain 5 elements not 3"):
        model[0](torch.randn(4, 5))


def test_torchs_sync_batch_norm_keeps_its_group():
    layer = nn.SyncBatchNorm(3, process_group="its own")
    assert convert_syncbn_model(layer) is layer and type(layer) is SyncBatchNorm
    assert layer.process_group == "its own"
    assert type(revert_syncbn_model(layer)) is nn.SyncBatchNorm and layer.process_group == "its own"
    assert convert_syncbn_model(layer, process_group="other").process_group == "other"


def test_a_layer_that_is_converted_twice_has_the_last_options():
    layer = nn.BatchNorm1d(3)
    layer(torch.randn(5, 3))
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    for channel_last in (False, True):
        assert convert_syncbn_model(layer, channel_last=channel_last) is layer
        assert layer.channel_last == channel_last
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert layer(torch.randn(5, 2, 3)).shape == (5, 2, 3)
    assert type(revert_syncbn_model(layer)) is nn.BatchNorm1d


def test_lazy_layers_are_left_until_they_are_real():
    lazy = nn.LazyBatchNorm2d()
    with pytest.raises(ValueError, match=r"LazyBatchNorm2d \(1\), which has no channels before a first"):
        convert_syncbn_model(lazy)
    lazy(torch.randn(2, 3, 4, 4))
    assert isinstance(convert_syncbn_model(lazy), fastvit.SyncBatchNorm)


@pytest.mark.parametrize("name", ["InPlaceABN", "BatchNormAct"])
def test_layers_of_fastvit_become_synchronised_ones_and_back(name):
    synchronised_class = getattr(fastvit, f"{name}Sync")
    layer = getattr(fastvit, name)(3, activation="elu", activation_param=1.0, channel_last=True)
    model = nn.Sequential(layer, synchronised_class(3))
    before = describe_model(model)
    convert_syncbn_model(model, process_group="a group")
    assert [type(m) for m in model] == [synchronised_class] * 2
    assert describe_model(model)[1:4] == before[1:4]
    assert [m.process_group for m in model] == ["a group", None]
    revert_syncbn_model(model)
    assert describe_model(model) == before


def test_layers_that_are_synchronised_already_keep_their_options():
    layer = SyncBatchNorm(3, channel_last=True, process_group="its own", fuse_relu=True)
    convert_syncbn_model(layer)
    assert layer.channel_last and layer.fuse_relu and layer.process_group == "its own"
    assert copy.copy(layer).process_group == "its own"


class TimmSyncBatchNorm(nn.SyncBatchNorm):
    """Has the name of the class to which timm's own converter changes a BatchNormAct2d."""


TimmSyncBatchNorm.__module__, TimmSyncBatchNorm.__name__ = "timm.layers.norm_act", "SyncBatchNormAct"


class OwnConstructor(TimmBatchNorm):
    """Differs from its base by the constructor alone."""

    def __init__(self, channels):
        super().__init__(channels, act=nn.Hardswish())


def make_layers_with_activations():
    """Returns layers with an activation of their own, and the classes that they become."""
    synchronised = TimmSyncBatchNorm(3)
    synchronised.drop, synchronised.act = nn.Identity(), nn.ReLU()
    hooked = TimmBatchNorm(3)
    hooked.act.register_forward_hook(lambda module, args, y: y + 1)
    return {
        "silu": (TimmBatchNorm(3), fastvit.BatchNormActSync),
        "identity": (TimmBatchNorm(3, act=nn.Identity()), fastvit.BatchNormActSync),
        "subclass": (OwnConstructor(3), fastvit.BatchNormActSync),
        "synchronised_by_timm": (synchronised, fastvit.BatchNormActSync),
        "mapillarys_abn": (inplace_abn.ABN(3), fastvit.BatchNormActSync),
        "other": (TimmBatchNorm(3, act=OtherActivation()), SyncBatchNormAct),
        "drop": (TimmBatchNorm(3, drop=nn.Dropout(0.5)), SyncBatchNormAct),
        "hook": (hooked, SyncBatchNormAct),
    }


@pytest.mark.parametrize("name", make_layers_with_activations())
def test_layers_with_an_activation_are_synchronised_with_it(name):
    layer, synchronised_class = make_layers_with_activations()[name]
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    before, eager = describe_model(layer), copy.deepcopy(layer)
    if type(layer) is TimmSyncBatchNorm:  # torch's refuses the CPU
        eager = TimmBatchNorm(3, act=nn.ReLU())
        eager.load_state_dict(layer.state_dict())
    assert convert_syncbn_model(layer, strict=True) is layer and describe_model(layer)[1:4] == before[1:4]
    for model in (layer, copy.deepcopy(layer), convert_syncbn_model(layer)):
        assert type(model) is synchronised_class
    for mode, memory_format in itertools.product(
        (True, False), (torch.contiguous_format, torch.channels_last)
    ):
        x, outputs = torch.randn(4, 3, 5, 5).to(memory_format=memory_format), []
        for model in (layer.train(mode), eager.train(mode)):
            torch.manual_seed(0)
            outputs.append(model(x))
            model.zero_grad()
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(layer.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_var, eager.running_var)
    assert describe_model(revert_syncbn_model(layer.train())) == before


def test_the_converter_of_torch_drops_no_activation_of_timm():
    model = convert_syncbn_model(nn.Sequential(TimmBatchNorm(3, act=OtherActivation())))
    with pytest.raises(TypeError, match=r"lacks act=OtherActivation\(\) of SyncBatchNormAct"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_a_refused_conversion_changes_nothing(model, strict):
    model = model if strict else nn.ModuleList([OwnForward(3), OwnForward(4), nn.Linear(3, 3)])
    before = describe_model(model)
    with pytest.raises(ValueError, match=r"cannot synchronise OwnForward \([12]\), which overrides forward"):
        convert_syncbn_model(model, strict=strict)
    assert describe_model(model) == before
    assert convert_syncbn_model(nn.Linear(3, 3), strict=True)  # a model without BatchNorm is not refused


@on_ranks(2)
def test_rank_0_alone_warns(rank, world):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3), OwnForward(3)))
    assert len(record) == (1 if rank == 0 else 0)


@pytest.mark.packages("timm")
@pytest.mark.parametrize("name", ["mobilevit_xxs", "tf_efficientnetv2_b0", "test_resnet"])
def test_models_of_timm_are_converted_and_reverted(name):
    model = import_or_skip("timm").create_model(name)
    before = describe_model(model)
    convert_syncbn_model(model, strict=True)
    assert not any(type(m) is nn.BatchNorm2d or "BatchNormAct2d" in str(type(m)) for m in model.modules())
    assert describe_model(model)[1:4] == before[1:4]
    assert describe_model(revert_syncbn_model(model)) == before
