"""fastvit.convert in models with convolutions and normalisations: eager's bits and buffers, and less kept."""

import copy
import gc
import io
import pickle
import time
import typing
import weakref

import pytest
import torch
import torch.nn.functional as F
from recompute.models import compare_and_measure_freed
from torch import nn

import fastvit
from conversion.models import LEVELS, FunctionModel, assert_eager_bits, make_step
from conversion.vit_models import (
    Block,
    BlockModel,
    compare_and_measure_kept,
    find_differing,
    make_autocast,
    make_patches,
    measure_kept_bytes,
    run_step,
)
from fastvit.fusion import unfuse
from fastvit.recompute.packed_tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("default_device")
C, SIZE = 8, 12


def images(n=4):
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    return torch.randn(n, C, SIZE, SIZE, generator=generator)


def conv():
    return nn.Conv2d(C, C, 3, padding=1, bias=False)


class Stage(nn.Module):
    """A convolution, a norm and an activation, three times."""

    def __init__(self, norm, act=nn.GELU):
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.Sequential(*(part for _ in range(3) for part in (conv(), norm(), act())))
        self.last = conv()
        for module in self.parts:
            if getattr(module, "weight", None) is not None and module.weight.dim() == 1:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, x):
        return self.last(self.parts(x))


def batch_norm(**options):
    return lambda: nn.BatchNorm2d(C, **options)


def in_evaluation(train):
    def make():
        norm = nn.BatchNorm2d(C).eval()
        norm.train = lambda mode=True: norm
        norm.running_var.uniform_(0.5, 2)
        return norm.requires_grad_(train)

    return make


def without_gradient(kind):
    def make():
        norm = kind()
        norm.weight.requires_grad_(False), norm.bias.requires_grad_(False)
        return norm

    return make


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


NORMS = {
    "batch norm": batch_norm(),
    "cumulative": batch_norm(momentum=None),
    "without statistics": batch_norm(track_running_stats=False),
    "without affine": batch_norm(affine=False),
    "another eps": batch_norm(eps=0.1),
    "evaluation": in_evaluation(True),
    "frozen": in_evaluation(False),
    "without gradient": without_gradient(batch_norm()),
    "group norm": lambda: nn.GroupNorm(2, C, eps=1e-2),
    "group norm without gradient": without_gradient(lambda: nn.GroupNorm(2, C)),
    "group norm without affine": lambda: nn.GroupNorm(2, C, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(C, affine=True),
    "instance norm without affine": lambda: nn.InstanceNorm2d(C),
    "layer norm, functional": lambda: Call(lambda x: F.layer_norm(x, x.shape[-1:])),
    "layer norm, a literal eps": lambda: Call(lambda x: F.layer_norm(x, x.shape[-1:], None, None, 1e-3)),
    "rms norm, functional": lambda: Call(lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-2)),
    "norm of ours": lambda: fastvit.BatchNormAct(C, activation="identity"),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", NORMS)
def test_a_model_with_each_norm_keeps_less_with_the_same_bits(name, layout):
    eager, x = Stage(NORMS[name]).to(memory_format=layout), images(8).to(memory_format=layout)
    before, after = compare_and_measure_kept(eager, x)
    assert after < before - 2.9 * x.nbytes, (before - after) / x.nbytes


@pytest.mark.parametrize("precision", "float64 bfloat16 float16 autocast-bfloat16 autocast-float16".split())
def test_a_model_in_each_precision_keeps_less_with_the_same_bits(precision):
    mixed, dtype = precision.startswith("autocast"), getattr(torch, precision.split("-")[-1])
    eager, x = (one if mixed else one.to(dtype) for one in (Stage(batch_norm()), images(8)))
    before, after = compare_and_measure_kept(eager, x, make_autocast(dtype, enabled=mixed))
    assert after < before


@pytest.mark.parametrize("shape", [(512, C), (64, C, 9), (8, C, 5, 6, 7), (8, C, 12, 12)])
@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
def test_batch_norm_of_any_layout_has_the_bits_of_torch(shape, cut):
    """The recipe takes the saved statistics where torch's kernel allows it, and computes them where not."""
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](C)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x, weight = torch.randn(*shape) * 3 + 100, torch.randn(shape[-1], 7, requires_grad=True)
    x.requires_grad_()

    def forward():
        return norm((x * 1.5)[:: 2 if cut else 1]) @ weight

    assert compare_and_measure_freed(forward, [x, weight, norm.weight, norm.bias]) > 0


IN_PLACE = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "sigmoid_": lambda: Call(torch.sigmoid_),
    "tanh_": lambda: Call(lambda x: x.tanh_()),
    "clamp_": lambda: Call(lambda x: x.clamp_(-1, 1)),
    "mul_ by a number": lambda: Call(lambda x: x.mul_(0.3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_activations_in_place(name):
    x = images(8)
    before, after = compare_and_measure_kept(Stage(batch_norm(), IN_PLACE[name]), x)
    assert after < before - 2.9 * x.nbytes


class Bottleneck(nn.Module):
    """A residual added in place, and an activation in place behind it, as in ResNets."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(), nn.BatchNorm2d(C), conv(), nn.BatchNorm2d(C)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        y += x
        return self.act(y)


def test_a_residual_that_is_added_in_place():
    eager = nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(), *(Bottleneck() for _ in range(3)), conv())
    x = images(8)
    before, after = compare_and_measure_kept(eager, x)
    # of each block two inputs of BatchNorm are kept, and no result; the last activation
    assert after < before - 6 * x.nbytes


def test_two_forwards_before_a_backward():
    compare_and_measure_kept(
        Stage(batch_norm(), nn.SiLU), images(), call=lambda m: lambda x: m(x).square() + m(x + 1).cos()
    )


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2)])
def test_a_model_with_each_pool_keeps_less_with_the_same_bits(pool):
    x = images(8)
    before, after = compare_and_measure_kept(
        nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(inplace=True), pool, conv()), x
    )
    assert after < before - 0.9 * x.nbytes


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh(), nn.GELU()])
def test_forwards_without_a_backward_are_freed(act):
    """A graph that is dropped frees what it has saved: no packed tensor refers to the node that holds it."""
    model = fastvit.convert(nn.Sequential(conv(), nn.BatchNorm2d(C), act, nn.MaxPool2d(3, 2, 1), conv()))

    def records():
        gc.collect()
        return sum(type(one) is PackedTensor for one in gc.get_objects())

    before = records()
    for _ in range(3):
        model(images(8))
    assert records() == before


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


def test_torchs_synchronised_norm(request):
    def elementwise(x, weight, bias, mean, invstd, eps):
        mean, scale, bias = (t.view(-1, 1, 1) for t in (mean, weight * invstd, bias))
        return (x - mean) * scale + bias

    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_elemt", elementwise, "CPU")
    request.addfinalizer(library._destroy)
    weight, bias = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(C))
    x = images(32)  # large beside three vectors that are copied, into 512 bytes each on a GPU
    norm = Call(lambda x: SyncBatchNorm.apply(x, weight, bias))
    before, after = compare_and_measure_kept(nn.Sequential(conv(), norm, conv()), x)
    assert after == pytest.approx(before - x.nbytes, rel=0.01)


@pytest.mark.parametrize(
    "function",
    [
        fastvit.convert, fastvit.revert, fastvit.fuse, unfuse, fastvit.convert_syncbn_model,
        fastvit.revert_syncbn_model,
    ],
)  # fmt: skip
def test_a_type_checker_knows_the_class_of_the_model_that_is_returned(function):
    hints = typing.get_type_hints(function)
    model = hints[next(iter(hints))]
    assert isinstance(model, typing.TypeVar) and model.__bound__ is nn.Module
    assert hints["return"] is model


def test_nothing_is_replaced():
    model = BlockModel()
    types, modules = [type(m) for m in model.modules()], list(model.modules())
    state, attributes = model.state_dict(), [set(vars(m)) for m in modules]
    assert fastvit.convert(model) is model
    assert list(model.modules()) == modules and [type(m) for m in modules] == types
    assert list(model.state_dict()) == list(state)
    fastvit.revert(model)
    assert [set(vars(m)) for m in modules] == attributes
    for module in modules:
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


def test_it_takes_milliseconds():
    model = BlockModel(lambda: Block(), depth=48)
    start = time.thread_time()
    fastvit.convert(model)
    assert time.thread_time() - start < 0.1


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded, copy.copy]
)
def test_copies_of_a_converted_model_are_converted(copied):
    eager, x = Stage(batch_norm()), images()
    model = fastvit.convert(copy.deepcopy(eager))
    other = copied(model)
    assert not find_differing(
        run_step(other, x), run_step(eager, x)
    )  # first, since a shallow copy shares its buffers
    assert measure_kept_bytes(other, x) == measure_kept_bytes(model, x) < measure_kept_bytes(eager, x)


def test_a_model_is_freed_at_once():
    model = fastvit.convert(BlockModel(depth=1))
    reference = weakref.ref(model)
    gc.disable()
    try:
        model(make_patches()).sum().backward()
        del model
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_scripted_traced_and_exported():
    eager, x = Stage(batch_norm()).eval(), images()
    model = fastvit.convert(copy.deepcopy(eager))
    traced = torch.jit.trace(model, x), torch.export.export(model, (x,)).module()
    for made in (torch.jit.script(model), *traced):
        torch.testing.assert_close(made(x), eager(x))
    assert measure_kept_bytes(model, x) < measure_kept_bytes(eager, x), "it is still converted"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_converted_model_is_quantised_like_the_original():
    quantization = pytest.importorskip("torch.ao.quantization")
    results = []
    for change in (lambda m: m, fastvit.convert):
        torch.manual_seed(0)
        model = change(nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(), conv()))
        quantization.fuse_modules_qat(model, [["0", "1", "2"]], inplace=True)
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
        results.append(run_step(model, images()))
    assert not find_differing(*results)


def test_a_converted_model_in_another_keeps_its_own_options():
    torch.manual_seed(0)
    teacher, student, x = BlockModel(depth=2), BlockModel(depth=2), torch.randn(16, 50, 64)
    inner = fastvit.convert(copy.deepcopy(teacher.blocks[0]), matmuls=True)
    both = nn.Sequential(inner, student.blocks[1])
    fastvit.convert(both)
    fastvit.convert(both[0], matmuls=True)
    plain = nn.Sequential(teacher.blocks[0], copy.deepcopy(student.blocks[1]))
    assert not find_differing(run_step(both, x), run_step(plain, x))
    without = fastvit.convert(copy.deepcopy(fastvit.revert(both)))
    fastvit.convert(both)
    fastvit.convert(both[0], matmuls=True)
    assert measure_kept_bytes(both, x) < 0.8 * measure_kept_bytes(without, x)


class Raises(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if self.training:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("in a forward"), KeyboardInterrupt()])
def test_an_exception_in_a_forward(error):
    model, x = BlockModel(depth=2), make_patches()
    want = run_step(model, x)
    model.blocks.insert(1, Raises(error))
    fastvit.convert(model)
    with pytest.raises(type(error)):
        model(x)
    model.blocks[1].eval()
    got = run_step(model, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not find_differing({name.replace("blocks.2", "blocks.1"): t for name, t in got.items()}, want)


def test_a_pre_hook_that_raises():
    model, x = fastvit.convert(BlockModel(depth=1)), make_patches()

    def refuse(module, args):
        raise ValueError("not now")

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    with fastvit.recompute_scope():
        with pytest.raises(ValueError, match="not now"):
            model(x)
        assert fastvit.recompute.active_scope() is not None, "the scope around is still open"
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model(x).sum().backward()


def test_without_gradients_no_scope_is_opened():
    model, seen = BlockModel(depth=1), []
    model.blocks[0].register_forward_hook(
        lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
    )
    fastvit.convert(model)
    with torch.no_grad():
        model(make_patches())
    assert seen == [None]


@pytest.mark.parametrize("container", [nn.ModuleList, lambda nets: nn.ModuleDict({"net": nets[0]})])
def test_a_container_that_is_never_called(container):
    nets = [Stage(batch_norm()) for _ in range(2)]
    fastvit.convert(container([nets[0]]))
    assert measure_kept_bytes(nets[0], images()) < 0.8 * measure_kept_bytes(nets[1], images())


def test_blocks_of_a_list_can_be_skipped():
    """The list itself opens no scope."""
    blocks = lambda: nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU())])  # noqa: E731
    fastvit.convert(blocks(), skip=[("0", "gelu")])
    with pytest.raises(ValueError, match=r"names of blocks \(\['0'\]\), got ''"):
        fastvit.convert(blocks(), skip=[("", "gelu")])


@pytest.mark.parametrize("level", LEVELS)
def test_calls_that_an_observer_must_leave_alone(level):
    """Linears in inference mode, sums by keywords, and sums with sparse tensors and numbers."""

    def function(m, x):
        with torch.inference_mode():
            m.a(x)
        y = m.a(x)
        y = torch.add(input=y, other=torch.ones(3, 1)) + torch.sub(input=torch.ones(1), other=y)
        y = y + torch.eye(3).to_sparse()
        return torch.add(2, y)

    step = make_step(lambda: FunctionModel(function, a=nn.Linear(3, 3)), torch.randn(3, 3))
    assert_eager_bits(step, **LEVELS[level])
