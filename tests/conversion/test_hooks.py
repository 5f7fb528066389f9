"""Others do not see the hooks of a converted model: torch's fast path, TorchScript, holders of dictionaries.

Dynamo does see that a model has hooks, and compiles such a model anew.
"""

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fastvit
from conversion.block_models import WIDTH, LayerModel
from conversion.vit_models import measure_kept_bytes

# --- the fast path of nn.TransformerEncoderLayer, which a module with hooks does not take


def make_layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


def make_encoder(depth=2):
    return nn.TransformerEncoder(make_layer(), depth)


PADDING = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]]).bool()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [make_layer, make_encoder], ids=["layer", "encoder"])
def test_a_converted_encoder_has_eager_outputs_of_padded_rows_in_evaluation(make):
    model, x = make().eval(), torch.randn(2, 6, 32)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
    fastvit.convert(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(x, src_key_padding_mask=PADDING), expected)
    assert all(type(m._forward_hooks) is OrderedDict for m in model.modules())
    assert not expected[1, 3:].any() or make is make_layer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_hidden_hooks_come_back_after_an_exception_in_evaluation():
    model, x = fastvit.convert(make_encoder()).eval(), torch.randn(2, 6, 32)
    layer, seen = model.layers[0], []
    for error in (ValueError, KeyboardInterrupt):

        def refuse(module, args, error=error):
            seen.append(len(layer._forward_hooks))
            raise error

        handle = layer.register_forward_pre_hook(refuse)
        with torch.no_grad(), pytest.raises(error):
            model(x)
        handle.remove()
        assert refuse not in layer._forward_pre_hooks.values()
    assert seen == [0, 0]
    with torch.no_grad():
        model(x)
    fastvit.revert(model)
    assert all(type(m._forward_hooks) is OrderedDict and not m._forward_hooks for m in model.modules())


def test_a_converted_encoder_keeps_less_in_training():
    model, x = make_encoder(4), torch.randn(32, 64, 32)
    assert measure_kept_bytes(fastvit.convert(copy.deepcopy(model)), x) < 0.8 * measure_kept_bytes(model, x)


def test_a_hook_that_outlives_its_module_says_nothing():
    """At the interpreter's end, modules that are still referenced lose their globals one by one."""
    code = """
import ctypes, torch, fastvit
from fastvit.conversion import hook_visibility
for module in (ctypes, hook_visibility):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
ctypes.model = fastvit.convert(torch.nn.Linear(2, 2))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not done.stderr


# --- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_patched_only_while_a_model_is_converted():
    original = inspect.unwrap(torch.jit._recursive.get_hook_stubs)
    code = """
import torch, fastvit
before = torch.jit._recursive.get_hook_stubs
model = fastvit.convert(torch.nn.Linear(2, 2))
assert torch.jit._recursive.get_hook_stubs is not before
fastvit.revert(model)
assert torch.jit._recursive.get_hook_stubs is before
fastvit.convert(torch.nn.Linear(2, 2), budget=0.5)
assert torch.jit._recursive.get_hook_stubs is before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    model = fastvit.convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    replaced = torch.jit._recursive.get_hook_stubs
    assert replaced is not original
    calls = []

    def hook(self, input: tuple[torch.Tensor]) -> None:
        return None

    model.register_forward_pre_hook(hook)
    hooks = model._forward_pre_hooks
    before = list(hooks.items())
    stop = threading.Event()
    watcher = threading.Thread(
        target=lambda: [calls.append(list(hooks.items()) == before) for _ in iter(stop.is_set, True)]
    )
    watcher.start()
    torch.jit.script(model)
    stop.set()
    watcher.join()
    assert all(calls) and model._forward_pre_hooks is hooks


# --- the dictionaries of submodules


def test_a_dictionary_of_submodules_that_others_hold_stays():
    held, free = LayerModel(), LayerModel()
    modules = held._modules
    fastvit.convert(held)
    assert held._modules is modules
    modules["late"] = nn.Linear(2, 2)
    assert held.late in list(held.modules())
    fastvit.convert(free)
    assert type(free._modules) is OrderedDict
    assert type(fastvit.revert(free)._modules) is dict


def test_dynamo_compiles_a_converted_model_anew():
    """Dynamo guards on the type of the dictionary. Without it the code of the eager model would run."""
    from fastvit.recompute import dynamo_hooks

    x, counts = torch.randn(4, 64, WIDTH), []
    for changes in (True, False):
        torch._dynamo.reset()
        plain = LayerModel()
        converted = fastvit.convert(copy.deepcopy(plain))
        if not changes:
            for module in converted.modules():
                dynamo_hooks._change_modules_type(module, dict)
        for model in (plain, converted):
            compiled = torch.compile(model, backend="aot_eager")
            compiled(x).sum().backward()
            counts.append(measure_kept_bytes(compiled, x))
    assert counts[1] < 0.7 * counts[0] and counts[3] == counts[2]
