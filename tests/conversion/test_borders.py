"""Tests which modules are blocks, which tensors cross a block's border, and who sees its hooks."""

import copy
import dataclasses
import inspect
import io
import itertools
import pickle
import subprocess
import sys
import threading
import types
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.vit_models import measure_kept_bytes
from fastvit.conversion.blocks import find_blocks
from fastvit.conversion.nested_values import tensor_leaves
from fastvit.conversion.scope_hooks import change_policies, get_scope_hook
from fastvit.memory import peak_bytes
from fastvit.recompute import OpSite, Policy, RecomputeLevel

WIDTH = 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    name: str = "state"


class Keywords(Layer):
    def forward(self, *, hidden):
        return {"hidden": super().forward(hidden)}


class Data(Layer):
    def forward(self, state):
        return State(super().forward(state.hidden))


class Nested(Layer):
    def forward(self, parts):
        return ("out", [{"hidden": super().forward(parts[1][0]["hidden"])}])


CALLS = {
    Layer: lambda block, x: block(x),
    Keywords: lambda block, x: block(hidden=x)["hidden"],
    Data: lambda block, x: block(State(x)).hidden,
    Nested: lambda block, x: block(("in", [{"hidden": x}]))[1][0]["hidden"],
}


class Model(nn.Module):
    def __init__(self, kind, as_attributes=False):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.stem = kind, nn.Linear(WIDTH, WIDTH)
        blocks = [kind() for _ in range(6)]
        self.names = [f"b{i}" for i in range(6)] if as_attributes else []
        for name, block in zip(self.names, blocks, strict=False):
            setattr(self, name, block)
        if not as_attributes:
            self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.stem(x)
        for block in [getattr(self, name) for name in self.names] or self.blocks:
            x = CALLS[self.kind](block, x)
        return x


def peak(model, x):
    model(x).sum().backward()
    return peak_bytes(lambda: model(x).sum().backward())


@pytest.mark.parametrize("as_attributes", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_the_peak_of_the_least_does_not_depend_on_how_blocks_are_called(kind, as_attributes):
    x = torch.randn(16, 64, WIDTH)
    expected = peak(fastvit.convert(Model(Layer), budget="least"), x)
    actual = peak(fastvit.convert(Model(kind, as_attributes), budget="least"), x)
    assert actual == pytest.approx(expected, rel=0.02)


def test_tensors_in_structures():
    a, b = torch.ones(2), torch.zeros(2)
    loop: list = [a]
    loop.append(loop)
    for values in ({"x": [a, (b,)]}, State([a, b]), OrderedDict(p=a, q={"r": b})):
        assert [id(one) for one in tensor_leaves(values)] == [id(a), id(b)]
    assert len(tensor_leaves(loop)) == 1
    assert [id(one) for one in tensor_leaves((a, None, 3, a))] == [id(a), id(a)]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.bn(x)


def test_a_module_round_a_lone_normalisation_is_no_block():
    parts = [part for i in (3, 16, 16) for part in (nn.Conv2d(i, 16, 3), Norm(), nn.SiLU())]
    model, x = nn.Sequential(*parts, nn.Conv2d(16, 4, 1)), torch.randn(4, 3, 24, 24)
    assert find_blocks(model) == []
    default, least = (fastvit.convert(copy.deepcopy(model), **how) for how in ({}, {"budget": "least"}))
    assert measure_kept_bytes(default, x) < measure_kept_bytes(model, x)
    assert peak(least, x) <= peak(default, x) < peak(model, x)


def test_siblings_of_one_class_are_blocks_outside_of_blocks():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.other = Layer(), Layer(), nn.TransformerDecoderLayer(8, 2)

    pair = Pair()
    assert find_blocks(pair) == [pair.left, pair.right]
    assert find_blocks(stack := nn.Sequential(pair, Pair())) == list(stack)
    alone = nn.Module()
    alone.layer = Layer()
    assert find_blocks(alone) == []


# --- nn.TransformerEncoderLayer


def encoder(depth=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, depth) if depth else layer


PADDING = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]]).bool()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_padded_rows_in_evaluation(depth, frozen):
    model, x = encoder(depth).eval(), torch.randn(2, 6, 32)
    if depth:
        model = nn.ModuleDict({"encoder": model, "layer": encoder(0).eval()})["encoder"]
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
    fastvit.convert(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(x, src_key_padding_mask=PADDING), expected)
    assert all(type(m._forward_hooks) is OrderedDict for m in model.modules())
    assert not expected[1, 3:].any() or not depth


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_exception_in_evaluation_reveals_the_hooks():
    model, x = fastvit.convert(encoder()).eval(), torch.randn(2, 6, 32)
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


def test_an_encoder_in_training_recomputes():
    model, x = encoder(4), torch.randn(32, 64, 32)
    assert measure_kept_bytes(fastvit.convert(copy.deepcopy(model)), x) < 0.8 * measure_kept_bytes(model, x)


# --- TorchScript, pickles, revert


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_is_replaced_only_while_there_are_hooks():
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


def test_pickles_name_the_hook_of_an_older_module():
    hook_class = pickle.loads(b"cfastvit.conversion.convert\nScopeHook\n.")
    assert callable(fastvit.conversion.convert) and fastvit.conversion.convert is fastvit.convert
    model, x = Model(Layer), torch.randn(8, 64, WIDTH)
    whole = measure_kept_bytes(model, x)
    for module in (model, *model.blocks):  # as these pickles have it: without keyword arguments
        hook = hook_class(fastvit.recompute.Policy(), "")
        module.register_forward_pre_hook(hook)
        module.register_forward_hook(hook, always_call=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert measure_kept_bytes(loaded, x) < 0.7 * whole
    assert measure_kept_bytes(fastvit.revert(loaded), x) == whole


def stub_module(monkeypatch, name, **names):
    for path in itertools.accumulate(name.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(names)


def test_older_fields_of_the_adapter_for_torchtitan(monkeypatch):
    class ActivationCheckpointing:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            pass

        def __init__(self, config):
            self.config = config

    name = "torchtitan.distributed.activation_checkpoint"
    stub_module(monkeypatch, name, ActivationCheckpointing=ActivationCheckpointing)
    monkeypatch.delitem(sys.modules, "fastvit.adapters.torchtitan", raising=False)
    from fastvit.adapters.torchtitan import Convert

    monkeypatch.delitem(sys.modules, "fastvit.adapters.torchtitan")
    with pytest.warns(DeprecationWarning, match=r"Convert.Config\(products=\) is Convert.Config\(matmuls=\)"):
        older = Convert.Config(products=True)
    assert older == Convert.Config(matmuls=True)
    model = Model(Layer)
    Convert(Convert.Config(matmuls=True, skip=(("", "gelu"),))).apply(model)
    assert get_scope_hook(model).policy == Policy(RecomputeLevel.MATMULS, skip=frozenset({("", "gelu")}))


def test_both_names_of_the_hook_of_mmengine(monkeypatch):
    registered = []

    class Registry:
        def register_module(self, name):
            registered.extend(name)
            return lambda cls: cls

    stub_module(monkeypatch, "mmengine.hooks", Hook=object)
    stub_module(monkeypatch, "mmengine.registry", HOOKS=Registry())
    stub_module(monkeypatch, "mmengine.runner", Runner=object)
    monkeypatch.delitem(sys.modules, "fastvit.adapters.mmengine", raising=False)
    from fastvit.adapters import mmengine

    monkeypatch.delitem(sys.modules, "fastvit.adapters.mmengine")
    assert registered == ["Convert", "FastvitConvertHook"] and mmengine.FastvitConvertHook is mmengine.Convert


def test_pickles_have_older_names_of_the_fields_of_a_policy():
    site = OpSite("blocks.0", "GeluBackward0", 1)
    older = object.__new__(Policy)
    fields = {"level": RecomputeLevel.MATMULS, "weight_casts": True, "skip": frozenset()}
    older.__dict__.update(fields, sites=frozenset({site}), share=0.5)
    model = fastvit.convert(Model(Layer))
    change_policies(model, lambda _: older)
    loaded = get_scope_hook(pickle.loads(pickle.dumps(model))).policy
    assert loaded == Policy(RecomputeLevel.MATMULS, True, frozenset({site}), frozenset(), 0.5)
    assert loaded.only_sites == {site} and loaded.kept_fraction == 0.5
    assert "sites" not in vars(loaded) and "share" not in vars(loaded)


def test_dictionaries_of_submodules_that_others_hold_stay():
    held, free = Model(Layer), Model(Layer)
    modules = held._modules
    fastvit.convert(held)
    assert held._modules is modules
    modules["late"] = nn.Linear(2, 2)
    assert held.late in list(held.modules())
    fastvit.convert(free)
    assert type(free._modules) is OrderedDict
    assert type(fastvit.revert(free)._modules) is dict


def test_the_type_of_the_dictionary_is_what_dynamo_guards_on():
    """Without the change a converted model would run what was compiled for one without hooks."""
    from fastvit.recompute import dynamo_hooks

    x, counts = torch.randn(4, 64, WIDTH), []
    for changes in (True, False):
        torch._dynamo.reset()
        plain = Model(Layer)
        converted = fastvit.convert(copy.deepcopy(plain))
        if not changes:
            for module in converted.modules():
                dynamo_hooks._change_modules_type(module, dict)
        for model in (plain, converted):
            compiled = torch.compile(model, backend="aot_eager")
            compiled(x).sum().backward()
            counts.append(measure_kept_bytes(compiled, x))
    assert counts[1] < 0.7 * counts[0] and counts[3] == counts[2]


# --- what report and verify are given


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, it=None):
        if it is not None and isinstance(it, Counter):
            it.count += 1
        return self.layer(x)


class Counter:
    count = 0


class Locked(Counter):
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify])
def test_iterators_and_objects_with_state(function):
    x, it, counter = torch.randn(2, 64, WIDTH), iter([1, 2]), Counter()
    message = (
        rf"{function.__name__}: argument 'it' is an iterator \(list_iterator\), which a forward of a copy"
    )
    with pytest.raises(TypeError, match=message):
        function(Takes(), x, it)
    with pytest.raises(TypeError, match="argument 'it' has an iterator"):
        function(Takes(), x, it={"a": [it]})
    assert list(it) == [1, 2]
    function(Takes(), x, counter)
    assert counter.count == 0
    with pytest.raises(TypeError, match=r"argument 'it' is an object with state \(Locked\)"):
        function(Takes(), x, Locked())
    for plain in (
        3,
        "a",
        None,
        State(x),
        torch.float32,
        len,
        copy,
        object(),
        {"a": (1, {2})},
        threading.Lock(),
    ):
        function(Takes(), x, plain)


def test_generators_are_copied():
    class Draws(Takes):
        def forward(self, x, it):
            return self.layer(x * torch.rand(x.shape, generator=it))

    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    assert fastvit.verify(Draws(), torch.randn(2, 64, WIDTH), generator, dtype=None)
    fastvit.report(Draws(), torch.randn(2, 64, WIDTH), generator)
    assert torch.equal(generator.get_state(), state)


# --- complex numbers


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("angles", torch.polar(torch.ones(WIDTH // 2), torch.randn(WIDTH // 2)))
        self.phase = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x):
        pairs = torch.view_as_complex(self.norm(x).unflatten(-1, (-1, 2)))
        cos, sin = torch.view_as_real(self.angles).unbind(-1)
        return pairs * self.angles * self.phase, cos + sin


@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_complex_models(dtype):
    model, x = Rotary(), torch.randn(8, 16, WIDTH)
    with warnings.catch_warnings(action="error"):
        found = fastvit.verify(model, x, dtype=dtype)
    assert found and "gradient of phase" in found.differences and max(found.differences.values()) == 0


def test_a_wrong_imaginary_part_differs():
    from fastvit.conversion.verification import _relative_difference

    a, b = torch.tensor([1 + 1j]), torch.tensor([1 - 5j])
    assert _relative_difference(a, b, 0.0) == pytest.approx(6 / 5)


def test_rows_of_a_report_add_up_to_at_most_its_headline():
    cached = torch.randn(64, WIDTH)

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.layer = nn.Conv2d(3, WIDTH, 8, 8), Layer()

        def forward(self, images):
            return self.layer(self.conv(images).flatten(2).transpose(1, 2) * cached)

    report = fastvit.report(Patches(), torch.randn(4, 3, 64, 64))
    assert sum(row.kept_bytes for row in report.tensors) <= report.kept_after
