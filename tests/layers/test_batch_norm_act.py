"""BatchNormAct: the activations' values and slopes, memory in place, what torch.compile traces."""

import pytest
import torch
from ops.inputs import ACTIVATION_PARAM, ACTIVATIONS, DTYPES, INVERTIBLE, LayerInputs, run_layer_step
from ops.tolerances import assert_close_enough
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import BatchNormAct, _checks, functional
from fastvit._formulas import apply_activation


@pytest.mark.parametrize("activation", INVERTIBLE)
def test_in_place_is_in_place_abn(activation, device):
    case = LayerInputs("nchw", torch.float32, device)
    options = {"activation": activation, "activation_param": ACTIVATION_PARAM, "device": device}
    one, other = BatchNormAct(5, **options, memory="inplace"), fastvit.InPlaceABN(5, **options)
    with torch.no_grad():
        one.weight.copy_(case.weight), one.bias.copy_(case.bias)
    other.load_state_dict(one.state_dict())
    assert all(map(torch.equal, run_layer_step(one, case.x, case.dy), run_layer_step(other, case.x, case.dy)))
    assert one(x := case.x.clone()) is x


KINKS = {"relu": [0.0], "relu6": [0.0, 6.0], "leaky_relu": [0.0], "elu": [0.0], "hardswish": [-3.0, 0.0, 3.0]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kinks_and_ends_of_the_range_like_torch(activation, dtype, device):
    """Values are exact where torch's are; the derivative at a kink is torch's; NaN stays NaN."""
    last = min(torch.finfo(dtype).max, 1e100)  # torch itself overflows in float64 past that
    points = [*KINKS.get(activation, []), 1e-6, -1e-6, 50.0, -50.0, last, float("nan")]
    v = torch.tensor([points], dtype=dtype, device=device).repeat(3, 1)
    c = v.shape[1]
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    zero, one = (torch.full((c,), k, dtype=parameters, device=device) for k in (0.0, 1.0))
    ours, theirs = v.clone().requires_grad_(), v.double().requires_grad_()
    y = functional.batch_norm_act(ours, None, None, zero, one, training=False, eps=0.0, activation=activation)
    want = apply_activation(theirs, activation, _checks.resolve_activation_param("act", activation, None))
    for got, expected in ((y, want), *zip(_slopes(y, ours), _slopes(want, theirs), strict=True)):
        got, expected = got.double(), expected.to(dtype).double()  # in fp16 the far ends overflow alike
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
        torch.testing.assert_close(got[:, :-1], expected[:, :-1], **tolerance)
    assert y[:, -1].isnan().all()


def _slopes(y, v):
    return torch.autograd.grad(y.nan_to_num(0.0).sum(), v)


@pytest.mark.parametrize("capability", ["float32", "float64"])
@pytest.mark.parametrize("activation", ["elu", "gelu", "gelu_tanh", "silu"])
def test_smooth_activations_to_a_few_units_in_the_last_place(activation, capability, device):
    """Against formulas without cancellation: the normal distribution by erfc, sigmoids from both sides."""
    dtype = getattr(torch, capability)
    v = torch.linspace(-5, 12, 1009, dtype=torch.float64).to(dtype)
    wide = v.double()
    gate = {
        "gelu": lambda: torch.special.erfc(-wide * 0.5**0.5) / 2,
        "gelu_tanh": lambda: torch.sigmoid(wide * (8 / torch.pi) ** 0.5 * (1 + 0.044715 * wide * wide)),
        "silu": lambda: torch.sigmoid(wide),
        "elu": lambda: torch.where(wide > 0, 1.0, torch.expm1(wide) / wide),
    }[activation]()
    zero, one = (torch.full((1,), k, dtype=dtype, device=device) for k in (0.0, 1.0))
    y = functional.batch_norm_act(
        v.reshape(1, 1, -1).to(device), None, None, zero, one, training=False, eps=0.0, activation=activation
    )
    relative = ((y.flatten().cpu().double() - wide * gate) / (wide * gate)).abs().nan_to_num(0.0).max().item()
    # exp(v^2 / 2) makes the rounding of v^2 some v^2 / 2 times larger
    units = {"gelu": 16, "gelu_tanh": 40}.get(activation, 3)
    assert relative < units * torch.finfo(dtype).eps


def test_default_parameters_are_torchs():
    assert BatchNormAct(3, activation="leaky_relu").activation_param == nn.LeakyReLU().negative_slope
    assert BatchNormAct(3, activation="elu").activation_param == nn.ELU().alpha
    x = torch.randn(5, 3)
    for slope in (0.0, -0.5):  # neither can be inverted, and nothing here is
        layer = BatchNormAct(3, activation="leaky_relu", activation_param=slope)
        assert_close_enough(
            layer(x), F.leaky_relu(F.batch_norm(x, None, None, training=True), slope), row="layer"
        )


def eager_and_compiled(layer, backend, x, *residual):
    """Pairs of results of one step, of the layer and of its one graph."""
    torch._dynamo.reset()
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        layer.reset_running_stats()
        results.append(
            [*run_layer_step(run, x, x.sin(), *residual), *(b.clone().float() for b in layer.buffers())]
        )
    return zip(*results, strict=True)


@pytest.mark.parametrize("memory", ["recompute", "keep"])
@pytest.mark.parametrize("channel_last", [False, True], ids=["", "channel_last"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_traced_as_plain_ops(memory, channel_last, residual):
    layer, targets = BatchNormAct(6, activation="gelu", memory=memory, channel_last=channel_last), []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.randn(4, 5, 6) if channel_last else torch.randn(4, 6, 5)
    for eager, compiled in eager_and_compiled(layer, backend, x, *([torch.randn_like(x)] * residual)):
        assert_close_enough(compiled, eager, row="layer", least_scale=1.0)
    text = " ".join(targets)
    assert "batch_norm" in text and "gelu" in text
    assert "fastvit" not in text and "BatchNormFunction" not in text


@pytest.mark.parametrize("options,dtype", [({"momentum": None}, torch.float32), ({}, torch.float64)])
def test_what_torch_cannot_trace_is_traced_as_ours(options, dtype):
    """A cumulative average, and parameters of another dtype."""
    x = torch.randn(4, 6, 5, dtype=dtype)
    for eager, compiled in eager_and_compiled(BatchNormAct(6, **options), "aot_eager", x):
        assert_close_enough(compiled, eager, row="layer")


def test_exported_as_plain_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct(4, activation="hardswish")).eval()
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (x,))
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.conv2d.default", "aten.batch_norm.default", "aten.hardswish.default"]
    assert_close_enough(exported.module()(x), model(x), row="layer")


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 7, 3),
        torch.randn(4, 5, 7, 3),
        torch.randn(4, 3, 7).transpose(1, 2),
        torch.randn(4, 3, 5, 7).permute(0, 2, 3, 1),
    ],
    ids=["tokens", "images", "transposed tokens", "permuted images"],
)
def test_tokens_keep_their_strides_where_they_are_traced(x):
    torch._dynamo.reset()
    layer = BatchNormAct(3, channel_last=True).eval()
    exported = torch.export.export(layer, (x,)).module()
    for run in (layer, torch.compile(layer, backend="eager"), exported):
        y = run(x)
        assert y.stride() == x.stride()
        assert_close_enough(y, layer(x), row="layer")
