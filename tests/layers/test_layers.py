"""The layers on one process, against torch's BatchNorm and activation: results, copies, errors."""

import contextlib
import copy
import functools
import io
import math
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from ops.inputs import (
    ACTIVATION_PARAM,
    ACTIVATIONS,
    CORE_LAYOUTS,
    DTYPES,
    INVERTIBLE,
    LAYOUTS,
    LayerInputs,
    make_differently_strided,
    run_layer_step,
)
from ops.tolerances import assert_close_enough, relative_error
from packages import import_or_skip
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import BatchNormAct, BatchNormActSync, InPlaceABN, InPlaceABNSync, SyncBatchNorm, functional
from fastvit._formulas import apply_activation
from fastvit.compat import inplace_abn as compat_inplace_abn

LAYERS = [InPlaceABN, InPlaceABNSync, SyncBatchNorm, BatchNormAct, BatchNormActSync]
every_layer = pytest.mark.parametrize("make_layer", LAYERS)
KINDS = {"abn": InPlaceABN, "sbn": SyncBatchNorm, "bna": BatchNormAct}
OF_KINDS = [*(("abn", a) for a in INVERTIBLE), ("sbn", "identity"), ("sbn", "relu")]
OF_KINDS += [("bna", a) for a in ACTIVATIONS]
TORCH_NORM = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
NOT_FINITE = (math.nan, math.inf, -math.inf)
TENSORS = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


class TorchLayer(nn.Module):
    """BatchNorm + residual + activation from torch, with the channels in any dimension."""

    def __init__(self, channels, dims, activation, channel_dim=1, **options):
        super().__init__()
        self.norm = TORCH_NORM[dims](channels, **options)
        self.activation, self.channel_dim = activation, channel_dim

    def forward(self, x, residual=None):
        y = self.norm(x.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)
        return apply_activation(y if residual is None else y + residual, self.activation, ACTIVATION_PARAM)


def make(kind, case, activation, **options):
    """fastvit's layer, and torch's with the same parameters and buffers (in float64, exact for half too)."""
    channel_last = case.channel_dim == case.x.dim() - 1 and case.x.dim() > 2
    common = dict(channel_last=channel_last, dtype=case.weight.dtype, device=case.x.device, **options)
    if kind == "sbn":
        ours = SyncBatchNorm(case.channels, fuse_relu=activation == "relu", **common)
    else:
        ours = KINDS[kind](case.channels, activation=activation, activation_param=ACTIVATION_PARAM, **common)
    theirs = TorchLayer(case.channels, case.x.dim(), activation, case.channel_dim, **options)
    theirs = theirs.to(case.x.device).double()
    with torch.no_grad():
        for name in TENSORS[: 4 if ours.track_running_stats else 2]:
            if getattr(ours, name) is not None:
                getattr(ours, name).copy_(getattr(case, name))
    theirs.norm.load_state_dict(ours.state_dict())
    return ours, theirs


def compare(kind, ours, theirs, case, *residual):
    got = run_layer_step(ours, case.x, case.dy, *residual)
    want = run_layer_step(theirs, case.x.double(), case.dy.double(), *(t.double() for t in residual))
    row = "in_place_layer" if kind == "abn" else "layer"
    # A parameter's gradient sums one term per value, of either sign.
    summed = case.dy.double().norm().item() / case.channels**0.5
    for a, b in zip(got, want, strict=True):
        assert_close_enough(a, b, row=row, dtype=case.x.dtype, least_scale=summed if a.dim() == 1 else 1e-30)
    assert got[0].dtype == got[1].dtype == case.x.dtype
    for name, buffer in theirs.norm.named_buffers():
        assert_close_enough(
            ours.get_buffer(name).double(), buffer.double(), row="running", dtype=torch.float32
        )


MODES = {layout: ["train", "eval", "no_stats"] if layout in CORE_LAYOUTS else ["train"] for layout in LAYOUTS}


@pytest.mark.parametrize("layout,mode", [(layout, mode) for layout in LAYOUTS for mode in MODES[layout]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind,activation", OF_KINDS)
def test_layers_give_torchs_results(kind, activation, layout, dtype, mode, device):
    case = LayerInputs(layout, dtype, device)
    ours, theirs = make(kind, case, activation, track_running_stats=mode != "no_stats")
    ours.train(mode != "eval"), theirs.train(mode != "eval")
    compare(kind, ours, theirs, case)
    if kind != "abn" and (layout in CORE_LAYOUTS or dtype != torch.float16):
        compare(kind, ours, theirs, case, case.residual)


@pytest.mark.parametrize("kind,activation", [("sbn", "identity"), ("sbn", "relu"), ("bna", "gelu")])
@pytest.mark.parametrize("layout", ["nchw", "nhwc_c13"])
def test_a_residual_of_other_strides(kind, activation, layout, device):
    case = LayerInputs(layout, torch.float32, device)
    ours, theirs = make(kind, case, activation)
    for name, residual in make_differently_strided(case.residual).items():
        leaf = residual.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(ours(case.x, leaf), leaf, case.dy)
        same = case.dy if activation == "identity" else torch.empty_like(residual)  # of dy, it is dy itself
        assert gradient.stride() == same.stride()
        if name != "expanded":  # which no copy is
            theirs.norm.load_state_dict(ours.state_dict())
            compare(kind, ours, theirs, case, residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["nchw", "tokens"])
@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.7}, {"eps": 0.0, "momentum": 0.0}],
)
def test_layers_give_torchs_results_with_each_option(kind, options, layout, device):
    case = LayerInputs(layout, torch.float32, device)
    ours, theirs = make(kind, case, "identity", **options)
    theirs.norm.eps = max(theirs.norm.eps, 1e-300)  # torch refuses 0
    for _ in range(3):
        compare(kind, ours, theirs, case)
    assert ours.num_batches_tracked == 3


@pytest.mark.parametrize(
    "layer,function",
    [
        (InPlaceABN, functional.inplace_abn),
        (SyncBatchNorm, functional.sync_batch_norm),
        (BatchNormAct, functional.batch_norm_act),
    ],
)
def test_a_function_has_the_defaults_of_its_layer(layer, function):
    x, ours = torch.randn(8, 3), layer(3)
    running = torch.zeros(3), torch.ones(3)
    y = function(x.clone(), ours.weight, ours.bias, *running)
    got, want = (y, *running), (ours(x.clone()), ours.running_mean, ours.running_var)
    assert all(map(torch.equal, got, want))


def test_a_residual_by_name():
    """SyncBatchNorm has apex's name for it."""
    x, residual = torch.randn(2, 4, 3)
    want = functional.sync_batch_norm(x, None, None, None, None, residual=residual)
    options, given = {"activation": "identity"}, {"residual": residual}
    assert torch.equal(functional.batch_norm_act(x, None, None, None, None, **options, **given), want)
    assert torch.equal(BatchNormAct(3, **options)(x, **given), want)
    assert torch.equal(SyncBatchNorm(3)(x, z=residual), want)


@pytest.mark.parametrize(
    "kind,activation", [("abn", "identity"), ("sbn", "relu"), ("bna", "identity"), ("bna", "relu")]
)
def test_each_gradient_alone(kind, activation, device):
    """Only tensors that require grad get one, and freezing does not affect the others."""
    case = LayerInputs("nchw", torch.float32, device)
    layer, _ = make(kind, case, activation)
    residual = [] if kind == "abn" else [case.residual]
    inputs = [case.x, *residual, layer.weight, layer.bias]

    def gradients(wanted):
        for t in inputs:
            t.requires_grad_(any(t is one for one in wanted))
        return torch.autograd.grad(layer(case.x.clone(), *residual), wanted, case.dy)

    for one, want in zip(inputs, gradients(inputs), strict=True):
        assert torch.equal(*gradients([one]), want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_overwrites_its_input_always(training, grad, device):
    layer = InPlaceABN(5).to(device).train(training)
    x = torch.randn(4, 5, 3, 3, device=device, requires_grad=grad).clone()
    version = x._version
    with torch.set_grad_enabled(grad):
        assert layer(x) is x and x._version == version + 1


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_versions_of_running_statistics(training, make_layer, device):
    """They tell autograd of each write, and there is none in evaluation."""
    layer = make_layer(5).to(device).train(training)
    versions = [buffer._version for buffer in layer.buffers()]
    layer(torch.randn(4, 5, 3, device=device))
    written = [b._version - version for b, version in zip(layer.buffers(), versions, strict=True)]
    assert written == [training] * 3


@pytest.mark.parametrize("kind", ["abn", "sbn"])
def test_saved_for_backward_is_one_activation(kind):
    layer = InPlaceABN(64) if kind == "abn" else SyncBatchNorm(64, fuse_relu=True)
    x = torch.randn(8, 64, 16, 16, requires_grad=True).clone()
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    own = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    one = x.nbytes + (2 * 64 + 2) * 4 + own
    assert sum(saved.values()) == one
    with torch.profiler.profile(profile_memory=True) as profile:
        y.backward(torch.ones_like(y))
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages())
    assert allocated <= 3 * x.nbytes + 16384  # dy, dx, and the clone's gradient, which is dx


def test_layers_keep_float32_parameters_under_autocast(device):
    x, conv = torch.randn(6, 5, 7, 11, device=device), nn.Conv2d(5, 5, 3, padding=1).to(device)
    for layer, *residual in ((InPlaceABN(5),), (SyncBatchNorm(5, fuse_relu=True), x)):
        layer.to(device)
        with torch.autocast(device, torch.bfloat16):
            y = layer(conv(x), *residual)
        assert y.dtype == torch.bfloat16 and layer.weight.dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32 and conv.weight.grad.isfinite().all()


@every_layer
def test_copied_pickled_and_saved_layers_give_the_same_output(make_layer):
    layer = make_layer(5)
    layer(torch.randn(4, 5, 3))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    x = torch.randn(4, 5, 3)
    want = layer.eval()(x.clone())
    for copied in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False).eval(),
    ):
        assert repr(copied) == repr(layer) and torch.equal(copied(x.clone()), want)
        assert copied.state_dict()._metadata[""]["version"] == 2
    parameters = {name: value * 2 for name, value in layer.state_dict().items() if value.is_floating_point()}
    got = torch.func.functional_call(layer, parameters, (x.clone(),))
    layer.load_state_dict({**layer.state_dict(), **parameters})
    assert torch.equal(got, layer(x.clone()))


@every_layer
def test_state_dict_moves_both_ways(make_layer):
    theirs, layer = nn.BatchNorm2d(6), make_layer(6)
    nn.init.normal_(theirs.weight)
    theirs(torch.randn(3, 6, 2, 2))
    layer.load_state_dict(theirs.state_dict())
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer(torch.randn(3, 6, 2, 2))
    theirs.load_state_dict(layer.state_dict())
    assert torch.equal(theirs.running_var, layer.running_var) and theirs.num_batches_tracked == 2
    old = {k: v for k, v in theirs.state_dict().items() if k != "num_batches_tracked"}
    layer.load_state_dict(old)  # version 1 had no counter


def test_abs_weight_is_mapillarys_gamma():
    case = LayerInputs("nchw", torch.float64)
    layer, theirs = make("abn", case, "leaky_relu", eps=1e-3)
    layer.abs_weight = True
    with torch.no_grad():
        theirs.norm.weight.copy_(case.weight.abs() + 1e-3)
    got, want = run_layer_step(layer, case.x, case.dy), run_layer_step(theirs, case.x, case.dy)
    want[2] *= case.weight.sign()
    for a, b in zip(got, want, strict=True):
        assert_close_enough(a, b, row="in_place_layer")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma_zero_is_floored_and_its_gradient_passes(dtype):
    """Zero-initialised gamma trains: y is bias, the parameter is not written, its gradient is right."""
    floor = {torch.float16: 1e-4, torch.float64: 1e-12}.get(dtype, 1e-7)
    case = LayerInputs("nchw", dtype)
    layer = InPlaceABN(5, activation="identity", dtype=case.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, -0.0, floor / 2, -floor / 2, 1.0]))
    kept = layer.weight.detach().clone()
    y, dx, dweight, dbias = run_layer_step(layer, case.x, case.dy)
    assert torch.equal(layer.weight, kept) and y[:, :4].abs().max() <= 5 * floor
    xhat = F.batch_norm(case.x.double(), None, None, None, None, True)
    want = (xhat * case.dy.double()).sum((0, 2, 3))
    assert relative_error(dweight, want) < {torch.float16: 2e-2, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    assert torch.equal(y[:, 0].sign().double(), xhat[:, 0].sign()), "0 counts as positive"
    assert torch.equal(y[:, 1].sign().double(), -xhat[:, 1].sign()), "-0 as negative"
    assert relative_error(dbias, case.dy.double().sum((0, 2, 3))) < 1e-5


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_on_their_way_through_zero(dtype, activation, device):
    """y is rounded at the size of bias; gradients equal torch's for any weight, however small."""
    channels = 60
    layer = InPlaceABN(
        channels, activation=activation, activation_param=ACTIVATION_PARAM, device=device, dtype=dtype
    )
    theirs = TorchLayer(channels, 4, activation).to(device).double()
    with torch.no_grad():
        sizes = torch.logspace(-14, -2, channels - 1, dtype=torch.float64) * (-1) ** torch.arange(
            channels - 1
        )
        layer.weight.copy_(torch.cat([torch.zeros(1), sizes]))
        layer.bias.copy_(torch.tensor([0.1, -1.0, 3.0, -0.3]).repeat(channels // 4))
        theirs.norm.load_state_dict(layer.state_dict())
    x, dy = (torch.randn(8, channels, 13, 11, device=device, dtype=dtype) for _ in range(2))
    y, dx, dweight, dbias = run_layer_step(layer, x, dy)
    want_y, want_dx, want_dweight, want_dbias = run_layer_step(theirs, x.double(), dy.double())
    u = torch.finfo(dtype).eps / 2
    xhat = F.batch_norm(x.double(), None, None, None, None, True)
    scale = layer.bias.detach().double().abs().view(1, -1, 1, 1)
    assert (
        (y - want_y).abs() <= 2**7 * u * scale * xhat.abs() + 8 * u * (scale + 0.1) + 1e-7 * xhat.abs()
    ).all()
    for channel in range(channels):
        for got, want, most in ((dx[:, channel], want_dx[:, channel], 0.01), (dbias, want_dbias, 1e-4)):
            assert (got - want).norm() <= most * want.norm()
    assert relative_error(dweight, want_dweight) < 0.01
    # in each channel no more than every xhat's own bound, 2^-7 and the slope's rounding, allows
    dv = dy.double() * torch.where(want_y > 0, 1.0, {"identity": 1.0}.get(activation, ACTIVATION_PARAM))
    assert ((dweight - want_dweight).abs() <= 3 * 2**-7 * dv.abs().sum((0, 2, 3))).all()


@pytest.mark.parametrize(
    "make_layer", [InPlaceABN, lambda c: BatchNormAct(c, activation="leaky_relu", memory="inplace")]
)
def test_unsafe_ratio_of_bias_and_weight_is_said_once(make_layer):
    layer = make_layer(4)
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.fill_(2.0)
    message = rf"{type(layer).__name__}\(4\): \|bias\| / \|weight\| is up to 200, so in torch.bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 4))  # float32 has digits enough
        layer._forwards_until_check = 0
        with pytest.warns(UserWarning, match=message) as said:
            layer(torch.randn(3, 4).bfloat16())
        assert said[0].filename == __file__
        for _ in range(3):
            layer(torch.randn(3, 4).bfloat16())


def test_the_ratio_is_that_of_the_gamma_that_is_used():
    """With abs_weight eps is added."""
    layer = InPlaceABN(2, abs_weight=True, eps=1e-2).half()
    nn.init.zeros_(layer.weight), nn.init.constant_(layer.bias, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 2).half())


def test_no_channels():
    x = torch.randn(4, 0, 3)
    assert functional.batch_norm_act(x, *[None] * 4).shape == functional.inplace_abn(x, *[None] * 4).shape


BATCH_NORM = "3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True"


@pytest.mark.parametrize(
    "layer,options",
    [
        (InPlaceABN(3), "activation=leaky_relu[0.01]"),
        (
            InPlaceABNSync(3, activation="identity", channel_last=True),
            "activation=identity, channel_last=True",
        ),
        (compat_inplace_abn.InPlaceABN(3), "activation=leaky_relu[0.01], abs_weight=True"),
        (
            compat_inplace_abn.InPlaceABNSync(3, activation_param=0),
            "activation=leaky_relu[0], abs_weight=True",
        ),
        (SyncBatchNorm(3), ""),
        (SyncBatchNorm(3, channel_last=True, fuse_relu=True), "channel_last=True, fuse_relu=True"),
        (BatchNormAct(3, activation="hardswish", memory="keep"), "activation=hardswish, memory=keep"),
        (
            BatchNormActSync(3, activation="elu", activation_param=0.5, memory="inplace", channel_last=True),
            "activation=elu[0.5], memory=inplace, channel_last=True",
        ),
    ],
)
def test_repr(layer, options):
    assert repr(layer) == f"{type(layer).__name__}({', '.join(filter(None, [BATCH_NORM, options]))})"


IN_PLACE = functools.partial(BatchNormAct, 3, memory="inplace")
ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "call,message",
    [
        (
            lambda: InPlaceABN(3, activation="relu"),
            "InPlaceABN: activation is 'relu'; one of identity, l",
        ),
        (lambda: InPlaceABN(3, activation_param=0.0), "slope 0 is relu"),
        (lambda: InPlaceABN(3, activation_param=-0.1), "activation_param is -0.1; a number from"),
        (
            lambda: functional.inplace_abn(ONES, *[None] * 4, activation_param=-0.0),
            "activation_param is -0.0",
        ),
        (lambda: InPlaceABN(3, activation_param=float("nan")), "activation_param is nan"),
        (lambda: InPlaceABN(3, activation_param=float("inf")), "activation_param is inf; a number from"),
        (lambda: InPlaceABN(3, activation_param=1e-39), "activation_param is 1e-39"),
        (lambda: InPlaceABN(3, activation_param="0.1"), "activation_param is '0.1'"),
        (lambda: InPlaceABN(3, activation="elu", activation_param=0), "a number from 2\\*\\*-126 to"),
        (lambda: IN_PLACE(), "activation is 'relu'; one of identity, leaky_relu, elu expected"),
        (
            lambda: IN_PLACE(activation="elu")(ONES, ONES),
            "BatchNormAct: got a residual with memory='inplace'; '",
        ),
        (lambda: BatchNormAct(3, activation="tanh"), "activation is 'tanh'; one of identity, relu"),
        (lambda: BatchNormAct(3, activation="elu", activation_param="1"), "activation_param is '1'"),
        (lambda: BatchNormAct(3, activation="elu", activation_param=float("nan")), "is nan; a number from"),
        (lambda: BatchNormAct(3, activation=["relu"]), r"activation is \['relu'\]; one of identity, relu"),
        (lambda: BatchNormAct(3, activation=None), "activation is None; one of identity, relu"),
        (
            lambda: fastvit.LayerNorm(3, output_dtype="float16"),
            "LayerNorm: output_dtype is 'float16'; a floating",
        ),
        (
            lambda: fastvit.LayerNorm(3, output_dtype=torch.int),
            "LayerNorm: output_dtype is torch.int32; a float",
        ),
        (
            lambda: fastvit.create_syncbn_process_group("2"),
            "group_size is '2'; an int of at least 0 expected",
        ),
        (lambda: fastvit.create_syncbn_process_group(-1), "group_size is -1; an int of at least 0 expected"),
        (
            lambda: fastvit.create_syncbn_process_group(True),
            "group_size is True; an int of at least 0 expected",
        ),
        (lambda: BatchNormAct(3, memory="auto"), "memory is 'auto'; one of recompute, inplace, keep"),
        (lambda: InPlaceABN(0), "InPlaceABN: num_features is 0; a positive int"),
        (lambda: SyncBatchNorm("3"), "SyncBatchNorm: num_features is '3'"),
        (lambda: SyncBatchNorm(True), "SyncBatchNorm: num_features is True; a positive int expected"),
        (lambda: InPlaceABN(3)(torch.randn(2, 4, 5)), r"weight has shape \(3,\), .* dimension 1, got 4"),
        (lambda: InPlaceABN(3, channel_last=True)(torch.randn(2, 3, 4)), r"\(3,\), .* dimension 2, got 4"),
        (lambda: BatchNormAct(3)(torch.randn(2, 4)), r"batch_norm_act: weight has shape \(3,\)"),
        (
            lambda: SyncBatchNorm(3)(torch.randn(3)),
            "sync_batch_norm: expected an input of 2 to 5 dim.*, got 1D",
        ),
        (lambda: SyncBatchNorm(3)(ONES.long()), "expected a floating-point input, got torch.int64"),
        (lambda: SyncBatchNorm(3)(torch.ones(1, 3)), "Expected more than 1 value per channel"),
        (lambda: InPlaceABN(3)(torch.ones(1, 3, 1, 1)), "Expected more than 1 value per channel"),
        (lambda: functional.act(ONES, "tanh"), "activation is 'tanh'"),
        (lambda: functional.layer_norm(ONES, (2,)), r"layer_norm: x has shape \(2, 3\); "),
        (lambda: functional.layer_norm(ONES, (3, 3)), r"layer_norm: x has shape \(2, 3\); "),
        (lambda: functional.layer_norm(ONES, ()), r"layer_norm: x has shape \(2, 3\); "),
    ],
)
def test_wrong_arguments_raise_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("make", [InPlaceABN, BatchNormAct, SyncBatchNorm, InPlaceABNSync, fastvit.LayerNorm])
@pytest.mark.parametrize("eps", ["1e-5", None, -1e-5, *NOT_FINITE, True], ids=str)
def test_an_eps_that_is_none(make, eps):
    with pytest.raises(ValueError, match=r"\w+: eps is .*; a number from 0 to 2\*\*126 expected"):
        make(3, eps=eps)
    assert make(3, eps=np.float32(1e-3)).eps == np.float32(1e-3) and make(3, eps=0).eps == 0


@pytest.mark.parametrize("make", [InPlaceABN, BatchNormAct, SyncBatchNorm, BatchNormActSync])
@pytest.mark.parametrize("momentum", ["0.1", 2.0, -0.1, *NOT_FINITE, True], ids=str)
def test_a_momentum_that_would_make_variances_negative_or_is_no_number(make, momentum):
    """torch's layers take such a number, and a string until the first forward."""
    message = f"{make.__name__}: momentum is {momentum!r}; a number from 0 to 1, or None, expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(3, 1e-5, momentum)
    for right in (None, 0, 1, 0.1):
        assert make(3, momentum=right).momentum == right


@pytest.mark.parametrize("make", [InPlaceABN, BatchNormAct, SyncBatchNorm, fastvit.LayerNorm])
@pytest.mark.parametrize("name,value", [("eps", -1.0), ("eps", math.nan), ("momentum", math.inf)])
def test_a_number_that_was_changed_is_refused(make, name, value):
    layer, x = make(3), torch.randn(4, 3)
    if not hasattr(layer, name):
        return
    setattr(layer, name, value)
    kept = [t.clone() for t in (x, *layer.buffers())]
    with pytest.raises((ValueError, RuntimeError), match=rf"\w+: {name} is {value:g}(\.0)?; "):
        layer(x)
    assert all(map(torch.equal, (x, *layer.buffers()), kept))


@pytest.mark.parametrize("name,value", [("eps", -1.0), ("momentum", math.nan)])
def test_a_number_that_was_changed_is_refused_before_ranks_send(name, value, monkeypatch):
    """Else the other ranks would go on, and wait for this one at their next exchange."""
    sent = []
    transport = type("Transport", (), {"compute_moments": lambda _, *arguments: sent.append(arguments)})()
    monkeypatch.setattr(fastvit.sync, "default_group", lambda group: group)
    monkeypatch.setattr(fastvit.sync, "get_transport", lambda *_: transport)
    layer = SyncBatchNorm(3, process_group=object())
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=f"sync_batch_norm: {name} is {value}"):
        layer(torch.randn(4, 3))
    assert not sent


@pytest.mark.parametrize("make", [InPlaceABN, BatchNormAct, SyncBatchNorm])
def test_inference_mode(make):
    """Its tensors have no version counter."""
    layer, x = make(3).eval(), torch.randn(4, 3)
    want = layer(x.clone()).detach()
    with torch.inference_mode():
        assert torch.equal(layer(x.clone()), want)


def inference_tensor():
    with torch.inference_mode():
        return torch.randn(4, 3)


@pytest.mark.parametrize(
    "make_input,message",
    [
        (lambda: torch.randn(4, 3, requires_grad=True), "is a leaf that requires grad"),
        (lambda: torch.randn(4, 6, requires_grad=True)[:, :3], "is a view of a leaf"),
        (lambda: torch.randn(4, 6, requires_grad=True).clone().chunk(2, 1)[0], "is one of the views"),
        (inference_tensor, "is an inference tensor"),
        (lambda: torch.randn(4, 3, dtype=torch.complex64).conj().imag, "is negated by a flag"),
    ],
)
def test_what_cannot_be_overwritten_is_refused_before_it_is(make_input, message):
    x, layer = make_input(), InPlaceABN(3)
    kept = x.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        layer(x)
    assert torch.equal(x, kept) and layer.num_batches_tracked == 0


def test_a_slice_of_a_result_may_be_overwritten():
    leaf = torch.randn(4, 6, requires_grad=True)
    InPlaceABN(3)(leaf.clone()[:, :3]).square().sum().backward()
    want = leaf.detach().clone().requires_grad_()
    F.leaky_relu(F.batch_norm(want[:, :3], None, None, training=True), 0.01).square().sum().backward()
    assert_close_enough(leaf.grad, want.grad, row="in_place_layer", dtype=torch.float32, least_scale=1.0)


def test_without_bias_and_without_a_count():
    layer, theirs = InPlaceABN(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for norm in (layer, theirs):
        norm.bias = norm.num_batches_tracked = None
    x = torch.randn(4, 3)
    assert_close_enough(layer(x.clone()), F.leaky_relu(theirs(x)), row="layer")
    assert torch.equal(layer.running_mean, theirs.running_mean)


def test_bad_residual_leaves_the_statistics_alone():
    layer = SyncBatchNorm(3)
    for residual in (torch.randn(4, 2), torch.randn(4, 3, device="meta")):
        with pytest.raises(
            ValueError, match=r"residual is \(4, .\), torch.float32, on .*; \(4, 3\), torch.float32, on cpu"
        ):
            layer(torch.randn(4, 3), residual)
    assert layer.num_batches_tracked == 0 and layer.running_mean.tolist() == [0.0] * 3


@pytest.mark.parametrize("tensor", TENSORS)
@every_layer
def test_a_parameter_or_buffer_elsewhere_is_refused(make_layer, tensor):
    """FSDP frees parameters; load_state_dict(assign=True) of an old file leaves the count of a meta model."""
    for left in (None, 0, 1):
        layer, x = make_layer(3), torch.randn(4, 3)
        if left is None:
            of_module = layer._parameters if tensor in layer._parameters else layer._buffers
            of_module[tensor] = of_module[tensor].detach().to("meta")
            raises = pytest.raises(
                ValueError, match=f"the input is on cpu and {tensor} on meta; one device expected"
            )
        else:
            getattr(layer, tensor).untyped_storage().resize_(left)
            message = rf"{tensor} has shape .*freed or shrunk to {left} bytes"
            raises = pytest.raises(RuntimeError, match=message)
        kept = x.clone()
        with raises:
            layer(x)
        assert torch.equal(x, kept)
        if tensor == "num_batches_tracked":
            assert layer.running_mean.tolist() == [0.0] * 3
            layer.eval()(x)  # which does not count


@every_layer
def test_meta_and_fake_tensors_train(make_layer):
    fake = FakeTensorMode()
    for device, mode in (("meta", contextlib.nullcontext()), ("cpu", fake)):
        with mode, torch.device(device):
            layer, leaf = make_layer(3), torch.randn(4, 3, requires_grad=True)
            layer(leaf * 1).sum().backward()
        assert leaf.grad.shape == (4, 3) and layer.weight.grad.shape == (3,)


@every_layer
def test_without_bias(make_layer):
    options = {} if make_layer is SyncBatchNorm else {"activation": "identity"}
    layer, theirs = make_layer(3, bias=False, **options), nn.BatchNorm1d(3)
    assert layer.bias is None and "bias=False" in repr(layer)
    assert list(layer.state_dict()) == [name for name in theirs.state_dict() if name != "bias"]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
        theirs.weight.copy_(layer.weight)
    case = LayerInputs("nc", torch.float32)
    x, dy = case.x[:, :3], case.dy[:, :3]
    for got, want in zip(run_layer_step(layer, x, dy), run_layer_step(theirs, x, dy)[:3], strict=True):
        assert_close_enough(got, want, row="layer")
    copy.deepcopy(layer).load_state_dict(layer.state_dict())
    layer.reset_parameters()
    assert layer.weight.tolist() == [1.0] * 3 and layer.bias is None
    reverted = fastvit.revert_syncbn_model(SyncBatchNorm(3, bias=False))
    reverted.reset_parameters()
    assert type(reverted) is not SyncBatchNorm and reverted.bias is None and "bias=False" in repr(reverted)
    plain = make_layer(3, affine=False)
    assert plain.weight is None and plain.bias is None


def test_double_backward_is_refused():
    x = torch.randn(4, 3, requires_grad=True)
    for layer in (InPlaceABN(3), SyncBatchNorm(3), BatchNormAct(3), fastvit.LayerNorm(3), functional.act):
        for power in (1, 3):  # 1: the gradient of the layer's result has no graph
            (grad,) = torch.autograd.grad(layer(x.clone()).pow(power).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="Backward: fastvit's layers are differentiable once"):
                (grad.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("make", [InPlaceABN, SyncBatchNorm, BatchNormAct, fastvit.LayerNorm])
def test_a_graph_of_the_backward_that_nothing_differentiates(make):
    """Saved tensors are unpacked once, also by torch.utils.checkpoint; gradients can be written to."""
    layer, x = make(3), torch.randn(4, 3, requires_grad=True)
    run, leaves, unpacked = lambda x: layer(x.clone()), (x, *layer.parameters()), []
    want = torch.autograd.grad(run(x).sin().sum(), leaves)
    count = lambda t: unpacked.append(t) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, count):
        y = run(x)
    torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    plain = len(unpacked)
    torch.autograd.grad(y.sum(), leaves, create_graph=True)
    assert len(unpacked) == 2 * plain
    for forward in (run, lambda x: checkpoint(run, x, use_reentrant=False)):
        got = torch.autograd.grad(forward(x).sin().sum(), leaves, create_graph=True)
        assert all(map(torch.equal, got, want))
        for gradient in got:
            gradient.mul_(2)


def test_tensors_of_transforms():
    """torch.func refuses a layer without rules for it, and a tensor that has outlived one is unwrapped."""
    layer, outlived = SyncBatchNorm(3), []

    def loss(x):
        outlived.append(x * 2)
        return outlived[0].sum()

    x = torch.randn(4, 3)
    torch.func.grad(loss)(x)
    got = layer(outlived[0])
    assert torch.equal(got, layer(x * 2)) and got.grad_fn.next_functions[0][0] is None
    with pytest.raises(
        RuntimeError, match="BatchNormFunction: fastvit's layers have no rules for torch.func"
    ):
        torch.func.grad(lambda x: layer(x * 2).sum())(x)


def test_parameters_and_buffers_that_are_no_longer_registered():
    """A parametrized weight is computed, and a tensor may have been put in the place of a buffer."""
    layer, x = SyncBatchNorm(3), torch.randn(4, 3)
    weight, mean = layer.weight.detach().clone(), torch.ones(3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    del layer.running_mean
    layer.running_mean = mean
    want = functional.sync_batch_norm(x, nn.functional.softplus(weight), layer.bias, None, None)
    assert torch.equal(layer(x), want)
    torch.testing.assert_close(mean, 0.9 + 0.1 * x.mean(0))


@pytest.mark.parametrize("ours", [InPlaceABN, BatchNormAct, "fuse"])
def test_update_bn_and_what_finds_batch_norms_by_type(ours):
    def made(layer):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.LeakyReLU())

    theirs, batches = made(nn.BatchNorm2d(4)), torch.randn(3, 5, 3, 6, 6)
    if ours == "fuse":
        model = fastvit.fuse(made(nn.BatchNorm2d(4)))
    else:
        model = made(ours(4, activation="leaky_relu"))[:2]
    assert isinstance(model[1], nn.modules.batchnorm._BatchNorm)
    for each in (theirs, model):
        torch.optim.swa_utils.update_bn(batches, each)
    assert model[1].num_batches_tracked == 3 and model[1].momentum == 0.1
    torch.testing.assert_close(model[1].state_dict(), theirs[1].state_dict())


@pytest.mark.parametrize(
    ("made", "lost"),
    [
        (lambda: InPlaceABN(3), "activation='leaky_relu' of InPlaceABN"),
        (
            lambda: InPlaceABNSync(3, activation="identity", abs_weight=True),
            "abs_weight=True of InPlaceABNSync",
        ),
        (lambda: BatchNormAct(3, activation="silu"), "activation='silu' of BatchNormAct"),
        (lambda: SyncBatchNorm(3, channel_last=True), "channel_last=True of SyncBatchNorm"),
        (lambda: SyncBatchNorm(3, fuse_relu=True), "fuse_relu=True of SyncBatchNorm"),
        (
            lambda: fastvit.fuse(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())),
            "activation='relu' of BatchNormAct",
        ),
        (lambda: InPlaceABN(3, activation="identity"), None),
        (lambda: fastvit.fuse(nn.BatchNorm1d(3)), None),
        (lambda: SyncBatchNorm(3), None),
    ],
)
@pytest.mark.parametrize("whose", ["torch", "timm"])
def test_converters_of_others_drop_nothing(whose, made, lost):
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if whose == "timm":
        convert = import_or_skip("timm.layers").convert_sync_batchnorm
    model = nn.Sequential(nn.Linear(3, 3), made())
    if lost:
        with pytest.raises(
            TypeError, match=f"torch's SyncBatchNorm lacks {lost}; call fastvit.convert_syncbn"
        ):
            convert(model)
    else:
        assert type(convert(model)[1]) is nn.SyncBatchNorm
    assert list(InPlaceABN(3).children()) == []


@pytest.mark.parametrize(
    "made",
    [
        lambda: InPlaceABN(4, activation="identity"),
        lambda: BatchNormAct(4, activation="identity"),
        lambda: SyncBatchNorm(4),
        lambda: fastvit.LayerNorm((2, 3)),
    ],
)
def test_parameters_with_gaps(made):
    layer, (x, dy) = made(), torch.randn(2, 5, 4, 2, 3)
    if not isinstance(layer, nn.LayerNorm):
        x, dy = x[..., 0], dy[..., 0]
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    want = run_layer_step(layer, x, dy)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.stack([parameter.detach()] * 3, -1)[..., 1]))
    assert not layer.weight.is_contiguous() and all(map(torch.equal, run_layer_step(layer, x, dy), want))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "made",
    [
        lambda **options: InPlaceABN(4, activation="identity", **options),
        lambda **options: BatchNormAct(4, activation="identity", **options),
        lambda **options: SyncBatchNorm(4, **options),
        lambda **options: fastvit.convert_syncbn_model(nn.BatchNorm2d(4, **options)),
        lambda **options: fastvit.fuse(nn.BatchNorm2d(4, **options)),
    ],
)
def test_running_statistics_with_gaps(made, momentum):
    """They are updated where they are, and used in evaluation, as nn.BatchNorm2d does it."""
    layer, plain = made(momentum=momentum), nn.BatchNorm2d(4, momentum=momentum)
    for norm in (layer, plain):
        for name in ("running_mean", "running_var"):
            norm.matrix = torch.ones(4, 3)
            setattr(norm, name, norm.matrix[:, 1])
    for mode in (True, True, False):
        x, layers = torch.randn(2, 4, 3, 3), (layer.train(mode), plain.train(mode))
        got, want = (norm(x.clone()) for norm in layers)
        torch.testing.assert_close(got, want)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(layer, name), getattr(plain, name))
    assert layer.matrix[:, ::2].eq(1).all() and not layer.matrix[:, 1].eq(1).any()
    assert not layer.running_var.is_contiguous()


@pytest.mark.parametrize("call", [functional.inplace_abn, functional.batch_norm_act])
@pytest.mark.parametrize("wrong", ["running_mean", "running_var"])
def test_running_statistics_of_one_number_for_all_channels(call, wrong):
    """They can be used, and not updated."""
    x, n = torch.randn(2, 3, 5), torch.tensor(0)
    one = {"running_mean": torch.zeros(1).expand(3), "running_var": torch.ones(1).expand(3)}
    whole = {name: t.clone() for name, t in one.items()}
    evaluated = functools.partial(call, weight=None, bias=None, training=False)
    assert torch.equal(evaluated(x.clone(), **one), evaluated(x.clone(), **whole))
    given = x.clone()
    with pytest.raises(RuntimeError, match=rf"{call.__name__}: {wrong} is expanded \(stride 0\)"):
        call(given, None, None, **(whole | {wrong: one[wrong]}), num_batches_tracked=n)
    assert torch.equal(given, x) and n == 0 and whole["running_mean"].eq(0).all()
    with pytest.raises(ValueError, match=f"{wrong} has shape \\(5,\\)"):
        call(given, None, None, **(whole | {wrong: torch.ones(1).expand(5)}))


def test_arrays_and_numbers_for_tensors_raise_type_error():
    message = "a tensor expected, got an object of type ndarray; torch.from_numpy makes one"
    for layer in (InPlaceABN(3), BatchNormAct(3), SyncBatchNorm(3), fastvit.LayerNorm(3)):
        with pytest.raises(TypeError, match=message):
            layer(np.zeros((2, 3)))
    x = torch.randn(2, 3)
    for call, named in [
        (lambda: BatchNormAct(3)(x, 1.0), "batch_norm_act: residual: a tensor expected, got an"),
        (lambda: functional.batch_norm_act(x, 1.0, *[None] * 3), "batch_norm_act: weight: a tensor"),
        (lambda: functional.sync_batch_norm(x, *[None] * 3, 1), "sync_batch_norm: running_var: a tensor"),
        (
            lambda: functional.batch_norm_act(x, x[0, ::2], None, 1, None),
            "batch_norm_act: running_mean: a tensor",
        ),
        (
            lambda: functional.inplace_abn(x, 1.0, *[None] * 3, abs_weight=True),
            "inplace_abn: weight: a tensor",
        ),
        (
            lambda: functional.batch_norm_act(x, *[None] * 4, momentum=None, num_batches_tracked=1),
            "batch_norm_act: num_batches_tracked: a tensor",
        ),
        (lambda: functional.act(1.0), "act: a tensor expected"),
        (lambda: functional.gated_act(x, 1.0), "gated_act: gate: a tensor expected"),
    ]:
        with pytest.raises(TypeError, match=named):
            call()
    with pytest.raises(RuntimeError, match="layer_norm_forward.* argument 'weight'"):
        functional.layer_norm(x, (3,), 1.0)
    for make in (SyncBatchNorm, BatchNormActSync):
        with pytest.raises(
            TypeError, match=r"process_group is \[0, 1\]; a group expected, as torch.distributed.new"
        ):
            make(3, process_group=[0, 1])
    with pytest.raises(TypeError, match="InPlaceABNSync: process_group is 2; a group expected"):
        InPlaceABNSync(3, process_group=2)
    assert InPlaceABN(np.int64(3))(torch.randn(2, 3)).shape == (2, 3)
