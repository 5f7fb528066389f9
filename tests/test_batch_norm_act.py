"""BatchNormAct: every activation and layout against torch, gradients, options, copies, compiled graphs."""

import pytest
import torch
from cases import ACTIVATIONS, CORE_LAYOUTS, DTYPES, INVERTIBLE, PARAM, Case, restride
from tolerances import check
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import BatchNormAct, BatchNormActSync, _checks, functional
from fastvit._formulas import activate


def make(case, activation, memory="recompute", **options):
    options |= {"channel_last": case.channel_dim != 1, "dtype": case.weight.dtype, "device": case.x.device}
    options |= {"activation": activation, "activation_param": PARAM, "memory": memory}
    layer = BatchNormAct(case.channels, **options)
    with torch.no_grad():
        layer.weight.copy_(case.weight)
        layer.bias.copy_(case.bias)
        layer.running_mean.copy_(case.running_mean)
        layer.running_var.copy_(case.running_var)
    return layer


def torch_layer(layer, x, z):
    """The layer in torch's ops in float64, with copies of parameters and buffers."""
    own = {name: t.detach().double().requires_grad_() for name, t in layer.named_parameters()}
    buffers = [layer.running_mean.double(), layer.running_var.double()]
    channel_dim, options = x.dim() - 1 if layer.channel_last else 1, (layer.momentum, layer.eps)
    y = F.batch_norm(x.movedim(channel_dim, 1), *buffers, *own.values(), layer.training, *options)
    y = y.movedim(1, channel_dim)
    y = activate(y if z is None else y + z, layer.activation, layer.activation_param)
    return y, list(own.values()), buffers


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_like_torch(layout, activation, dtype, residual, training, device):
    case = Case(layout, dtype, device)
    layer = make(case, activation).train(training)
    inputs = [case.x, case.z] if residual else [case.x]
    theirs = [t.double().detach().requires_grad_() for t in inputs]
    want, parameters, buffers = torch_layer(layer, theirs[0], theirs[1] if residual else None)
    wanted = torch.autograd.grad(want, [*theirs, *parameters], case.dy.double())
    ours = [t.detach().clone().requires_grad_() for t in inputs]
    y = layer(*(restride(a, b) for a, b in zip(ours, inputs, strict=True)))
    got = torch.autograd.grad(y, [*ours, layer.weight, layer.bias], case.dy)
    check("layer", y, want)
    summed = case.dy.double().norm().item() / case.channels**0.5
    for a, b in zip(got, wanted, strict=True):
        check("layer", a, b, dtype, least_scale=summed if a.dim() == 1 else 1e-30)
    check("running", layer.running_mean, buffers[0], torch.float32)
    check("running", layer.running_var, buffers[1], torch.float32)


@pytest.mark.parametrize("activation", INVERTIBLE)
def test_in_place_is_in_place_abn(activation, device):
    case = Case("nchw", torch.float32, device)
    layer = make(case, activation, "inplace")
    other = fastvit.InPlaceABN(5, activation=activation, activation_param=PARAM, device=device)
    other.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, other):
        leaf = case.x.clone().requires_grad_()
        x = restride(leaf, case.x)
        y = module(x)
        assert y is x
        results.append([y.detach().clone(), *torch.autograd.grad(y, [leaf, *module.parameters()], case.dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradcheck(layout, activation, residual, training, device):
    case = Case(layout, torch.float64, device)

    def call(x, weight, bias, z=None):
        z = None if z is None else restride(z, case.z)
        running = case.running_mean.clone(), case.running_var.clone()
        options = {"activation": activation, "activation_param": PARAM}
        options["channel_last"] = case.channel_dim != 1
        x = restride(x, case.x)
        return functional.batch_norm_act(x, weight, bias, *running, z, training, **options)

    inputs = [case.x, case.weight, case.bias, *([case.z] if residual else [])]
    assert torch.autograd.gradcheck(call, [t.clone().requires_grad_() for t in inputs], fast_mode=True)


@pytest.mark.parametrize("activation", ["identity", "relu"])
def test_each_gradient_alone(activation, device):
    case = Case("nchw", torch.float32, device)
    layer = make(case, activation)
    inputs = [case.x, case.z, layer.weight, layer.bias]
    for t in inputs:
        t.requires_grad_()
    every = torch.autograd.grad(layer(case.x, case.z), inputs, case.dy)
    for wanted, want in zip(inputs, every, strict=True):
        for t in inputs:
            t.requires_grad_(t is wanted)
        assert torch.equal(torch.autograd.grad(layer(case.x, case.z), [wanted], case.dy)[0], want)


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
    want = activate(theirs, activation, _checks.check_activation(activation, None))
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


@pytest.mark.parametrize("layout", ["nchw", "tokens"])
@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_options(options, layout, device):
    case = Case(layout, torch.float32, device)
    channel_last = case.channel_dim != 1
    layer = BatchNormAct(case.channels, activation="silu", channel_last=channel_last, **options).to(device)
    theirs = (nn.BatchNorm1d if channel_last else nn.BatchNorm2d)(case.channels, **options).to(device)
    for _ in range(2):
        want = F.silu(theirs(case.x.movedim(case.channel_dim, 1)).movedim(1, case.channel_dim))
        check("layer", layer(case.x), want)
    for name, buffer in theirs.named_buffers():
        check("running", layer.get_buffer(name).float(), buffer.float())


def test_default_parameters_are_torchs():
    assert BatchNormAct(3, activation="leaky_relu").activation_param == nn.LeakyReLU().negative_slope
    assert BatchNormAct(3, activation="elu").activation_param == nn.ELU().alpha
    x = torch.randn(5, 3)
    for slope in (0.0, -0.5):  # neither can be inverted, and nothing here is
        layer = BatchNormAct(3, activation="leaky_relu", activation_param=slope)
        check("layer", layer(x), F.leaky_relu(F.batch_norm(x, None, None, training=True), slope))


@pytest.mark.parametrize("kind", [BatchNormAct, BatchNormActSync])
def test_repr(kind):
    assert "activation=hardswish, memory=keep" in repr(kind(5, activation="hardswish", memory="keep"))
    options = {"activation": "elu", "activation_param": 0.5, "memory": "inplace", "channel_last": True}
    assert "activation=elu[0.5], memory=inplace, channel_last=True" in repr(kind(3, **options))


def test_converts_to_synchronised_and_back():
    model = nn.Sequential(BatchNormAct(3, activation="gelu"), BatchNormActSync(3))
    weight = model[0].weight
    fastvit.convert_syncbn_model(model, process_group="a group")
    assert [type(m) for m in model] == [BatchNormActSync] * 2 and model[0].process_group == "a group"
    assert model[0].weight is weight and model[0].activation == "gelu"
    fastvit.revert_syncbn_model(model)
    assert [type(m) for m in model] == [BatchNormAct, BatchNormActSync]
    assert "process_group" not in model[0].__dict__


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: BatchNormAct(3, activation="tanh"), "activation is 'tanh'; one of identity, relu"),
        (lambda: BatchNormAct(3, memory="auto"), "memory is 'auto'; one of recompute, inplace, keep"),
        (lambda: BatchNormAct(3, activation="gelu", memory="inplace"), "activation is 'gelu'; in place"),
        (lambda: BatchNormAct(3, memory="inplace"), "activation is 'relu'; in place"),
        (
            lambda: BatchNormAct(3, activation="leaky_relu", activation_param=0, memory="inplace"),
            "slope 0 is relu",
        ),
        (lambda: BatchNormAct(3, activation="elu", activation_param="1"), "activation_param is '1'"),
        (lambda: BatchNormAct(3, activation="elu", activation_param=float("nan")), "is nan; a finite"),
        (lambda: BatchNormAct(0), "BatchNormAct: num_features is 0"),
        (
            lambda: BatchNormAct(3)(torch.randn(2, 4)),
            r"batch_norm_act: weight has shape \(3,\), .* dimension 1, got 4",
        ),
        (lambda: BatchNormActSync(3)(torch.randn(3)), "batch_norm_act: expected an input of 2 to 5"),
        (lambda: BatchNormAct(3)(torch.ones(1, 3)), "Expected more than 1 value per channel"),
        (lambda: BatchNormAct(3)(torch.randn(2, 3), torch.randn(2, 1)), r"z is \(2, 1\)"),
        (
            lambda: BatchNormAct(3, activation="elu", memory="inplace")(torch.ones(2, 3), torch.ones(2, 3)),
            "BatchNormAct: got a residual z with memory='inplace'; 'recompute' or 'keep' expected",
        ),
    ],
)
def test_impossible_requests(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unsafe_ratio_in_place_names_the_layer():
    layer = BatchNormAct(4, activation="leaky_relu", memory="inplace")
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.fill_(2.0)
    with pytest.warns(UserWarning, match=r"BatchNormAct\(4\): \|bias\| / \|weight\| is up to 200"):
        layer(torch.randn(3, 4).bfloat16())


class Graphs:
    """A compiler backend that records its graphs."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph, inputs):
        self.targets += [str(node.target) for node in graph.graph.nodes]
        return graph.forward


@pytest.mark.parametrize("memory", ["recompute", "keep"])
@pytest.mark.parametrize("channel_last", [False, True], ids=["", "channel_last"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_traced_as_plain_ops(memory, channel_last, residual):
    torch._dynamo.reset()
    layer = BatchNormAct(6, activation="gelu", memory=memory, channel_last=channel_last)
    x = torch.randn(4, 5, 6) if channel_last else torch.randn(4, 6, 5)
    inputs = [x, torch.randn_like(x)] if residual else [x]
    results, graphs = [], Graphs()
    for run in (layer, torch.compile(layer, fullgraph=True, backend=graphs)):
        layer.reset_running_stats()
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = run(*leaves)
        gradients = torch.autograd.grad(y.square().sum(), [*leaves, *layer.parameters()])
        results.append([y, *gradients, *(b.clone().float() for b in layer.buffers())])
    for eager, compiled in zip(*results, strict=True):
        check("layer", compiled, eager, least_scale=1.0)
    text = " ".join(graphs.targets)
    assert (
        "batch_norm" in text and "gelu" in text and "fastvit" not in text and "BatchNormFunction" not in text
    )


@pytest.mark.parametrize(
    "layer,dtype",
    [(BatchNormAct(6, momentum=None), torch.float32), (BatchNormAct(6), torch.float64)],
    ids=["cumulative", "mixed"],
)
def test_what_torch_cannot_trace_is_traced_as_ours(layer, dtype):
    torch._dynamo.reset()
    x = torch.randn(4, 6, 5, dtype=dtype)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.reset_running_stats()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append([y, torch.autograd.grad(y.square().sum(), leaf)[0], layer.running_var.clone()])
    for eager, compiled in zip(*results, strict=True):
        check("layer", compiled, eager)


def test_exported_as_plain_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct(4, activation="hardswish")).eval()
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (x,))
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.conv2d.default", "aten.batch_norm.default", "aten.hardswish.default"]
    check("layer", exported.module()(x), model(x))
