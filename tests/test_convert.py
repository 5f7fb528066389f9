"""fastvit.convert: a converted model computes the same, and has a correct report; fastvit.verify."""

import copy

import pytest
import torch
from convert_models import Plain, images, modes, spread
from torch import nn

import fastvit
from fastvit.conversion import adopted

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
    # act1's output, bn3's residual, is rebuilt, so bn3's output is kept. With an activation that saves its
    # result no memory is freed then.
    keeps_its_result = act in ("relu", "relu_", "leaky_relu_0") or (act, expected) == (
        "leaky_relu_",
        "recompute",
    )
    adding = "keep" if memory == "keep" else "left" if keeps_its_result else "recompute"
    assert modes(report) == {"bn1": expected, "bn2": expected, "bn3": adding}
    assert "residual" in report["bn3"].reason
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
    assert not any(isinstance(module, adopted.Converted) for module in model.modules())


def test_what_is_refused():
    with pytest.raises(
        ValueError, match="memory is 'half'; one of auto, gemm, recompute, inplace, keep expected"
    ):
        fastvit.convert(Plain(), "half")
    with pytest.raises(ValueError, match="GraphModule"):
        fastvit.convert(torch.fx.symbolic_trace(Plain()))


# --- the report and verify


def test_the_report_prints_as_a_table():
    _, report = fastvit.convert(Plain(), example_inputs=images())
    text = str(report)
    assert text.startswith("a training forward keeps ")
    headers = [line.split() for line in text.splitlines() if line.endswith("  why")]
    assert headers[0] == ["saved", "by", "count", "rebuilt", "kept", "why"]
    assert headers[1] == ["layer", "was", "activation", "memory", "saves", "why"]
    assert "its output goes to act1 alone" in text and "3 recompute" in text
    # gelu saves its input, and the convolution after it the output
    assert report["bn1"].saved_bytes == 2 * images().nbytes
    assert report["bn1"].kept_bytes == images().nbytes  # its input
    # bn3's residual is rebuilt, so by the layer's row act2's output is kept
    assert (report["bn3"].saved_bytes, report["bn3"].kept_bytes) == (images().nbytes, 2 * images().nbytes)
    assert sum(layer.saved_bytes for layer in report) == 5 * images().nbytes
    # the scope rebuilds it nevertheless, through the rebuilt residual
    assert report.saved_bytes == pytest.approx(6 * images().nbytes, rel=0.02) and "measured" in text
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
    """A running mean and a convolution's bias, which are zero up to rounding after a normalisation."""
    biased = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(
        nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.GELU(), biased
    )
    result = fastvit.verify(nn.Sequential(model, nn.BatchNorm2d(8), nn.ReLU()), images())
    assert result, result


class SetsRequiresGrad(Plain):
    """As in transformers' feature extractors, for checkpointing."""

    def forward(self, x):
        x = x[:, :]
        if self.training:
            x.requires_grad = True
        return super().forward(x)


def test_verify_of_a_model_that_sets_requires_grad_on_its_input():
    model = spread(SetsRequiresGrad())
    result = fastvit.verify(model, images())
    assert result and "gradient of conv1.weight" in result.differences, result
    assert "gradient of input 0" not in result.differences
    fastvit.convert(model)
    model.bn1.activation = "silu"
    assert not fastvit.verify(model, images())


def test_verify_converts_a_copy():
    model = spread(Plain())
    before = [p.clone() for p in model.parameters()]
    result = fastvit.verify(model, {"x": images()})
    assert result and "gradient of input 0" in result.differences
    assert type(model) is Plain and all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
