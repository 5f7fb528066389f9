"""Converted models in other tools: synchronised BatchNorm, quantisation, amp, jit."""

import copy

import pytest
import torch
from convert_models import Plain, assert_same, conv, images, modes, spread, trained
from torch import nn

import fastvit
from fastvit.compat import inplace_abn
from fastvit.compat.apex import amp

X = images().double()


def mixed():
    """Layers of all modes: in place, recompute, with a residual, left."""
    parts = [conv(), nn.BatchNorm2d(8), nn.SiLU(), conv(), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), conv()]
    return spread(nn.Sequential(*parts, nn.BatchNorm2d(8))).double()


def test_synchronised_by_torch_after_the_conversion():
    """torch's converter replaces the converted layers."""
    model = mixed()
    other, _ = fastvit.convert(copy.deepcopy(model))
    other = nn.SyncBatchNorm.convert_sync_batchnorm(other)
    assert [type(other[i]) for i in (1, 4, 7)] == [nn.SyncBatchNorm] * 3
    with pytest.warns(
        UserWarning, match="a child of the model has been replaced since.*convert the model again"
    ):
        got = trained(other, X)
    assert_same(got, trained(model, X))
    _, report = fastvit.convert(other)
    assert modes(report) == {"1": "recompute", "4": "inplace", "7": "left"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantisation_is_told_to_revert_first():
    quantization = pytest.importorskip("torch.ao.quantization")

    def prepared(model):
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model)

    model = mixed().float()
    other, _ = fastvit.convert(copy.deepcopy(model))
    with pytest.raises(
        RuntimeError, match=r"qconfig was set on a converted Sequential.*fastvit.revert\(model\)"
    ):
        prepared(other)
    with pytest.raises(RuntimeError, match="qconfig was set on a converted BatchNorm2d"):
        quantization.propagate_qconfig_(other[1], {"": quantization.default_qconfig})
    with pytest.raises(AssertionError, match="BatchNorm2d.<converted, until fastvit.revert>"):
        quantization.fuse_modules_qat(other, [["0", "1"]])
    want, got = prepared(model), prepared(fastvit.revert(other))
    assert [name for name, _ in got.named_modules()] == [name for name, _ in want.named_modules()]
    x = X.float()
    torch.testing.assert_close(got(x), want(x), rtol=0, atol=0)
    _, report = fastvit.convert(got)
    assert not report.converted
    torch.testing.assert_close(got(x), want(x), rtol=0, atol=0)


@pytest.mark.parametrize("amp_first", [False, True])
def test_amp_and_the_conversion_are_undone_in_any_order(amp_first):
    model = Plain()
    original = copy.deepcopy(model)
    fastvit.convert(model, example_inputs=images())
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(images()).dtype == torch.float32 and isinstance(model, Plain)
    undo = [lambda: amp.initialize(model, enabled=False), lambda: fastvit.revert(model)]
    for step in undo if amp_first else reversed(undo):
        step()
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any("adopt" in name for m in model.modules() for name in vars(m))


def test_a_layer_that_is_the_whole_model_is_traced_as_the_original():
    layer = inplace_abn.ABN(8, activation="relu")
    plain = copy.deepcopy(layer)
    _, report = fastvit.convert(layer, "recompute", images())
    assert report[""].mode == "recompute"
    x = images()
    torch.testing.assert_close(torch.jit.trace(layer.eval(), x)(x), plain.eval()(x))
