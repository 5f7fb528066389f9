"""The import hook of fastvit.compat: modules, names, distributions, and what public repositories import."""

import importlib
import importlib.metadata
import sys

import pytest
import torch.distributed as dist

import fastvit.compat.amp_C
import fastvit.compat.apex
import fastvit.compat.inplace_abn
from fastvit.compat import _finder, install


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake({path: text})` puts packages on the path; imports of apex and inplace_abn start afresh."""

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in _finder._ROOTS]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _finder._Finder)]
        importlib.invalidate_caches()

    def write(files, prefer="apex"):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        install(prefer)

    monkeypatch.setattr(_finder, "_install_in_children", lambda: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield write
    forget()


def test_without_a_real_one(fake):
    fake({})
    import apex
    import inplace_abn
    from apex import amp
    from apex.amp._amp_state import _amp_state
    from apex.parallel import LARC as exported
    from apex.parallel.LARC import LARC

    assert apex is fastvit.compat.apex and amp is apex.amp is fastvit.compat.apex.amp
    assert inplace_abn is fastvit.compat.inplace_abn
    assert apex.__spec__.name == "fastvit.compat.apex"
    assert _amp_state is amp._amp_state and LARC is exported
    assert importlib.import_module("inplace_abn.functions").inplace_abn_sync is inplace_abn.inplace_abn_sync
    assert importlib.import_module("inplace_abn.abn").ABN is inplace_abn.ABN
    assert importlib.import_module("apex.optimizers") is apex.optimizers
    assert apex.parallel.ReduceOp is dist.ReduceOp
    for module in (apex.parallel.sync_batchnorm, apex.parallel.optimized_sync_batchnorm):
        assert module.SyncBatchNorm is fastvit.SyncBatchNorm
    assert importlib.import_module("amp_C") is fastvit.compat.amp_C
    for lines in ("import apex.transformer", "from apex.contrib import fmha", "from apex.amp import utils"):
        with pytest.raises(ModuleNotFoundError, match="No module named .*; see docs/migrating-from-apex.md"):
            exec(lines)


def test_names_with_something_instead(fake):
    fake({})
    from apex import amp, optimizers

    for package, name, instead in (
        (amp, "init", "amp.initialize"),
        (optimizers, "FusedAdagrad", "torch.optim.Adagrad"),
    ):
        with pytest.raises(AttributeError, match=f"has no {name}; use {instead}, see docs/migrating"):
            getattr(package, name)
        path = package.__name__.removeprefix("fastvit.compat.")
        for lines in (f"from {path} import {name}", f"from fastvit.compat.{path} import {name}"):
            with pytest.raises(ImportError, match=f"{name}' in fastvit.compat; use {instead}, see docs"):
                exec(lines)


def test_real_one_without_the_parts(fake):
    """Like apex since 2025, and like PyPI's unrelated package apex."""
    fake(
        {
            "apex/__init__.py": "from . import optimizers\nversion = 1\n",
            "apex/optimizers.py": "class FusedAdam: real = True\n",
            "apex/contrib/__init__.py": "real = True\n",
        }
    )
    import apex
    from apex import amp
    from apex.contrib import real
    from apex.optimizers import FusedAdam, FusedLAMB
    from apex.parallel import convert_syncbn_model

    assert apex.version == 1 and real and FusedAdam.real
    assert amp is apex.amp is fastvit.compat.apex.amp
    assert FusedLAMB is fastvit.compat.apex.optimizers.FusedLAMB
    assert convert_syncbn_model is fastvit.convert_syncbn_model
    assert apex.FP16_Optimizer is fastvit.compat.apex.FP16_Optimizer
    assert "class FusedAdam" in __import__("inspect").getsource(FusedAdam)
    with pytest.raises(AttributeError, match="module 'apex' has no attribute 'nothing'"):
        _ = apex.nothing


REAL = {
    "apex/__init__.py": "from . import amp\nreal = True\ndef __getattr__(name):\n"
    "    if name == 'lazy': return 7\n    raise AttributeError(name)\n",
    "apex/amp/__init__.py": "def initialize(): return 'real'\n",
    "apex/contrib.py": "real = True\n",
    "apex/transformer.py": "real = True\n",
    "inplace_abn.py": "class InPlaceABN: real = True\n",
}


def test_real_one_with_the_part_is_used(fake):
    fake(REAL)
    import apex
    import inplace_abn

    assert apex.amp.initialize() == "real" and apex.real and apex.lazy == 7
    assert apex.amp.scale_loss is fastvit.compat.apex.amp.scale_loss
    assert apex.parallel is fastvit.compat.apex.parallel
    assert inplace_abn.InPlaceABN.real and inplace_abn.ABN is fastvit.compat.inplace_abn.ABN


def test_prefer_fastvit(fake):
    fake(REAL)
    install("fastvit")
    assert sum(isinstance(finder, _finder._Finder) for finder in sys.meta_path) == 1
    import apex
    import inplace_abn
    from apex import contrib, transformer
    from apex.amp import initialize

    assert apex.amp is fastvit.compat.apex.amp and initialize is apex.amp.initialize
    assert apex.real and contrib.real and apex.lazy == 7  # the rest of it stays
    assert transformer.real
    assert inplace_abn is fastvit.compat.inplace_abn


@pytest.mark.parametrize("broken", ["import not_there_at_all", "raise ImportError('no such symbol')"])
def test_real_one_that_does_not_import(fake, broken):
    fake({"apex/__init__.py": f"from . import amp\n{broken}\n", "apex/amp.py": "real = True\n"})
    with pytest.warns(UserWarning, match="the installed apex fails to import"):
        import apex
    from apex.amp import initialize

    assert apex is fastvit.compat.apex and initialize is fastvit.compat.apex.amp.initialize
    assert sys.modules["apex.amp"] is fastvit.compat.apex.amp


def test_clone_beside_the_script_is_no_package(fake):
    fake({"apex/apex/__init__.py": "real = True\n"})
    import apex

    assert apex is fastvit.compat.apex


def test_wrong_preference():
    with pytest.raises(ValueError, match="prefer takes apex or fastvit, got 'torch'"):
        install("torch")


# Distributions, which programs such as transformers read before they import


def test_distribution(fake):
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    fake({})
    assert importlib.metadata.version("apex") == "25.05+fastvit"
    assert importlib.metadata.version("inplace-abn") == importlib.metadata.version("inplace_abn")
    found = importlib.metadata.distribution("apex")
    assert found.metadata["Name"] == "apex" and "fastvit.compat" in found.metadata["Summary"]
    assert found.read_text("RECORD") is None and found.requires is None
    assert {"apex", "inplace_abn"} <= {d.metadata["Name"] for d in importlib.metadata.distributions()}
    assert importlib.metadata.packages_distributions()["apex"] == ["apex"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apexes")


@pytest.mark.parametrize("prefer", ["apex", "fastvit"])
def test_distribution_of_a_real_one(fake, prefer):
    fake({"apex-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n"}, prefer)
    assert importlib.metadata.version("apex") == "0.1"
    assert [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] == "apex"] == ["0.1"]


# What 40 public repositories take from apex, by their newest sources in August 2026; 35 get every name

NAMES = """
    amp_C.multi_tensor_adam amp_C.multi_tensor_axpby amp_C.multi_tensor_l2norm amp_C.multi_tensor_lamb
    amp_C.multi_tensor_scale amp_C.multi_tensor_sgd amp_C.multi_tensor_unscale_l2norm
    apex.amp apex.amp._amp_state apex.amp.initialize apex.amp.load_state_dict apex.amp.master_params
    apex.amp.register_half_function apex.amp.scale_loss apex.amp.state_dict
    apex.contrib.clip_grad.clip_grad_norm_ apex.contrib.layer_norm.layer_norm.FastLayerNorm
    apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.contrib.layer_norm.layer_norm._fast_layer_norm
    apex.contrib.optimizers.FP16_Optimizer apex.contrib.xentropy apex.fp16_utils.network_to_half
    apex.multi_tensor_apply.multi_tensor_applier apex.normalization.FusedLayerNorm
    apex.normalization.FusedRMSNorm apex.normalization.MixedFusedLayerNorm
    apex.normalization.MixedFusedRMSNorm apex.normalization.fused_layer_norm.FusedLayerNorm
    apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction
    apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction
    apex.normalization.fused_layer_norm.MixedFusedLayerNorm
    apex.normalization.fused_layer_norm.fused_layer_norm_affine
    apex.normalization.fused_layer_norm.fused_rms_norm
    apex.normalization.fused_layer_norm.fused_rms_norm_affine apex.optimizers apex.optimizers.FP16_Optimizer
    apex.optimizers.FusedAdam apex.optimizers.FusedLAMB apex.optimizers.FusedMixedPrecisionLamb
    apex.optimizers.FusedNovoGrad apex.optimizers.FusedSGD apex.optimizers.fused_adam.FusedAdam
    apex.optimizers.fused_lamb.FusedLAMB apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb
    apex.parallel.DistributedDataParallel apex.parallel.LARC.LARC apex.parallel.SyncBatchNorm
    apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
    apex.parallel.distributed.flat_dist_call apex.parallel.optimized_sync_batchnorm.SyncBatchNorm
    apex_C.flatten apex_C.unflatten
"""

# Names that are errors, which say where to read
LACKING = """
    amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda
    amp_C.update_scale_hysteresis apex._autocast_utils._cast_if_autocast_enabled
    apex.contrib.group_norm.GroupNorm apex.contrib.nccl_allocator
    apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam
    apex.contrib.optimizers.distributed_fused_adam._disable_pre_forward_hook
    apex.contrib.optimizers.distributed_fused_adam._multi_tensor_copy apex.contrib.sparsity.ASP apex.mlp.MLP
    apex.mlp.MlpFunction.backward apex.mlp.MlpFunction.forward apex.pyprof
    apex.transformer.enums.AttnMaskType apex.transformer.functional.FusedScaleMaskSoftmax
    apex.transformer.functional.fused_softmax.FusedScaleMaskSoftmax apex.transformer.parallel_state
"""


def resolve(name):
    """As `from a.b import c` or `import a.b.c` do; the error's text, or None."""
    head, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(head or name)
        head and hasattr(module, last) or importlib.import_module(name)
    except ImportError as error:
        if "not a package" in str(error):  # a name in a class or module
            try:
                getattr(module, last)
            except AttributeError as missing:
                return str(missing)
        return str(error)


def test_what_repositories_import_resolves(fake):
    fake({}, prefer="fastvit")
    lacking = set(LACKING.split())
    missing = {name: error for name in (*NAMES.split(), *lacking) if (error := resolve(name))}
    assert missing.keys() == lacking
    for name, error in missing.items():
        assert "docs/migrating-from-apex.md" in error, (name, error)
