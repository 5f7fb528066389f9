"""fastvit.fuse: which layers become fastvit's, what stays, what they give, and the way back."""

import copy
import pickle
import warnings

import pytest
import torch
from on_ranks import on_ranks
from ops.inputs import OtherActivation, TimmBatchNorm, describe_model
from ops.tolerances import assert_close_enough
from packages import import_or_skip
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fastvit
from fastvit import BatchNormAct, BatchNormActSync
from fastvit.fusion import FusedActivationPlaceholder, TanhGELU, TorchDtypeLayerNorm, unfuse

ACTIVATIONS = {
    "identity": nn.Identity(), "relu": nn.ReLU(inplace=True), "relu6": nn.ReLU6(),
    "leaky_relu": nn.LeakyReLU(0.2), "elu": nn.ELU(0.7, inplace=True), "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU(inplace=True), "hardswish": nn.Hardswish(),
}  # fmt: skip
X = torch.randn(4, 3, 6, 6, dtype=torch.float64)


class OwnInit(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(8)


class OwnSequential(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)


class SequentialWithMethod(nn.Sequential):
    def normalize(self, x):
        return self[0](x)


class AlwaysEval(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class EveryLayer(nn.Module):
    """Has every kind of layer, with options, in float64 so that roundings are small."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(inplace=True))
        self.alone = nn.BatchNorm2d(8, momentum=None)
        self.timm = TimmBatchNorm(8, eps=1e-3)
        self.other = TimmBatchNorm(8, act=OtherActivation())
        self.inner = OwnSequential(
            nn.Conv2d(8, 8, 1), OwnInit(), nn.Hardswish(), nn.BatchNorm2d(8, affine=False), nn.ReLU()
        )
        norm = nn.BatchNorm1d(8)
        norm.register_parameter("bias", None)  # BatchNorm of torch 2.11 takes no argument for it
        self.flat = nn.Sequential(nn.Flatten(2), norm, nn.ELU(0.5), nn.LayerNorm(16, bias=False))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU("tanh"), nn.LayerNorm((8, 16), eps=1e-3))
        self.double()

    def forward(self, x):
        x = F.relu_(self.alone(self.stem(x)))
        x = x + self.other(self.timm(x))
        return self.head(self.flat(self.inner(x)))


FUSED = {"alone": "identity", "flat.1": "elu", "inner.1": "hardswish", "inner.3": "relu", "stem.1": "relu"}
FUSED["timm"] = "silu"


def run_step(model, x):
    """Returns the output, the gradients and the buffers of a step in a recompute scope."""
    for parameter in model.parameters():
        parameter.grad = None
    with fastvit.recompute_scope():
        y = model(x)
    if y.requires_grad:
        y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *grads, *(b.detach().clone() for b in model.buffers())]


def assert_same_step(model, plain, x):
    for actual, expected in zip(run_step(model, x), run_step(plain, x), strict=True):
        assert actual.dtype == expected.dtype
        actual, expected = (t.double() if t.dtype == torch.int64 else t for t in (actual, expected))
        # A gradient of a bias before BatchNorm is a sum that cancels.
        assert_close_enough(actual, expected, row="layer", least_scale=1)


@pytest.mark.parametrize("mode", ["training", "evaluation", "frozen", "no_grad", "channels_last"])
def test_fused_models_give_torchs_results(mode):
    plain = EveryLayer()
    model = fastvit.fuse(copy.deepcopy(plain))
    assert {n: m.activation for n, m in model.named_modules() if isinstance(m, BatchNormAct)} == FUSED
    assert [type(model.get_submodule(n)) for n in ("flat.3", "head.2")] == [TorchDtypeLayerNorm] * 2
    assert type(model.head[1]) is TanhGELU and type(model.other) is TimmBatchNorm
    memory_format = torch.channels_last if mode == "channels_last" else torch.preserve_format
    for one in (plain, model):
        if mode in ("evaluation", "frozen"):
            one(X)
            one.eval().requires_grad_(mode == "evaluation")
        one.to(memory_format=memory_format)
    with torch.set_grad_enabled(mode != "no_grad"):
        assert_same_step(model, plain, X.to(memory_format=memory_format))


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_fused_models_round_no_worse_than_torch(autocast):
    """Results have torch's dtypes under autocast, so that residuals keep their precision."""
    exact, dtype = EveryLayer(), torch.float32 if autocast else torch.bfloat16
    plain = copy.deepcopy(exact).to(dtype)
    model = fastvit.fuse(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, plain_y = (one(X.to(dtype)) for one in (model, plain))
        for inside in (y.dtype, torch.bfloat16):
            hidden = torch.ones(8, 16, dtype=inside)
            assert model.head[2](hidden).dtype == plain.head[2](hidden).dtype
    # The output is normalized: its deviation is 1.
    error, torch_error = ((one.double() - exact(X)).std() for one in (y, plain_y))
    assert y.dtype == plain_y.dtype and error < 2 * torch_error


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_fused_models_compile_as_one_graph(training):
    plain = EveryLayer().train(training)
    plain.alone.momentum = 0.1  # torch reads the factor of a cumulative average on the host
    model = fastvit.fuse(copy.deepcopy(plain))
    assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), plain, X)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_fused_and_unfused(name):
    act = ACTIVATIONS[name]
    model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), act, nn.Linear(5, 2)).double()
    plain, x = copy.deepcopy(model), torch.randn(7, 5, dtype=torch.float64)
    assert fastvit.fuse(model) is model and model[0].activation == name
    assert type(model[1]) is (nn.Identity if name == "identity" else FusedActivationPlaceholder)
    assert_same_step(model, plain, x)
    assert unfuse(model)[1] is act and type(model[0]) is nn.BatchNorm1d


def test_fuse_keeps_the_state_and_unfuse_gives_the_model_back():
    plain, model = EveryLayer(), EveryLayer()
    model.alone.weight.requires_grad_(False)
    model.inner[1].eval()
    before, optimizer = describe_model(model), torch.optim.SGD(model.parameters(), 0.1)
    fastvit.fuse(fastvit.fuse(model))
    assert describe_model(model)[2:4] == before[2:4] and not model.inner[1].training
    plain.load_state_dict(model.state_dict()), model.load_state_dict(plain.state_dict())
    plain.alone.weight.requires_grad_(False)
    plain.inner[1].eval()
    assert_same_step(model, plain, X)
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert_same_step(copied, plain, X)
        plain.load_state_dict(model.state_dict())
    model.eval()
    assert not unfuse(model).stem[3].training
    model.train().inner[1].eval()
    assert describe_model(unfuse(model)) == before


def test_a_pickled_fused_model_can_be_unfused():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.LayerNorm(4), nn.GELU("tanh"))
    x, text = torch.randn(2, 3, 4, 4), str(model)
    loaded = pickle.loads(pickle.dumps(fastvit.fuse(model)))
    assert torch.equal(loaded(x), model(x)) and str(unfuse(loaded)) == text
    with torch.device("meta"):
        model = fastvit.fuse(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.LayerNorm(4)))
        assert model(torch.empty(2, 3, 4, 4)).is_meta


def test_layers_whose_results_would_change_are_not_fused():
    hooked, own = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    hooked.register_forward_hook(lambda *_: None)
    own.forward = own.forward
    lazy, frozen = nn.LazyBatchNorm2d(), AlwaysEval(8)
    normed = parametrizations.weight_norm(nn.LayerNorm(8))
    dropping = TimmBatchNorm(8, drop=nn.Dropout())
    scripted = torch.jit.script(nn.BatchNorm2d(8))
    instance, group = nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)
    layers = [hooked, own, lazy, frozen, normed, dropping, scripted, instance, group, BatchNormAct(8)]
    model = nn.ModuleList(layers)
    types = [type(m) for m in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [type(m) for m in fastvit.fuse(model).modules()] == types


def test_activations_between_which_others_read_are_not_fused():
    """Others read BatchNorm's own output, or BatchNorm is followed by other layers too."""
    shared, act, watched = nn.BatchNorm2d(4), nn.ReLU(), nn.ReLU()
    watched.register_forward_pre_hook(lambda *_: None)
    hooked = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    hooked.register_forward_hook(lambda *_: None)
    parts = [
        nn.Sequential(shared, act),
        nn.Sequential(shared, nn.SiLU()),
        nn.Sequential(nn.BatchNorm2d(4), watched),
        nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(4), OtherActivation()),
        nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(float("nan"))),
        SequentialWithMethod(nn.BatchNorm2d(4), nn.ReLU()),
        hooked,
        nn.ModuleList([nn.BatchNorm2d(4), nn.ReLU()]),
    ]
    twice = nn.Sequential(nn.BatchNorm2d(4), act, nn.BatchNorm2d(4), act)  # a shared activation is no matter
    model = fastvit.fuse(nn.ModuleList([*parts, twice]))
    assert [part[0].activation for part in parts] == ["identity"] * len(parts)
    assert parts[0][1] is act and [m.activation for m in twice[::2]] == ["relu"] * 2
    unfuse(model)
    assert twice[1] is twice[3] is act


def describe_layers(model):
    """Returns the types of a model's layers and those of their attributes that converters set."""
    names = ("activation", "process_group", "channel_last", "fuse_relu")
    return [(type(m), *(str(m.__dict__.get(name, "none")) for name in names)) for m in model]


@pytest.mark.parametrize(
    "kind",
    [
        nn.BatchNorm2d,
        TimmBatchNorm,
        pytest.param(nn.SyncBatchNorm, id="torchs_SyncBatchNorm"),
        pytest.param(fastvit.SyncBatchNorm, id="SyncBatchNorm"),
    ],
)
def test_fused_and_synchronised_in_any_order_either_is_undone_alone(kind):
    def make_model():
        return nn.Sequential(kind(3), nn.SiLU(), kind(3), nn.Linear(2, 2))

    for options in ({}, {"process_group": "a group", "channel_last": True}):
        plain, fused = make_model(), fastvit.fuse(make_model())
        synchronised = fastvit.convert_syncbn_model(make_model(), **options)
        states = [describe_layers(model) for model in (plain, fused, synchronised)]
        both, fused = fastvit.fuse(synchronised), fastvit.convert_syncbn_model(fused, **options)
        assert describe_layers(both) == describe_layers(fused) and type(both[0]) is BatchNormActSync
        for model in (both, fused, copy.deepcopy(both)):
            assert describe_layers(unfuse(model)) == states[2]
            fastvit.fuse(model)
            if kind in (nn.BatchNorm2d, TimmBatchNorm):  # the others are synchronised by themselves
                assert describe_layers(fastvit.revert_syncbn_model(model)) == states[1]
                assert describe_layers(unfuse(model)) == states[0]


@on_ranks(2)
def test_fused_models_train_over_ranks(rank, world):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(2 * world, 3, 6, 6, dtype=torch.float64)
    plain, local_x = copy.deepcopy(model), x[2 * rank : 2 * rank + 2]
    with fastvit.recompute_scope():
        y = fastvit.fuse(fastvit.convert_syncbn_model(model))(local_x)
    y.square().sum().backward()
    assert_close_enough(y, plain(x)[2 * rank : 2 * rank + 2], row="layer")
    plain(x).square().sum().backward()
    torch.distributed.all_reduce(model[0].weight.grad)
    assert_close_enough(model[0].weight.grad, plain[0].weight.grad, row="layer")


@pytest.mark.packages("timm")
def test_a_fused_model_of_timm_gives_its_results():
    timm = import_or_skip("timm")
    model = timm.create_model("mobilenetv3_small_050", num_classes=5).double().eval()
    plain, images = copy.deepcopy(model), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    kinds = {type(m).__name__ for m in fastvit.fuse(model).modules()}
    assert "BatchNormAct" in kinds and "BatchNormAct2d" not in kinds
    assert_same_step(model, plain, images)
