"""Pickles and names of older versions of fastvit can still be loaded and called."""

import dataclasses
import io
import itertools
import pickle
import sys
import types

import pytest
import torch

import fastvit
from conversion.block_models import WIDTH, LayerModel
from conversion.vit_models import measure_kept_bytes
from fastvit.conversion.scope_hooks import change_policies, get_scope_hook
from fastvit.recompute import OpSite, Policy, RecomputeLevel


def test_pickled_models_with_hooks_of_an_older_module_are_loaded():
    hook_class = pickle.loads(b"cfastvit.conversion.convert\nScopeHook\n.")
    assert callable(fastvit.conversion.convert) and fastvit.conversion.convert is fastvit.convert
    model, x = LayerModel(), torch.randn(8, 64, WIDTH)
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


def test_older_fields_of_the_adapter_for_torchtitan_warn_and_work(monkeypatch):
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
    model = LayerModel()
    Convert(Convert.Config(matmuls=True, skip=(("", "gelu"),))).apply(model)
    assert get_scope_hook(model).policy == Policy(RecomputeLevel.MATMULS, skip=frozenset({("", "gelu")}))


def test_the_hook_of_mmengine_has_both_names(monkeypatch):
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


def test_pickled_policies_with_older_names_of_fields_are_loaded():
    site = OpSite("blocks.0", "GeluBackward0", 1)
    older = object.__new__(Policy)
    fields = {"level": RecomputeLevel.MATMULS, "weight_casts": True, "skip": frozenset()}
    older.__dict__.update(fields, sites=frozenset({site}), share=0.5)
    model = fastvit.convert(LayerModel())
    change_policies(model, lambda _: older)
    loaded = get_scope_hook(pickle.loads(pickle.dumps(model))).policy
    assert loaded == Policy(RecomputeLevel.MATMULS, True, frozenset({site}), frozenset(), 0.5)
    assert loaded.only_sites == {site} and loaded.kept_fraction == 0.5
    assert "sites" not in vars(loaded) and "share" not in vars(loaded)
