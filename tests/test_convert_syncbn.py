"""convert_syncbn_model and revert_syncbn_model change classes only."""

import copy

import pytest
import torch
from torch import nn

import fastvit
from fastvit import SyncBatchNorm, convert_syncbn_model, revert_syncbn_model


class OwnForward(nn.BatchNorm2d):
    """Like timm's BatchNormAct2d: the activation is in the forward."""

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
    with pytest.warns(
        UserWarning, match=r"left as they are, because they override forward: OwnForward \(1\)"
    ):
        return convert_syncbn_model(net, **options)


def test_keeps_everything_but_the_class(net):
    net.first.weight.requires_grad_(False)
    net.head[2].eval()
    net.rest["bn"].momentum = None
    calls = []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    before = (
        dict(net.named_parameters()),
        dict(net.named_buffers()),
        {n: m.training for n, m in net.named_modules()},
    )
    keys, optimizer = list(net.state_dict()), torch.optim.SGD(net.parameters(), lr=0.1)
    eager = copy.deepcopy(net)
    assert convert(net) is net
    assert [type(m) for m in (net.first, net.rest["bn"], net.head[2])] == [SyncBatchNorm] * 3
    assert net.again is net.first and type(net.rest["own"]) is OwnForward
    assert type(net.rest["instance"]) is nn.InstanceNorm2d
    after = (
        dict(net.named_parameters()),
        dict(net.named_buffers()),
        {n: m.training for n, m in net.named_modules()},
    )
    for a, b in zip(before[:2], after[:2], strict=True):
        assert a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    assert before[2] == after[2] and list(net.state_dict()) == keys
    x = torch.randn(2, 3, 6, 6)
    y = net(x)
    assert len(calls) == 2
    torch.testing.assert_close(y, eager(x))
    y.sum().backward()
    optimizer.step()
    assert net.first.weight.grad is None and net.first.bias.grad is not None


def test_revert_gives_the_original_classes_back(net):
    types = [type(m) for m in net.modules()]
    attributes = [set(m.__dict__) for m in net.modules()]
    convert(net)
    copied = copy.deepcopy(net)
    for model in (net, copied):
        revert_syncbn_model(model)
        assert [type(m) for m in model.modules()] == types
        assert [set(m.__dict__) for m in model.modules()] == attributes


def test_revert_of_layers_built_as_such():
    model = nn.Sequential(
        SyncBatchNorm(3), SyncBatchNorm(3, fuse_relu=True), SyncBatchNorm(3, channel_last=True)
    )
    with pytest.warns(UserWarning, match="left as they are, for lack of a BatchNorm: 1, 2"):
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
    with pytest.warns(UserWarning, match="LazyBatchNorm2d"):
        convert_syncbn_model(lazy)
    lazy(torch.randn(2, 3, 4, 4))
    assert isinstance(convert_syncbn_model(lazy), fastvit.SyncBatchNorm)


def test_in_place_layers_become_synchronised_ones_and_back():
    model = nn.Sequential(
        fastvit.InPlaceABN(3, activation="elu", channel_last=True), fastvit.InPlaceABNSync(3)
    )
    weight = model[0].weight
    convert_syncbn_model(model)
    assert [type(m) for m in model] == [fastvit.InPlaceABNSync] * 2 and model[0].group is None
    assert model[0].weight is weight and model[0].activation == "elu" and model[0].channel_last
    revert_syncbn_model(model)
    assert [type(m) for m in model] == [fastvit.InPlaceABN, fastvit.InPlaceABNSync]
    assert "group" not in model[0].__dict__


def test_layers_that_are_synchronised_already_keep_their_options():
    layer = SyncBatchNorm(3, channel_last=True, process_group="its own", fuse_relu=True)
    convert_syncbn_model(layer)
    assert layer.channel_last and layer.fuse_relu and layer.process_group == "its own"
    assert copy.copy(layer).process_group == "its own"
