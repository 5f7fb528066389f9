"""InPlaceABN and SyncBatchNorm on one process, against torch's BatchNorm and activation."""

import contextlib
import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from cases import CORE_LAYOUTS, DTYPES, INVERTIBLE, LAYOUTS, PARAM, Case, restride
from packages import package
from tolerances import check, error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fastvit
from fastvit import InPlaceABN, InPlaceABNSync, SyncBatchNorm, functional

LAYERS = [InPlaceABN, InPlaceABNSync, SyncBatchNorm, fastvit.BatchNormAct, fastvit.BatchNormActSync]
TORCH_NORM = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def activate(x, name, param=PARAM):
    if name == "leaky_relu":
        return F.leaky_relu(x, param)
    if name == "elu":
        return F.elu(x, param)
    return x.relu() if name == "relu" else x


class TorchLayer(nn.Module):
    """BatchNorm + residual + activation from torch, with the channels in any dimension."""

    def __init__(self, channels, dims, activation, channel_dim=1, **options):
        super().__init__()
        self.norm = TORCH_NORM[dims](channels, **options)
        self.activation, self.channel_dim = activation, channel_dim

    def forward(self, x, z=None):
        y = self.norm(x.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)
        return activate(y if z is None else y + z, self.activation)


def make(kind, case, activation, **options):
    """fastvit's layer, and torch's with the same parameters (in float64, which is also exact for half)."""
    channel_last = case.channel_dim == case.x.dim() - 1 and case.x.dim() > 2
    dtype = case.weight.dtype
    common = dict(channel_last=channel_last, dtype=dtype, device=case.x.device, **options)
    if kind == "abn":
        ours = InPlaceABN(case.channels, activation=activation, activation_param=PARAM, **common)
    else:
        ours = SyncBatchNorm(case.channels, fuse_relu=activation == "relu", **common)
    theirs = TorchLayer(case.channels, case.x.dim(), activation, case.channel_dim, **options)
    theirs = theirs.to(case.x.device).double()
    if ours.affine:
        with torch.no_grad():
            for layer in (ours, theirs.norm):
                layer.weight.copy_(case.weight)
                layer.bias.copy_(case.bias)
    return ours, theirs


def step(layer, x, dy, *z):
    """Output and gradients of one step, on a new input that is no leaf."""
    leaf = x.detach().clone().requires_grad_()
    residual = [t.detach().clone().requires_grad_() for t in z]
    layer.zero_grad()
    y = layer(restride(leaf, x), *(restride(r, t) for r, t in zip(residual, z, strict=True)))
    y.backward(dy)
    return [y, leaf.grad, *(t.grad for t in residual), *(p.grad for p in layer.parameters())]


def compare(kind, ours, theirs, case, *z):
    got = step(ours, case.x, case.dy, *z)
    want = step(theirs, case.x.double(), case.dy.double(), *(t.double() for t in z))
    row = "in_place_layer" if kind == "abn" else "layer"
    # A parameter's gradient sums one term per value, of either sign.
    summed = case.dy.double().norm().item() / case.channels**0.5
    for a, b in zip(got, want, strict=True):
        check(row, a, b, case.x.dtype, least_scale=summed if a.dim() == 1 else 1e-30)
    assert got[0].dtype == got[1].dtype == case.x.dtype


@pytest.mark.parametrize(
    "layout,mode",
    [(layout, "train") for layout in LAYOUTS]
    + [(layout, mode) for layout in CORE_LAYOUTS for mode in ("eval", "no_stats")],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind,activation", [("abn", a) for a in INVERTIBLE] + [("sbn", "identity"), ("sbn", "relu")]
)
def test_like_torch(kind, activation, layout, dtype, mode, device):
    case = Case(layout, dtype, device)
    ours, theirs = make(kind, case, activation, track_running_stats=mode != "no_stats")
    if mode == "eval":
        for layer in (ours, theirs.norm):
            layer.running_mean.copy_(case.running_mean)
            layer.running_var.copy_(case.running_var)
        ours.eval(), theirs.eval()
    residual = [case.z] if activation == "relu" and dtype != torch.float16 else []
    compare(kind, ours, theirs, case, *residual)
    if mode == "train":
        assert ours.num_batches_tracked == 1
        check("running", ours.running_mean, theirs.norm.running_mean, torch.float32)
        check("running", ours.running_var, theirs.norm.running_var, torch.float32)


@pytest.mark.parametrize("kind", ["abn", "sbn"])
@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.7}])
def test_options_like_torch(kind, options, device):
    case = Case("nchw", torch.float32, device)
    ours, theirs = make(kind, case, "identity", **options)
    for _ in range(3):
        compare(kind, ours, theirs, case)
    check("running", ours.running_mean, theirs.norm.running_mean, torch.float32)
    check("running", ours.running_var, theirs.norm.running_var, torch.float32)
    assert ours.num_batches_tracked == 3


@pytest.mark.parametrize("kind", ["abn", "sbn"])
def test_frozen_parameters(kind, device):
    """Only tensors that require grad get one, and freezing does not affect the others."""
    case = Case("nchw", torch.float32, device)
    ours, theirs = make(kind, case, "identity")
    for frozen in (["weight"], ["bias"], ["weight", "bias"]):
        for layer in (ours, theirs.norm):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name not in frozen)
        got, want = step(ours, case.x, case.dy), step(theirs, case.x.double(), case.dy.double())
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                check("in_place_layer", a, b)
    x = case.x.clone()  # an input without grad
    for parameter in ours.parameters():
        parameter.requires_grad_(True)
    ours.zero_grad()
    ours(x).backward(case.dy)
    assert error(ours.bias.grad, case.dy.double().sum((0, 2, 3))) < 1e-5


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradcheck_in_place(layout, activation, training, device):
    case = Case(layout, torch.float64, device)

    def call(x, weight, bias):
        running = case.running_mean.clone(), case.running_var.clone()
        options = {"activation": activation, "activation_param": PARAM}
        options["channel_last"] = case.channel_dim != 1
        return functional.inplace_abn(restride(x, case.x), weight, bias, *running, training, **options)

    inputs = [t.detach().clone().requires_grad_() for t in (case.x, case.weight, case.bias)]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_overwrites_its_input_always(device):
    layer = InPlaceABN(5).to(device)
    for training in (True, False):
        layer.train(training)
        for grad in (True, False):
            x = torch.randn(4, 5, 3, 3, device=device, requires_grad=grad)
            x = x.clone()
            version = x._version
            with torch.set_grad_enabled(grad):
                y = layer(x)
            assert y.data_ptr() == x.data_ptr() and y is x and x._version > version


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


def test_autocast(device):
    case = Case("nchw", torch.float32, device)
    conv = nn.Conv2d(5, 5, 3, padding=1).to(device)
    for layer in (InPlaceABN(5), SyncBatchNorm(5, fuse_relu=True)):
        layer.to(device)
        with torch.autocast(device, torch.bfloat16):
            y = layer(conv(case.x))
        assert y.dtype == torch.bfloat16 and layer.weight.dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32 and conv.weight.grad.isfinite().all()
    residual = torch.randn(6, 5, 7, 11, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer(conv(case.x), residual).dtype == torch.bfloat16


@pytest.mark.parametrize("make_layer", LAYERS)
def test_copies(make_layer):
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


@pytest.mark.parametrize("ours", LAYERS)
def test_state_dict_moves_both_ways(ours):
    theirs, layer = nn.BatchNorm2d(6), ours(6)
    nn.init.normal_(theirs.weight)
    theirs(torch.randn(3, 6, 2, 2))
    layer.load_state_dict(theirs.state_dict())
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer(torch.randn(3, 6, 2, 2))
    theirs.load_state_dict(layer.state_dict())
    assert torch.equal(theirs.running_var, layer.running_var) and theirs.num_batches_tracked == 2
    old = {k: v for k, v in theirs.state_dict().items() if k != "num_batches_tracked"}
    old["_metadata"] = None
    layer.load_state_dict({k: v for k, v in old.items() if v is not None})  # version 1 had no counter


def test_abs_weight_is_mapillarys_gamma():
    case = Case("nchw", torch.float64)
    layer = InPlaceABN(5, eps=1e-3, activation_param=PARAM, abs_weight=True).double()
    with torch.no_grad():
        layer.weight.copy_(case.weight)
        layer.bias.copy_(case.bias)
    weight = case.weight.clone().requires_grad_()
    leaf = case.x.clone().requires_grad_()
    want = F.leaky_relu(F.batch_norm(leaf, None, None, weight.abs() + 1e-3, case.bias, True, eps=1e-3), PARAM)
    want.backward(case.dy)
    got = step(layer, case.x, case.dy)
    for a, b in zip(got[:3], (want, leaf.grad, weight.grad), strict=True):
        check("in_place_layer", a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma_zero_is_floored_and_its_gradient_passes(dtype):
    """Zero-initialised gamma trains: y is bias, the parameter is not written, its gradient is right."""
    floor = {torch.float16: 1e-4, torch.float64: 1e-12}.get(dtype, 1e-7)
    case = Case("nchw", dtype)
    layer = InPlaceABN(5, activation="identity", dtype=case.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, -0.0, floor / 2, -floor / 2, 1.0]))
    kept = layer.weight.detach().clone()
    y, dx, dweight, dbias = step(layer, case.x, case.dy)
    assert torch.equal(layer.weight, kept) and y[:, :4].abs().max() <= 5 * floor
    xhat = F.batch_norm(case.x.double(), None, None, None, None, True)
    want = (xhat * case.dy.double()).sum((0, 2, 3))
    assert error(dweight, want) < {torch.float16: 2e-2, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    assert torch.equal(y[:, 0].sign().double(), xhat[:, 0].sign()), "0 counts as positive"
    assert torch.equal(y[:, 1].sign().double(), -xhat[:, 1].sign()), "-0 as negative"
    assert error(dbias, case.dy.double().sum((0, 2, 3))) < 1e-5


@pytest.mark.parametrize("activation", INVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_on_their_way_through_zero(dtype, activation, device):
    """y is rounded at the size of bias; gradients equal torch's for any weight, however small."""
    channels = 60
    layer = InPlaceABN(channels, activation=activation, activation_param=PARAM, device=device, dtype=dtype)
    theirs = TorchLayer(channels, 4, activation).to(device).double()
    with torch.no_grad():
        sizes = torch.logspace(-14, -2, channels - 1, dtype=torch.float64) * (-1) ** torch.arange(
            channels - 1
        )
        layer.weight.copy_(torch.cat([torch.zeros(1), sizes]))
        layer.bias.copy_(torch.tensor([0.1, -1.0, 3.0, -0.3]).repeat(channels // 4))
        theirs.norm.load_state_dict(layer.state_dict())
    x, dy = (torch.randn(8, channels, 13, 11, device=device, dtype=dtype) for _ in range(2))
    y, dx, dweight, dbias = step(layer, x, dy)
    want_y, want_dx, want_dweight, want_dbias = step(theirs, x.double(), dy.double())
    u = torch.finfo(dtype).eps / 2
    xhat = F.batch_norm(x.double(), None, None, None, None, True)
    scale = layer.bias.detach().double().abs().view(1, -1, 1, 1)
    assert (
        (y - want_y).abs() <= 2**7 * u * scale * xhat.abs() + 8 * u * (scale + 0.1) + 1e-7 * xhat.abs()
    ).all()
    for channel in range(channels):
        for got, want, most in ((dx[:, channel], want_dx[:, channel], 0.01), (dbias, want_dbias, 1e-4)):
            assert (got - want).norm() <= most * want.norm()
    assert error(dweight, want_dweight) < 0.01
    # in each channel no more than every xhat's own bound, 2^-7 and the slope's rounding, allows
    dz = dy.double() * torch.where(want_y > 0, 1.0, {"identity": 1.0}.get(activation, PARAM))
    assert ((dweight - want_dweight).abs() <= 3 * 2**-7 * dz.abs().sum((0, 2, 3))).all()


def test_unsafe_ratio_of_bias_and_weight_is_said_once():
    layer = InPlaceABN(4)
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.fill_(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 4))  # float32 has digits enough
    layer._forwards_to_check = 0
    with pytest.warns(
        UserWarning, match=r"InPlaceABN\(4\): \|bias\| / \|weight\| is up to 200, so in torch.bfloat16"
    ):
        layer(torch.randn(3, 4).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            layer(torch.randn(3, 4).bfloat16())


def test_accessors():
    layer = InPlaceABN(3, activation="elu", activation_param=0.5)
    assert layer.activation == "elu" and layer.activation_param == 0.5
    assert "activation=elu[0.5]" in repr(layer) and "channel_last" not in repr(layer)
    assert "fuse_relu=True" in repr(SyncBatchNorm(3, fuse_relu=True))
    assert set(fastvit.__all__) <= set(dir(fastvit))
    sync = InPlaceABNSync(3)
    sync.set_group(None)
    assert sync.group is None


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: InPlaceABN(3, activation="relu"), "activation is 'relu'; in place it must be invertible"),
        (
            lambda: InPlaceABN(3, activation="gelu"),
            "must be invertible: one of identity, leaky_relu, elu expected",
        ),
        (lambda: InPlaceABN(3, activation_param=0.0), "slope 0 is relu"),
        (lambda: InPlaceABN(3, activation_param=-0.1), "activation_param is -0.1; leaky_relu in place"),
        (
            lambda: functional.inplace_abn(torch.ones(4, 3), *[None] * 4, activation_param=-0.0),
            "activation_param is -0.0",
        ),
        (lambda: InPlaceABN(3, activation_param=float("nan")), "activation_param is nan"),
        (lambda: InPlaceABN(3, activation_param=float("inf")), "a finite float32, as must its reciprocal"),
        (lambda: InPlaceABN(3, activation_param=1e-39), "activation_param is 1e-39"),
        (lambda: InPlaceABN(3, activation_param="0.1"), "activation_param is '0.1'"),
        (lambda: InPlaceABN(3, activation="elu", activation_param=0), "is inverted, so it must be > 0"),
        (lambda: InPlaceABN(0), "InPlaceABN: num_features is 0; a positive int"),
        (lambda: SyncBatchNorm("3"), "SyncBatchNorm: num_features is '3'"),
        (lambda: InPlaceABN(3)(torch.randn(2, 4, 5)), r"weight has shape \(3,\), .* dimension 1, got 4"),
        (
            lambda: InPlaceABN(3, channel_last=True)(torch.randn(2, 3, 4)),
            r"weight has shape \(3,\), .* dimension 2, got 4",
        ),
        (lambda: SyncBatchNorm(3)(torch.randn(3)), "expected an input of 2 to 5 dimensions, got 1D"),
        (
            lambda: SyncBatchNorm(3)(torch.ones(2, 3).long()),
            "expected a floating-point input, got torch.int64",
        ),
        (lambda: SyncBatchNorm(3)(torch.ones(1, 3)), "Expected more than 1 value per channel"),
        (lambda: InPlaceABN(3)(torch.ones(1, 3, 1, 1)), "Expected more than 1 value per channel"),
    ],
)
def test_impossible_requests(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def inference_tensor():
    with torch.inference_mode():
        return torch.randn(4, 3)


@pytest.mark.parametrize(
    "make_input,message",
    [
        (lambda: torch.randn(4, 3, requires_grad=True), "is a leaf that requires grad"),
        (lambda: torch.randn(4, 6, requires_grad=True)[:, :3], "is a view of a leaf"),
        (lambda: torch.randn(4, 6, requires_grad=True).clone().chunk(2, 1)[0], "is one of several views"),
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
    check("in_place_layer", leaf.grad, want.grad, torch.float32, least_scale=1.0)


def test_without_bias_and_without_a_count():
    layer, theirs = InPlaceABN(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for norm in (layer, theirs):
        norm.bias = norm.num_batches_tracked = None
    x = torch.randn(4, 3)
    check("layer", layer(x.clone()), F.leaky_relu(theirs(x)))
    assert torch.equal(layer.running_mean, theirs.running_mean)


def test_bad_residual_leaves_the_statistics_alone():
    layer = SyncBatchNorm(3)
    for z in (torch.randn(4, 2), torch.randn(4, 3, device="meta")):
        with pytest.raises(
            ValueError, match=r"z is \(4, .\), torch.float32, on .*; \(4, 3\), torch.float32, on cpu"
        ):
            layer(torch.randn(4, 3), z)
    assert layer.num_batches_tracked == 0 and layer.running_mean.tolist() == [0.0] * 3


def test_meta_and_mixed_devices():
    for layer in (SyncBatchNorm(3, device="meta"), InPlaceABN(3, affine=False, device="meta")):
        assert layer(torch.randn(2, 3, device="meta")).is_meta
        with pytest.raises(
            ValueError, match="the input is on cpu and (weight|running_mean) on meta; one expected"
        ):
            layer(torch.randn(2, 3))


@pytest.mark.parametrize("make_layer", LAYERS)
def test_a_count_on_another_device_is_refused(make_layer):
    """The state after load_state_dict(assign=True), for a file without it and a model made on meta."""
    layer, x = make_layer(3), torch.randn(4, 3)
    layer.num_batches_tracked = torch.zeros((), dtype=torch.int64, device="meta")
    kept = x.clone()
    with pytest.raises(ValueError, match="the input is on cpu and num_batches_tracked on meta; one expected"):
        layer(x)
    assert torch.equal(x, kept) and layer.running_mean.tolist() == [0.0] * 3
    layer.eval()(x)  # which does not count


@pytest.mark.parametrize("make_layer", LAYERS)
def test_meta_and_fake_tensors_train(make_layer):
    fake = FakeTensorMode()
    for device, mode in (("meta", contextlib.nullcontext()), ("cpu", fake)):
        with mode, torch.device(device):
            layer, leaf = make_layer(3), torch.randn(4, 3, requires_grad=True)
            layer(leaf * 1).sum().backward()
        assert leaf.grad.shape == (4, 3) and layer.weight.grad.shape == (3,)


@pytest.mark.parametrize("tensor", ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"])
@pytest.mark.parametrize("make_layer", LAYERS)
def test_a_freed_parameter_or_buffer_is_refused(make_layer, tensor):
    """FSDP frees the storage of parameters that are not gathered."""
    for left in (0, 1):
        layer, x = make_layer(3), torch.randn(4, 3)
        getattr(layer, tensor).untyped_storage().resize_(left)
        kept = x.clone()
        with pytest.raises(RuntimeError, match=rf"{tensor} has shape .*freed or shrunk to {left} bytes"):
            layer(x)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("make_layer", LAYERS)
def test_without_bias(make_layer):
    layer, theirs = (
        make_layer(3, bias=False, activation="identity")
        if make_layer is not SyncBatchNorm
        else (SyncBatchNorm(3, bias=False)),
        nn.BatchNorm1d(3),
    )
    assert layer.bias is None and "bias=False" in repr(layer) and "bias=True" in repr(make_layer(3))
    assert list(layer.state_dict()) == [name for name in theirs.state_dict() if name != "bias"]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
        theirs.weight.copy_(layer.weight)
    case = Case("nc", torch.float32)
    x, dy = case.x[:, :3], case.dy[:, :3]
    for got, want in zip(step(layer, x, dy), step(theirs, x, dy)[:3], strict=True):
        check("layer", got, want)
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
    for layer in (InPlaceABN(3), SyncBatchNorm(3)):
        (grad,) = torch.autograd.grad(layer(x.clone()).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|differentiated twice"):
            grad.sum().backward()


@pytest.mark.parametrize("make_layer", [lambda: InPlaceABN(4), lambda: SyncBatchNorm(4)])
def test_checkpointing(make_layer):
    from torch.utils.checkpoint import checkpoint

    conv, layer = nn.Conv2d(3, 4, 3), make_layer()
    x = torch.randn(2, 3, 8, 8)

    def block(x):
        return layer(conv(x))

    wanted = None
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        layer.zero_grad(), conv.zero_grad()
        run(x).square().sum().backward()
        got = [p.grad.clone() for p in (*conv.parameters(), *layer.parameters())]
        for a, b in zip(got, wanted or got, strict=True):
            check("layer", a, b)
        wanted = got


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
    with pytest.raises(RuntimeError, match="setup_context"):
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


# What others do to every BatchNorm


@pytest.mark.parametrize("ours", [InPlaceABN, fastvit.BatchNormAct, "fuse"])
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
        (lambda: fastvit.BatchNormAct(3, activation="silu"), "activation='silu' of BatchNormAct"),
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
        convert = package("timm.layers").convert_sync_batchnorm
    model = nn.Sequential(nn.Linear(3, 3), made())
    if lost:
        with pytest.raises(
            TypeError, match=f"SyncBatchNorm of torch lacks {lost}; call fastvit.convert_syncbn"
        ):
            convert(model)
    else:
        assert type(convert(model)[1]) is nn.SyncBatchNorm
    assert list(InPlaceABN(3).children()) == []


@pytest.mark.parametrize(
    "made",
    [
        lambda: InPlaceABN(4, activation="identity"),
        lambda: fastvit.BatchNormAct(4, activation="identity"),
        lambda: SyncBatchNorm(4),
        lambda: fastvit.fuse(nn.BatchNorm1d(4)),
        lambda: fastvit.LayerNorm((2, 3)),
        lambda: fastvit.fuse(nn.LayerNorm(3)),
    ],
)
def test_parameters_with_gaps(made):
    layer = made().double()
    plain = nn.LayerNorm(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else nn.BatchNorm1d(4)
    x = torch.randn(5, 4, 2, 3, dtype=torch.float64)
    x = x[..., 0, :] if isinstance(plain, nn.BatchNorm1d) else x
    shape = layer.weight.shape
    for module in (plain.double(), layer):
        torch.manual_seed(1)
        module.weight = nn.Parameter(torch.randn(*shape, 3, dtype=torch.float64)[..., 1])
        module.bias = nn.Parameter(torch.randn(*shape, 3, dtype=torch.float64)[..., 1])
    y, expected = layer(x.clone()), plain(x)
    torch.testing.assert_close(y, expected)
    for got, wanted in zip(grads_of(layer, y), grads_of(plain, expected), strict=True):
        torch.testing.assert_close(got, wanted)


def grads_of(layer, y):
    return torch.autograd.grad(y.square().sum(), (layer.weight, layer.bias))


def test_num_features_of_numpy():
    assert InPlaceABN(np.int64(3))(torch.randn(2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match="SyncBatchNorm: num_features is True; a positive int expected"):
        SyncBatchNorm(True)


def test_arguments_of_another_kind():
    message = "a tensor expected, got an object of type ndarray; torch.from_numpy makes one"
    for layer in (InPlaceABN(3), fastvit.BatchNormAct(3), SyncBatchNorm(3), fastvit.LayerNorm(3)):
        with pytest.raises(TypeError, match=message):
            layer(np.zeros((2, 3)))
    for make in (SyncBatchNorm, fastvit.BatchNormActSync):
        with pytest.raises(
            TypeError, match=r"process_group is \[0, 1\]; a group expected, as torch.distributed.new"
        ):
            make(3, process_group=[0, 1])
    with pytest.raises(TypeError, match="InPlaceABNSync: group is 2; a group expected"):
        InPlaceABNSync(3, group=2)
