"""convert_syncbn_model and revert_syncbn_model change classes only."""

import copy
import warnings

import pytest
import torch
from ops.inputs import TimmBatchNorm, describe_model
from packages import import_or_skip
from torch import nn

import fastvit
from fastvit import SyncBatchNorm, convert_syncbn_model, revert_syncbn_model
from fastvit.compat import inplace_abn
from fastvit.convert_syncbn import SyncBatchNormAct


class OwnForward(nn.BatchNorm2d):
    """Like FrozenBatchNorm and NaiveSyncBatchNorm of many projects: nothing says what the forward does."""

    def forward(self, x):
        return super().forward(x).relu()


class OwnName(nn.BatchNorm2d):
    """A subclass with an unchanged forward."""


class Net(nn.Module):
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
def net():
    net = Net()
    net(torch.randn(2, 3, 6, 6))
    return net


def convert(net, **options):
    with pytest.warns(UserWarning, match=r"not synchronised: OwnForward \(1\), which overrides forward$"):
        return convert_syncbn_model(net, **options)


def test_keeps_everything_but_the_class_which_revert_gives_back(net):
    net.first.weight.requires_grad_(False)
    net.head[2].eval()
    net.rest["bn"].momentum = None
    calls = []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    before, eager = describe_model(net), copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert convert(net) is net and describe_model(net)[1:4] == before[1:4]
    changed = {name for name, module in net.named_modules() if type(module) is SyncBatchNorm}
    assert changed == {"first", "rest.bn", "head.2"} and not net.head[2].training
    copied, x = copy.deepcopy(net), torch.randn(2, 3, 6, 6)
    y = net(x)
    assert len(calls) == 2
    torch.testing.assert_close(y, eager(x))
    y.sum().backward()
    optimizer.step()
    assert net.first.weight.grad is None and net.first.bias.grad is not None
    assert describe_model(revert_syncbn_model(net)) == before
    assert describe_model(revert_syncbn_model(copied))[0] == before[0]


def test_revert_of_layers_built_as_such():
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


def test_torch_sync_batch_norm_keeps_its_group():
    theirs = nn.SyncBatchNorm(3, process_group="its own")
    assert convert_syncbn_model(theirs) is theirs and type(theirs) is SyncBatchNorm
    assert theirs.process_group == "its own"
    assert type(revert_syncbn_model(theirs)) is nn.SyncBatchNorm and theirs.process_group == "its own"
    assert convert_syncbn_model(theirs, process_group="other").process_group == "other"


def test_converting_twice_and_a_single_layer():
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


@pytest.mark.parametrize(
    "layer,synchronised,attribute",
    [
        (fastvit.InPlaceABN(3, activation="elu", channel_last=True), fastvit.InPlaceABNSync, "process_group"),
        (fastvit.BatchNormAct(3, activation="gelu"), fastvit.BatchNormActSync, "process_group"),
    ],
)
def test_other_layers_become_synchronised_ones_and_back(layer, synchronised, attribute):
    model = nn.Sequential(layer, synchronised(3))
    before = describe_model(model)
    convert_syncbn_model(model, process_group="a group")
    assert [type(m) for m in model] == [synchronised] * 2 and describe_model(model)[1:4] == before[1:4]
    assert [getattr(m, attribute) for m in model] == ["a group", None]
    revert_syncbn_model(model)
    assert describe_model(model) == before


def test_layers_that_are_synchronised_already_keep_their_options():
    layer = SyncBatchNorm(3, channel_last=True, process_group="its own", fuse_relu=True)
    convert_syncbn_model(layer)
    assert layer.channel_last and layer.fuse_relu and layer.process_group == "its own"
    assert copy.copy(layer).process_group == "its own"


class TimmSyncBatchNorm(nn.SyncBatchNorm):
    """Stands for the class to which timm's own converter changes a BatchNormAct2d."""


TimmSyncBatchNorm.__module__, TimmSyncBatchNorm.__name__ = "timm.layers.norm_act", "SyncBatchNormAct"


class OfTimm(TimmBatchNorm):
    """A subclass that has a constructor alone."""

    def __init__(self, channels):
        super().__init__(channels, act=nn.Hardswish())


def timm_layers():
    """Layers with an activation of their own, and what each becomes."""
    theirs = TimmSyncBatchNorm(3)
    theirs.drop, theirs.act = nn.Identity(), nn.ReLU()
    watched = TimmBatchNorm(3)
    watched.act.register_forward_hook(lambda module, args, y: y + 1)
    return {
        "silu": (TimmBatchNorm(3), fastvit.BatchNormActSync),
        "identity": (TimmBatchNorm(3, act=nn.Identity()), fastvit.BatchNormActSync),
        "subclass": (OfTimm(3), fastvit.BatchNormActSync),
        "synchronised by timm": (theirs, fastvit.BatchNormActSync),
        "mapillary's ABN": (inplace_abn.ABN(3), fastvit.BatchNormActSync),
        "mish": (TimmBatchNorm(3, act=nn.Mish()), SyncBatchNormAct),
        "drop": (TimmBatchNorm(3, drop=nn.Dropout(0.5)), SyncBatchNormAct),
        "hook": (watched, SyncBatchNormAct),
    }


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", timm_layers())
def test_layers_with_an_activation_are_synchronised_with_it(name, channels_last):
    layer, kind = timm_layers()[name]
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    before, eager, x = describe_model(layer), copy.deepcopy(layer), torch.randn(4, 3, 5, 5)
    if type(layer) is TimmSyncBatchNorm:  # torch's refuses the CPU
        eager = TimmBatchNorm(3, act=nn.ReLU())
        eager.load_state_dict(layer.state_dict())
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    assert convert_syncbn_model(layer, strict=True) is layer and describe_model(layer)[1:4] == before[1:4]
    for model in (layer, copy.deepcopy(layer), convert_syncbn_model(layer)):
        assert type(model) is kind
    for mode in (True, False):
        layer.train(mode), eager.train(mode)
        for model in (layer, eager):
            torch.manual_seed(0)
            model.y = model(x)
            model.zero_grad()
            model.y.square().sum().backward()
        torch.testing.assert_close(layer.y, eager.y)
        torch.testing.assert_close(layer.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_var, eager.running_var)
    del layer.y
    assert describe_model(revert_syncbn_model(layer.train())) == before


def test_the_converter_of_torch_keeps_no_activation_from_being_lost():
    model = convert_syncbn_model(nn.Sequential(TimmBatchNorm(3, act=nn.Mish())))
    with pytest.raises(TypeError, match=r"lacks act=Mish\(\) of SyncBatchNormAct"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize("strict", [False, True])
def test_nothing_changes_where_it_is_an_error(net, strict):
    model = net if strict else nn.ModuleList([OwnForward(3), OwnForward(4), nn.Linear(3, 3)])
    before = describe_model(model)
    with pytest.raises(ValueError, match=r"cannot synchronise OwnForward \([12]\), which overrides forward"):
        convert_syncbn_model(model, strict=strict)
    assert describe_model(model) == before
    assert convert_syncbn_model(nn.Linear(3, 3), strict=True)  # no BatchNorm is nothing to refuse


def warned(rank, world):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3), OwnForward(3)))
    return len(said)


def test_one_rank_warns(ranks):
    assert ranks.run(2, warned) == [1, 0]


def test_models_of_timm():
    timm = import_or_skip("timm")
    for name in ("mobilevit_xxs", "tf_efficientnetv2_b0", "test_resnet"):
        model = timm.create_model(name)
        before = describe_model(model)
        convert_syncbn_model(model, strict=True)
        assert not any(type(m) is nn.BatchNorm2d or "BatchNormAct2d" in str(type(m)) for m in model.modules())
        assert (
            describe_model(model)[1:4] == before[1:4] and describe_model(revert_syncbn_model(model)) == before
        )
