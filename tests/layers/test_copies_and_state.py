"""Copies, pickles, state dicts and representations of layers, their buffers, and other projects' tools."""

import copy
import io
import pickle

import pytest
import torch
from packages import import_or_skip
from torch import nn

import fastvit
from fastvit import BatchNormAct, BatchNormActSync, InPlaceABN, InPlaceABNSync, SyncBatchNorm, functional
from fastvit.compat import inplace_abn
from layers.pairs import each_layer


@each_layer
def test_copied_pickled_and_saved_layers_give_the_same_output(layer_class):
    layer = layer_class(5)
    layer(torch.randn(4, 5, 3))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded, x = torch.load(file, weights_only=False), torch.randn(4, 5, 3)
    expected = layer.eval()(x.clone())
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded.eval()):
        assert repr(copied) == repr(layer) and torch.equal(copied(x.clone()), expected)
        assert copied.state_dict()._metadata[""]["version"] == 2
        assert copied.layer_id != layer.layer_id or layer.layer_id == 0  # 0 if no ranks compare it
    doubled = {name: value * 2 for name, value in layer.state_dict().items() if value.is_floating_point()}
    y = torch.func.functional_call(layer, doubled, (x.clone(),))
    layer.load_state_dict({**layer.state_dict(), **doubled})
    assert torch.equal(y, layer(x.clone()))


@each_layer
def test_state_dicts_move_to_torchs_batch_norm_and_back(layer_class):
    torch_layer, layer = nn.BatchNorm2d(6), layer_class(6)
    nn.init.normal_(torch_layer.weight)
    torch_layer(torch.randn(3, 6, 2, 2))
    layer.load_state_dict(torch_layer.state_dict())
    assert list(layer.state_dict()) == list(torch_layer.state_dict())
    layer(torch.randn(3, 6, 2, 2))
    torch_layer.load_state_dict(layer.state_dict())
    assert torch.equal(torch_layer.running_var, layer.running_var) and torch_layer.num_batches_tracked == 2
    version_1 = {k: v for k, v in torch_layer.state_dict().items() if k != "num_batches_tracked"}
    layer.load_state_dict(version_1)


@each_layer
def test_running_statistics_have_a_new_version_after_training_and_none_after_evaluation(layer_class, device):
    for training in (True, False):
        layer = layer_class(5).to(device).train(training)
        versions = [buffer._version for buffer in layer.buffers()]
        layer(torch.randn(4, 5, 3, device=device))
        writes = [b._version - version for b, version in zip(layer.buffers(), versions, strict=True)]
        assert writes == [training] * 3


def test_a_representation_has_the_options_of_the_layer():
    in_place = {"activation": "elu", "activation_param": 0.5, "memory": "inplace"}
    batch_norm = "3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True"
    for layer, options in [
        (InPlaceABN(3), ", activation=leaky_relu[0.01]"),
        (
            InPlaceABNSync(3, activation="identity", channel_last=True),
            ", activation=identity, channel_last=True",
        ),
        (inplace_abn.InPlaceABN(3), ", activation=leaky_relu[0.01], abs_weight=True"),
        (inplace_abn.InPlaceABNSync(3, activation_param=0), ", activation=leaky_relu[0], abs_weight=True"),
        (SyncBatchNorm(3), ""),
        (SyncBatchNorm(3, channel_last=True, fuse_relu=True), ", channel_last=True, fuse_relu=True"),
        (BatchNormAct(3, activation="hardswish", memory="keep"), ", activation=hardswish, memory=keep"),
        (BatchNormActSync(3, **in_place), ", activation=elu[0.5], memory=inplace"),
    ]:
        assert repr(layer) == f"{type(layer).__name__}({batch_norm}{options})"


def test_a_parametrized_weight_and_an_unregistered_buffer_are_used():
    layer, x = SyncBatchNorm(3), torch.randn(4, 3)
    weight, mean = layer.weight.detach().clone(), torch.ones(3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    del layer.running_mean
    layer.running_mean = mean
    expected = functional.sync_batch_norm(x, nn.functional.softplus(weight), layer.bias, None, None)
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(mean, 0.9 + 0.1 * x.mean(0))


@pytest.mark.parametrize("name", ["InPlaceABN", "BatchNormAct", "fuse"])
def test_update_bn_finds_the_layers_and_updates_them(name):
    def make_model(layer):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.LeakyReLU())

    torch_model, batches = make_model(nn.BatchNorm2d(4)), torch.randn(3, 5, 3, 6, 6)
    if name == "fuse":
        model = fastvit.fuse(make_model(nn.BatchNorm2d(4)))
    else:
        model = make_model(getattr(fastvit, name)(4, activation="leaky_relu"))[:2]
    assert isinstance(model[1], nn.modules.batchnorm._BatchNorm)
    for each in (torch_model, model):
        torch.optim.swa_utils.update_bn(batches, each)
    assert model[1].num_batches_tracked == 3 and model[1].momentum == 0.1
    torch.testing.assert_close(model[1].state_dict(), torch_model[1].state_dict())


@pytest.mark.parametrize("package", ["torch", pytest.param("timm", marks=pytest.mark.packages("timm"))])
def test_converters_of_other_packages_drop_no_option(package):
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if package == "timm":
        convert = import_or_skip("timm.layers").convert_sync_batchnorm
    fused = fastvit.fuse(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    abs_weight = InPlaceABNSync(3, activation="identity", abs_weight=True)
    for layer, lost_option in [
        (InPlaceABN(3), "activation='leaky_relu' of InPlaceABN"),
        (abs_weight, "abs_weight=True of InPlaceABNSync"),
        (BatchNormAct(3, activation="silu"), "activation='silu' of BatchNormAct"),
        (SyncBatchNorm(3, channel_last=True), "channel_last=True of SyncBatchNorm"),
        (SyncBatchNorm(3, fuse_relu=True), "fuse_relu=True of SyncBatchNorm"),
        (fused, "activation='relu' of BatchNormAct"),
    ]:
        message = f"torch's SyncBatchNorm lacks {lost_option}; call fastvit.convert_syncbn"
        with pytest.raises(TypeError, match=message):
            convert(nn.Sequential(nn.Linear(3, 3), layer))
    for layer in (InPlaceABN(3, activation="identity"), fastvit.fuse(nn.BatchNorm1d(3)), SyncBatchNorm(3)):
        assert type(convert(nn.Sequential(nn.Linear(3, 3), layer))[1]) is nn.SyncBatchNorm
    assert list(InPlaceABN(3).children()) == []
