"""fastvit.convert on published models. Needs `pip install '.[models]'`; skipped without."""

import copy
import gc
import io
import warnings

import pytest
import torch
from convert_models import spread
from packages import package
from timm_families import FAMILIES
from torch import nn

import fastvit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def timm_model(name, **options):
    timm = package("timm")
    torch.manual_seed(0)
    return spread(timm.create_model(name, **options)).train()


# name: input size, and how many layers are rebuilt, in place and left
NAMED = {
    "levit_256": (224, 23, 1, 40),
    "mobilevit_s": (64, 25, 2, 5),
    "efficientformer_l1": (224, 16, 14, 3),
    "efficientvit_b1": (64, 13, 2, 20),
    "resnet50": (64, 41, 0, 12),
    "tresnet_m": (64, 7, 43, 10),
}


@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    size, *expected = NAMED[name]
    model, x = timm_model(name), torch.randn(2, 3, size, size)
    keys = list(model.state_dict())
    _, report = fastvit.convert(model, example_inputs=x)
    modes = [layer.mode for layer in report]
    assert [modes.count(mode) for mode in ("recompute", "inplace", "left")] == expected, str(report)
    assert report.saved_bytes > 0 and not report.untraced and list(model.state_dict()) == keys
    result = fastvit.verify(model, x)
    assert result, result


def test_recomputing_is_bitwise_keeping():
    x = torch.randn(2, 3, 64, 64)
    steps = []
    for memory in ("keep", "recompute"):
        model = timm_model("mobilevit_s")
        fastvit.convert(model, memory)
        torch.manual_seed(1)
        out = model(x)
        out.square().mean().backward()
        steps.append([out, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *steps))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(600)
def test_every_family_with_batch_norm(family, record_property):
    name, size = FAMILIES[family]
    model, x = timm_model(name), torch.randn(2, 3, size, size)
    _, report = fastvit.convert(model, example_inputs=x)
    record_property("report", f"{name}: {report.summary()}")
    assert len(report) and all(layer.reason for layer in report)
    result = fastvit.verify(model, x)
    assert result, result
    gc.collect()


@pytest.mark.slow
def test_the_table_names_every_family():
    timm = package("timm")
    for module in timm.list_modules():
        if module in FAMILIES:
            continue
        for name in timm.list_models(module=module)[:3]:
            try:
                with torch.device("meta"):
                    model = timm.create_model(name)
            except Exception:  # some cannot be made without memory behind them
                continue
            layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            assert not layers, f"{module} ({name}) has BatchNorm and no row in timm_families.py"


def test_evaluated_model_to_onnx_is_plain():
    package("onnxscript")
    onnxruntime = package("onnxruntime")
    model, x = timm_model("test_resnet").eval(), torch.randn(2, 3, 64, 64)
    fastvit.convert(model)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    program.save(file)
    assert "fastvit" not in {node.domain for node in program.model.graph}
    session = onnxruntime.InferenceSession(file.getvalue())
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=1e-3, atol=1e-4)


class _PlainReference(nn.Module):
    """The reference for slope 0: mapillary's effective weight, torch's BatchNorm and relu."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x):
        weight = self.weight.abs() + self.eps
        return nn.functional.batch_norm(x, None, None, weight, self.bias, True, 0.1, self.eps).relu()


def test_segmentation_models_with_inplace_decoder(monkeypatch):
    """`decoder_use_norm="inplace"` asks for a slope of 0, where mapillary's gradients are wrong by 15x."""
    smp = package("segmentation_models_pytorch")
    layers = package("fastvit.compat.inplace_abn")
    monkeypatch.setattr(smp.base.modules, "InPlaceABN", layers.InPlaceABN)
    torch.manual_seed(0)
    model = smp.Unet("resnet18", encoder_weights=None, decoder_use_norm="inplace").double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def gradients(net):
        net(x).square().mean().backward()
        return {name: p.grad for name, p in net.named_parameters()}

    plain = copy.deepcopy(model)
    replaced = 0
    for parent in list(plain.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, layers.InPlaceABN):
                setattr(parent, name, _PlainReference(layer))
                replaced += 1
    assert replaced == 10
    want, got = gradients(plain), gradients(model)
    largest = max(g.abs().max() for g in want.values())
    for name in want:
        scale = max(want[name].abs().max(), 1e-4 * largest)
        assert (got[name] - want[name]).abs().max() / scale < 1e-9, name
    result = fastvit.verify(model, x)
    assert result, result
