"""A layer's step against torch's BatchNorm and activation: outputs, gradients, running statistics."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.inputs import LayerInputs, make_differently_strided, run_layer_step
from ops.matrix import CORE_LAYOUTS, DTYPES, LAYOUTS
from ops.tolerances import assert_close_enough
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import BatchNormAct, InPlaceABN, SyncBatchNorm, functional
from layers.pairs import KINDS, TORCH_NORMS, assert_same_step, each_layer, make_pair, name_dtype

MODES = ("train", "eval", "no_stats")
KINDS_WITH_A_RESIDUAL = [kind for kind, facts in KINDS.items() if not facts.is_in_place]
# A BatchNormAct in place runs the code of an InPlaceABN.
MAIN_KINDS = [kind for kind in KINDS if kind != "BatchNormAct_inplace"]
KINDS_AND_ACTIVATIONS = [(kind, activation) for kind in KINDS for activation in KINDS[kind].activations]


def step_cases():
    """Yields each activation in each mode, then each layout, each dtype, and the modes of tokens."""
    cases = [
        (kind, activation, "nchw", torch.float32, mode)
        for kind, activation in KINDS_AND_ACTIVATIONS
        for mode in MODES
    ]
    for kind in MAIN_KINDS:
        activation = KINDS[kind].usual_activation
        cases += [(kind, activation, layout, torch.float32, "train") for layout in LAYOUTS]
        cases += [(kind, activation, layout, d, "train") for layout in ("nchw", "nhwc_c13") for d in DTYPES]
        cases += [(kind, activation, "tokens", torch.float32, mode) for mode in MODES]
    for kind, activation, layout, dtype, mode in dict.fromkeys(cases):
        name = f"{kind}-{activation}-{layout}-{name_dtype(dtype)}-{mode}"
        yield pytest.param(kind, activation, layout, dtype, mode, id=name)


def assert_same_steps(kind, activation, layout, dtype, mode, device):
    """Raises unless steps without and with a residual are torch's."""
    inputs = LayerInputs(layout, dtype, device)
    layer, torch_layer = make_pair(kind, inputs, activation, track_running_stats=mode != "no_stats")
    layer.train(mode != "eval"), torch_layer.train(mode != "eval")
    assert_same_step(kind, layer, torch_layer, inputs)
    if kind in KINDS_WITH_A_RESIDUAL and (layout in CORE_LAYOUTS or dtype != torch.float16):
        assert_same_step(kind, layer, torch_layer, inputs, inputs.residual)


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("kind,activation,layout,dtype,mode", list(step_cases()))
def test_layers_give_torchs_results(kind, activation, layout, dtype, mode, device):
    assert_same_steps(kind, activation, layout, dtype, mode, device)


@given(
    st.sampled_from(KINDS_AND_ACTIVATIONS),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(DTYPES),
    st.sampled_from(MODES),
)
def test_any_layer_gives_torchs_results(device, kind_and_activation, layout, dtype, mode):
    assert_same_steps(*kind_and_activation, layout, dtype, mode, device)


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("kind", MAIN_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_dtype)
def test_half_precision_parameters_and_statistics_give_torchs_results(kind, dtype, device):
    inputs = LayerInputs("nchw", dtype, device, parameters=dtype)
    layer, torch_layer = make_pair(kind, inputs, KINDS[kind].usual_activation)
    assert layer.weight.dtype == layer.running_var.dtype == dtype
    assert_same_step(kind, layer, torch_layer, inputs)
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    as_float32, _ = make_pair(kind, LayerInputs("nchw", dtype, device), KINDS[kind].usual_activation)
    as_float32.to(dtype).load_state_dict(layer.state_dict())
    x = inputs.x.clone(), inputs.x.clone()
    assert torch.equal(as_float32.eval()(x[0]), layer.eval()(x[1]))


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize(
    "kind,activation", [("SyncBatchNorm", "identity"), ("SyncBatchNorm", "relu"), ("BatchNormAct", "gelu")]
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_a_residual_of_other_strides_gives_torchs_results(kind, activation, layout, device):
    inputs = LayerInputs(layout, torch.float32, device)
    layer, torch_layer = make_pair(kind, inputs, activation)
    for name, residual in make_differently_strided(inputs.residual).items():
        leaf = residual.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(inputs.x, leaf), leaf, inputs.dy)
        # The gradient of a residual without an activation behind it is dy itself.
        strided_alike = inputs.dy if activation == "identity" else torch.empty_like(residual)
        assert gradient.stride() == strided_alike.stride()
        if name != "expanded":  # A copy is not expanded.
            torch_layer.norm.load_state_dict(layer.state_dict())
            assert_same_step(kind, layer, torch_layer, inputs, residual)


OPTIONS = {
    "no_parameters": {"affine": False},
    "cumulative_average": {"momentum": None},
    "large_eps_and_momentum": {"eps": 0.1, "momentum": 0.7},
    "zero_eps_and_momentum": {"eps": 0.0, "momentum": 0.0},
}


@pytest.mark.parametrize("kind", MAIN_KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_layers_give_torchs_results_with_each_option(kind, name, device):
    inputs = LayerInputs("tokens", torch.float32, device)
    layer, torch_layer = make_pair(kind, inputs, "identity", **OPTIONS[name])
    for _ in range(3):
        assert_same_step(kind, layer, torch_layer, inputs)
    assert layer.num_batches_tracked == 3


FUNCTIONS = [
    (InPlaceABN, functional.inplace_abn),
    (SyncBatchNorm, functional.sync_batch_norm),
    (BatchNormAct, functional.batch_norm_act),
]


@pytest.mark.parametrize("layer_class,function", FUNCTIONS, ids=[f.__name__ for _, f in FUNCTIONS])
def test_a_function_has_the_defaults_of_its_layer(layer_class, function):
    x, layer = torch.randn(8, 3), layer_class(3)
    running_statistics = torch.zeros(3), torch.ones(3)
    y = function(x.clone(), layer.weight, layer.bias, *running_statistics)
    expected = layer(x.clone()), layer.running_mean, layer.running_var
    assert all(map(torch.equal, (y, *running_statistics), expected))


def test_a_residual_has_one_name_but_apexs_in_sync_batch_norm():
    x, residual = torch.randn(2, 4, 3)
    expected = functional.sync_batch_norm(x, None, None, None, None, residual=residual)
    y = functional.batch_norm_act(x, None, None, None, None, activation="identity", residual=residual)
    assert torch.equal(y, expected)
    assert torch.equal(BatchNormAct(3, activation="identity")(x, residual=residual), expected)
    assert torch.equal(SyncBatchNorm(3)(x, z=residual), expected)


def test_layers_keep_float32_parameters_under_autocast(device):
    x, conv = torch.randn(6, 5, 7, 11, device=device), nn.Conv2d(5, 5, 3, padding=1).to(device)
    for layer, *residual in ((InPlaceABN(5),), (SyncBatchNorm(5, fuse_relu=True), x)):
        layer.to(device)
        with torch.autocast(device, torch.bfloat16):
            y = layer(conv(x), *residual)
        assert y.dtype == torch.bfloat16 and layer.weight.dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32 and conv.weight.grad.isfinite().all()


@each_layer
def test_layers_without_bias_give_torchs_results(layer_class):
    options = {} if layer_class is SyncBatchNorm else {"activation": "identity"}
    layer, torch_layer = layer_class(3, bias=False, **options), nn.BatchNorm1d(3)
    assert layer.bias is None and "bias=False" in repr(layer)
    assert list(layer.state_dict()) == [name for name in torch_layer.state_dict() if name != "bias"]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
        torch_layer.weight.copy_(layer.weight)
    inputs = LayerInputs("nc", torch.float32)
    x, dy = inputs.x[:, :3], inputs.dy[:, :3]
    expected = run_layer_step(torch_layer, x, dy)[:3]
    for a, b in zip(run_layer_step(layer, x, dy), expected, strict=True):
        assert_close_enough(a, b, row="layer")
    layer.reset_parameters()
    assert layer.weight.tolist() == [1.0] * 3 and layer.bias is None
    plain = layer_class(3, affine=False)
    assert plain.weight is None and plain.bias is None


def test_a_reverted_layer_has_no_bias_if_it_had_none():
    layer = fastvit.revert_syncbn_model(SyncBatchNorm(3, bias=False))
    layer.reset_parameters()
    assert type(layer) is not SyncBatchNorm and layer.bias is None and "bias=False" in repr(layer)


def test_a_cumulative_average_without_a_count_is_not_updated():
    layer, torch_layer = InPlaceABN(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for norm in (layer, torch_layer):
        norm.bias = norm.num_batches_tracked = None
    x = torch.randn(4, 3)
    assert_close_enough(layer(x.clone()), F.leaky_relu(torch_layer(x)), row="layer")
    assert torch.equal(layer.running_mean, torch_layer.running_mean)


def test_tensors_without_channels_keep_their_shape():
    x = torch.randn(4, 0, 3)
    for function in (functional.batch_norm_act, functional.inplace_abn):
        assert function(x, *[None] * 4).shape == x.shape


def make_gaps(vector: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a vector whose elements have a stride of 3."""
    return torch.stack([vector.detach()] * 3, -1)[..., 1]


@pytest.mark.parametrize(
    "make_layer",
    [
        pytest.param(lambda: InPlaceABN(4, activation="identity"), id="InPlaceABN"),
        pytest.param(lambda: BatchNormAct(4, activation="identity"), id="BatchNormAct"),
        pytest.param(lambda: SyncBatchNorm(4), id="SyncBatchNorm"),
        pytest.param(lambda: fastvit.LayerNorm((2, 3)), id="LayerNorm"),
    ],
)
def test_parameters_with_gaps_give_the_same_bits(make_layer):
    layer, (x, dy) = make_layer(), torch.randn(2, 5, 4, 2, 3)
    if not isinstance(layer, nn.LayerNorm):
        x, dy = x[..., 0], dy[..., 0]
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    expected = run_layer_step(layer, x, dy)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(make_gaps(parameter)))
    assert not layer.weight.is_contiguous() and all(map(torch.equal, run_layer_step(layer, x, dy), expected))


@pytest.mark.parametrize(
    "make_layer",
    [
        pytest.param(lambda m: InPlaceABN(4, activation="identity", momentum=m), id="InPlaceABN"),
        pytest.param(lambda m: BatchNormAct(4, activation="identity", momentum=m), id="BatchNormAct"),
        pytest.param(lambda m: SyncBatchNorm(4, momentum=m), id="SyncBatchNorm"),
        pytest.param(lambda m: fastvit.fuse(nn.BatchNorm2d(4, momentum=m)), id="fused"),
    ],
)
def test_running_statistics_with_gaps_are_updated_where_they_are(make_layer):
    for momentum in (0.1, None):
        layer, torch_layer = make_layer(momentum), TORCH_NORMS[4](4, momentum=momentum)
        for norm in (layer, torch_layer):
            for name in ("running_mean", "running_var"):
                norm.matrix = torch.ones(4, 3)
                setattr(norm, name, norm.matrix[:, 1])
        for mode in (True, True, False):
            layer.train(mode), torch_layer.train(mode)
            x = torch.randn(2, 4, 3, 3)
            torch.testing.assert_close(layer(x.clone()), torch_layer(x))
            for name in ("running_mean", "running_var"):
                torch.testing.assert_close(getattr(layer, name), getattr(torch_layer, name))
        assert layer.matrix[:, ::2].eq(1).all() and not layer.matrix[:, 1].eq(1).any()
        assert not layer.running_var.is_contiguous()


@pytest.mark.parametrize("function", [functional.inplace_abn, functional.batch_norm_act])
def test_running_statistics_of_one_number_for_all_channels_can_be_used_and_not_updated(function):
    x, count = torch.randn(2, 3, 5), torch.tensor(0)
    expanded = {"running_mean": torch.zeros(1).expand(3), "running_var": torch.ones(1).expand(3)}
    whole = {name: t.clone() for name, t in expanded.items()}
    y, expected = (
        function(x.clone(), **running, weight=None, bias=None, training=False)
        for running in (expanded, whole)
    )
    assert torch.equal(y, expected)
    for name, tensor in expanded.items():
        written = x.clone()
        with pytest.raises(RuntimeError, match=rf"{function.__name__}: {name} is expanded \(stride 0\)"):
            function(written, None, None, **(whole | {name: tensor}), num_batches_tracked=count)
        assert torch.equal(written, x) and count == 0 and whole["running_mean"].eq(0).all()
        with pytest.raises(ValueError, match=f"{name} has shape \\(5,\\)"):
            function(written, None, None, **(whole | {name: torch.ones(1).expand(5)}))
