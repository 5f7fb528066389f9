"""fastvit.convert in place: the cases in which overwriting x would be wrong without an error."""

import copy

import pytest
import torch
from convert_models import conv, images, modes, spread
from torch import nn

import fastvit
from fastvit.conversion import prove


class InPlaceCase(nn.Module):
    """conv -> bn -> leaky_relu -> conv, with a place for another reader of x."""

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


class OverwrittenPart(InPlaceCase):
    def forward(self, x):
        y = self.act(self.bn(self.conv(x)))
        y[:, :2].mul_(2)
        return self.out(y)


class OnlyInEvaluation(InPlaceCase):
    """Training proves nothing about evaluation."""

    def forward(self, x):
        x = self.conv(x)
        y = self.out(self.act(self.bn(x)))
        return y if self.training else y + x


SILENT = [Residual, Sibling, ViewReadLater, CallersInput, CallersView, Returned]
LOUD = [KeptByItself, OverwrittenOutput, OverwrittenPart]


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
    """Without the proof the same models are wrong or raise, so the proof is needed."""
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


@pytest.mark.parametrize("module", ["conv", "bn"])
def test_what_a_hook_would_see_in_place(module, monkeypatch):
    """Without the check for hooks, the tensor that a hook holds is overwritten."""
    monkeypatch.setattr(prove, "hooked", lambda _: False)
    kept, model, x = [], InPlaceCase(), images()
    getattr(model, module).register_forward_hook(
        lambda _, inputs, output: kept.append(output if module == "conv" else inputs[0])
    )
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn": "inplace"}
    model(x).sum().backward()
    assert not torch.allclose(kept[0], nn.functional.conv2d(x, model.conv.weight, padding=1))


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
    model.bn.memory = "inplace"  # xhat cannot be recovered from y = bias
    result = fastvit.verify(model, images())
    assert not result and "bn.weight" in str(result) and "output 0" not in str(result)


def test_not_in_place_with_a_bias_too_large_for_the_dtype():
    """The dtype may be autocast's, also with float32 weights."""
    model = InPlaceCase()
    with torch.no_grad():
        model.bn.weight.fill_(0.05)
        model.bn.bias.fill_(2.0)
    _, report = fastvit.convert(model)
    assert modes(report) == {"bn": "recompute"} and "torch.bfloat16" in report["bn"].reason
    _, report = fastvit.convert(model.double())
    assert modes(report) == {"bn": "inplace"}
