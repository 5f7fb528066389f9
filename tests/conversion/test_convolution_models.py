"""Converted models with convolutions and norms have eager's bits and buffers, and keep less."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.cases import select_each_pair
from conversion.conv_models import C, ConvStage, make_conv, make_conv_images
from conversion.models import FunctionModel, make_autocast
from conversion.vit_models import compare_and_measure_kept
from fastvit.recompute.packed_tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("default_device")


def make_norm_in_evaluation(is_trained):
    """Returns a BatchNorm that stays in evaluation when its model trains."""
    norm = nn.BatchNorm2d(C).eval()
    norm.train = lambda mode=True: norm
    norm.running_var.uniform_(0.5, 2)
    return norm.requires_grad_(is_trained)


NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(C),
    "cumulative": lambda: nn.BatchNorm2d(C, momentum=None),
    "without statistics": lambda: nn.BatchNorm2d(C, track_running_stats=False),
    "without affine": lambda: nn.BatchNorm2d(C, affine=False),
    "another eps": lambda: nn.BatchNorm2d(C, eps=0.1),
    "evaluation": lambda: make_norm_in_evaluation(True),
    "frozen": lambda: make_norm_in_evaluation(False),
    "without gradient": lambda: nn.BatchNorm2d(C).requires_grad_(False),
    "group norm": lambda: nn.GroupNorm(2, C, eps=1e-2),
    "group norm without gradient": lambda: nn.GroupNorm(2, C).requires_grad_(False),
    "group norm without affine": lambda: nn.GroupNorm(2, C, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(C, affine=True),
    "instance norm without affine": lambda: nn.InstanceNorm2d(C),
    "layer norm, functional": lambda: FunctionModel(lambda m, x: F.layer_norm(x, x.shape[-1:])),
    "layer norm, a literal eps": lambda: FunctionModel(
        lambda m, x: F.layer_norm(x, x.shape[-1:], None, None, 1e-3)
    ),
    "rms norm, functional": lambda: FunctionModel(lambda m, x: F.rms_norm(x, x.shape[-1:], eps=1e-2)),
    "norm of ours": lambda: fastvit.BatchNormAct(C, activation="identity"),
}


LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *select_each_pair(NORMS, ["nchw"]),
        *select_each_pair(["batch norm", "evaluation", "group norm", "norm of ours"], ["nhwc"]),
    ],
)
def test_a_model_with_each_norm_keeps_less_with_the_same_bits(name, layout):
    eager, x = (
        one.to(memory_format=LAYOUTS[layout]) for one in (ConvStage(NORMS[name]), make_conv_images(8))
    )
    before, after = compare_and_measure_kept(eager, x)
    assert after < before - 2.9 * x.nbytes, (before - after) / x.nbytes


@pytest.mark.parametrize("precision", "float64 bfloat16 float16 autocast-bfloat16 autocast-float16".split())
def test_a_model_in_each_precision_keeps_less_with_the_same_bits(precision):
    mixed, dtype = precision.startswith("autocast"), getattr(torch, precision.split("-")[-1])
    eager, x = (one if mixed else one.to(dtype) for one in (ConvStage(), make_conv_images(8)))
    before, after = compare_and_measure_kept(eager, x, make_autocast(dtype, enabled=mixed))
    assert after < before


IN_PLACE = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "sigmoid_": lambda: FunctionModel(lambda m, x: x.sigmoid_()),
    "tanh_": lambda: FunctionModel(lambda m, x: x.tanh_()),
    "clamp_": lambda: FunctionModel(lambda m, x: x.clamp_(-1, 1)),
    "mul_ by a number": lambda: FunctionModel(lambda m, x: x.mul_(0.3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_activation_in_place_keeps_less_with_the_same_bits(name):
    x = make_conv_images(8)
    before, after = compare_and_measure_kept(ConvStage(make_activation=IN_PLACE[name]), x)
    assert after < before - 2.9 * x.nbytes


class Bottleneck(nn.Module):
    """A residual added in place, and an activation in place behind it, as in ResNets."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = (
            make_conv(),
            nn.BatchNorm2d(C),
            make_conv(),
            nn.BatchNorm2d(C),
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        y += x
        return self.act(y)


def test_a_residual_that_is_added_in_place_has_eager_bits():
    eager = nn.Sequential(
        make_conv(), nn.BatchNorm2d(C), nn.ReLU(), *(Bottleneck() for _ in range(3)), make_conv()
    )
    x = make_conv_images(8)
    before, after = compare_and_measure_kept(eager, x)
    # A block keeps only the inputs of its two norms, and the model keeps the last activation.
    assert after < before - 6 * x.nbytes


def test_two_forwards_before_a_backward_have_eager_bits():
    def call_twice(model):
        return lambda x: model(x).square() + model(x + 1).cos()

    compare_and_measure_kept(ConvStage(make_activation=nn.SiLU), make_conv_images(), call=call_twice)


POOLS = {
    "padded max": lambda: nn.MaxPool2d(3, 2, 1),
    "ceiled max": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "average": lambda: nn.AvgPool2d(2),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_model_with_each_pool_keeps_less_with_the_same_bits(name):
    x = make_conv_images(8)
    layers = make_conv(), nn.BatchNorm2d(C), nn.ReLU(inplace=True), POOLS[name](), make_conv()
    before, after = compare_and_measure_kept(nn.Sequential(*layers), x)
    assert after < before - 0.9 * x.nbytes


@pytest.mark.parametrize("name", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "GELU"])
def test_a_graph_that_is_dropped_frees_what_it_has_saved(name):
    """No packed tensor refers to the node that holds it."""
    layers = make_conv(), nn.BatchNorm2d(C), getattr(nn, name)(), nn.MaxPool2d(3, 2, 1), make_conv()
    model = fastvit.convert(nn.Sequential(*layers))

    def count_packed_tensors():
        gc.collect()
        return sum(type(one) is PackedTensor for one in gc.get_objects())

    before = count_packed_tensors()
    for _ in range(3):
        model(make_conv_images(8))
    assert count_packed_tensors() == before


class SyncBatchNorm(torch.autograd.Function):
    """Saves what torch's saves, whose node has this name; torch's needs a GPU."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        mean, invstd = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, mean, invstd, torch.tensor([x.numel()]))
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)

    @staticmethod
    def backward(ctx, dy):
        x, weight, _, invstd, _ = ctx.saved_tensors
        return dy * (weight * invstd).view(-1, 1, 1) + x * 0, dy.sum((0, 2, 3)), dy.sum((0, 2, 3))


def test_torchs_synchronised_norm_is_recomputed(request):
    def elementwise(x, weight, bias, mean, invstd, eps):
        mean, scale, bias = (t.view(-1, 1, 1) for t in (mean, weight * invstd, bias))
        return (x - mean) * scale + bias

    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_elemt", elementwise, "CPU")
    request.addfinalizer(library._destroy)
    weight, bias = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(C))
    x = make_conv_images(32)  # large beside three vectors that are copied, into 512 bytes each on a GPU
    norm = FunctionModel(lambda m, x: SyncBatchNorm.apply(x, weight, bias))
    before, after = compare_and_measure_kept(nn.Sequential(make_conv(), norm, make_conv()), x)
    assert after == pytest.approx(before - x.nbytes, rel=0.01)
