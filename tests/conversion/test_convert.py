"""convert and revert change only hooks of a model; copies and other forms of the model stay converted."""

import copy
import gc
import io
import pickle
import time
import typing
import weakref

import pytest
import torch
from torch import nn

import fastvit
from conversion.conv_models import C, ConvStage, make_conv, make_conv_images
from conversion.models import LEVELS, FunctionModel, assert_eager_bits, leave_unconverted, make_step
from conversion.vit_models import (
    BlockModel,
    find_differing,
    make_patches,
    measure_kept_bytes,
    run_step,
)
from fastvit.fusion import unfuse

pytestmark = pytest.mark.usefixtures("default_device")


FUNCTIONS = [
    fastvit.convert,
    fastvit.revert,
    fastvit.fuse,
    unfuse,
    fastvit.convert_syncbn_model,
    fastvit.revert_syncbn_model,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_type_checker_knows_the_class_of_the_model_that_is_returned(function):
    hints = typing.get_type_hints(function)
    model = hints[next(iter(hints))]
    assert isinstance(model, typing.TypeVar) and model.__bound__ is nn.Module
    assert hints["return"] is model


def test_convert_replaces_nothing_and_revert_leaves_nothing():
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


@pytest.mark.nightly
def test_a_conversion_of_48_blocks_takes_milliseconds():
    model = BlockModel(depth=48)
    start = time.thread_time()
    fastvit.convert(model)
    assert time.thread_time() - start < 0.1


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_converted_model_is_converted(name):
    eager, x = ConvStage(), make_conv_images()
    model = fastvit.convert(copy.deepcopy(eager))
    copied = COPIES[name](model)
    # This step comes first, because a shallow copy shares its buffers.
    assert not find_differing(run_step(copied, x), run_step(eager, x))
    assert measure_kept_bytes(copied, x) == measure_kept_bytes(model, x) < measure_kept_bytes(eager, x)


def test_a_converted_model_is_freed_without_garbage_collection():
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
def test_a_converted_model_can_be_scripted_traced_and_exported():
    eager, x = ConvStage().eval(), make_conv_images()
    model = fastvit.convert(copy.deepcopy(eager))
    traced = torch.jit.trace(model, x), torch.export.export(model, (x,)).module()
    for made in (torch.jit.script(model), *traced):
        torch.testing.assert_close(made(x), eager(x))
    assert measure_kept_bytes(model, x) < measure_kept_bytes(eager, x), "it is still converted"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_converted_model_is_quantised_like_the_original():
    quantization = pytest.importorskip("torch.ao.quantization")
    results = []
    for convert in (leave_unconverted, fastvit.convert):
        torch.manual_seed(0)
        model = convert(nn.Sequential(make_conv(), nn.BatchNorm2d(C), nn.ReLU(), make_conv()))
        quantization.fuse_modules_qat(model, [["0", "1", "2"]], inplace=True)
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
        results.append(run_step(model, make_conv_images()))
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


def test_without_gradients_no_scope_is_opened():
    model, seen = BlockModel(depth=1), []
    model.blocks[0].register_forward_hook(
        lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
    )
    fastvit.convert(model)
    with torch.no_grad():
        model(make_patches())
    assert seen == [None]


CONTAINERS = {"list": lambda net: nn.ModuleList([net]), "dict": lambda net: nn.ModuleDict({"net": net})}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_modules_of_a_container_that_is_never_called_are_converted(kind):
    net, eager, x = ConvStage(), ConvStage(), make_conv_images()
    fastvit.convert(CONTAINERS[kind](net))
    assert measure_kept_bytes(net, x) < 0.8 * measure_kept_bytes(eager, x)


def test_skip_names_the_blocks_of_a_list_and_not_the_list():
    def make_blocks():
        return nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU())])

    fastvit.convert(make_blocks(), skip=[("0", "gelu")])
    with pytest.raises(ValueError, match=r"names of blocks \(\['0'\]\), got ''"):
        fastvit.convert(make_blocks(), skip=[("", "gelu")])


@pytest.mark.parametrize("level", LEVELS)
def test_uncommon_sums_and_inference_mode_have_eager_bits(level):
    def function(m, x):
        with torch.inference_mode():
            m.a(x)
        y = m.a(x)
        y = torch.add(input=y, other=torch.ones(3, 1)) + torch.sub(input=torch.ones(1), other=y)
        y = y + torch.eye(3).to_sparse()
        return torch.add(2, y)

    step = make_step(lambda: FunctionModel(function, a=nn.Linear(3, 3)), torch.randn(3, 3))
    assert_eager_bits(step, **LEVELS[level])
