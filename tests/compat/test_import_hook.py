"""The import hook of fastvit.compat: modules, names, distributions, and what public repositories import."""

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import fastvit.compat.amp_C
import fastvit.compat.apex
import fastvit.compat.inplace_abn
from fastvit.compat import _import_hook, install


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Returns a function `fake({path: text})`, which puts packages on the path. Imports start afresh."""

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in _import_hook._PROVIDED_PACKAGES]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _import_hook._CompatFinder)]
        importlib.invalidate_caches()

    def write(files, prefer="apex"):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        install(prefer)

    monkeypatch.setattr(_import_hook, "_install_in_subprocesses", lambda: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield write
    forget()


def test_fastvit_stands_in_for_apex_that_is_not_installed(fake):
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


def test_missing_names_say_what_to_use(fake):
    fake({})
    from apex import amp, optimizers

    for package, name, instead in (
        (amp, "init", "amp.initialize"),
        (optimizers, "FusedAdagrad", "torch.optim.Adagrad"),
        (importlib.import_module("apex.amp.scaler"), "Nothing", "amp_C.multi_tensor_scale"),
        (
            importlib.import_module("apex.contrib.xentropy.softmax_xentropy"),
            "Nothing",
            "torch.nn and torch.compile",
        ),
        (importlib.import_module("amp_C"), "multi_tensor_l2norm_scale", "amp_C.multi_tensor_l2norm"),
    ):
        with pytest.raises(AttributeError, match=f"has no {name}; use {instead}, "):
            getattr(package, name)
        path = package.__name__.removeprefix("fastvit.compat.")
        for lines in (f"from {path} import {name}", f"from fastvit.compat.{path} import {name}"):
            with pytest.raises(ImportError, match=f"{name}' in fastvit.compat; use {instead}, "):
                exec(lines)


def test_an_installed_apex_gets_the_parts_that_it_lacks(fake):
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
    with pytest.raises(AttributeError, match="apex: fastvit has no nothing; see docs/migrating"):
        _ = apex.nothing


# Names that are not there: None for a probe, and words for an import

ABSENT = (
    "apex.transformer apex.nothing apex.amp.opt apex.contrib.sparsity apex.contrib.optimizers.nothing "
    "apex.contrib.xentropy.softmax_xentropy.nothing apex.parallel.multiproc amp_C.nothing"
)


@pytest.mark.parametrize(("installed", "prefer"), [(False, "apex"), (True, "apex"), (True, "fastvit")])
def test_an_absent_module_is_none_for_a_probe_and_an_error_for_an_import(fake, prefer, installed):
    """An installed apex lacks the modules too."""
    fake({"apex/__init__.py": "", "apex/contrib/__init__.py": ""} if installed else {}, prefer)
    for name, prefix in itertools.product(ABSENT.split(), ("", "fastvit.compat.")):
        parent, _, last = name.rpartition(".")
        assert importlib.util.find_spec(prefix + name) is None
        assert not hasattr(importlib.import_module(prefix + parent), last)
        with pytest.raises(ModuleNotFoundError):  # as for any package
            importlib.util.find_spec(f"{prefix}{name}.deeper")
        for line in (
            f"import {prefix}{name}",
            f"import {prefix}{name}.deeper",
            f"from {prefix}{parent} import {last}",
            f"from {prefix}{name} import anything",
            f"__import__('importlib').import_module('{prefix}{name}')",
        ):
            with pytest.raises(
                ImportError, match=f"{last}' in fastvit.compat; .*docs/migrating-from-apex.md"
            ):
                exec(line)
        assert importlib.util.find_spec(name) is None  # after imports that failed


MODULES = """
    RNN RNN.models _autocast_utils amp.__version__ amp._initialize amp._process_optimizer amp.compat
    amp.lists.functional_overrides amp.lists.torch_overrides amp.opt amp.rnn_compat amp.utils amp.wrap
    contrib.bottleneck contrib.conv_bias_relu contrib.cudnn_gbn contrib.fmha contrib.focal_loss
    contrib.gpu_direct_storage contrib.group_norm contrib.groupbn contrib.index_mul_2d
    contrib.multihead_attn contrib.nccl_allocator contrib.openfold_triton contrib.peer_memory
    contrib.optimizers.distributed_fused_adam contrib.optimizers.distributed_fused_lamb contrib.sparsity
    contrib.torchsched contrib.transducer optimizers.fused_adagrad parallel.multiproc
    parallel.optimized_sync_batchnorm_kernel parallel.sync_batchnorm_kernel pyprof reparameterization
    transformer transformer.parallel_state
"""


def test_every_absent_module_of_apex_says_what_to_use(fake):
    fake({})
    for name in MODULES.split():
        with pytest.raises(ModuleNotFoundError, match=r"; use \S+.*, see docs/migrating-from-apex.md in "):
            importlib.import_module(f"apex.{name}")
    import apex

    for name in (
        "deprecated_warning",
        "DeprecatedFeatureWarning",
        "check_cudnn_version_and_warn",
        "transformer",
    ):
        with pytest.raises(AttributeError, match=f"has no {name}; use .*, see docs"):
            getattr(apex, name)
    with pytest.raises(AttributeError, match="use torch.nn.functional.layer_norm or rms_norm, see docs"):
        _ = apex.normalization.fused_layer_norm.manual_rms_norm


def test_missing_names_of_inplace_abn_name_its_page(fake):
    fake({})
    import inplace_abn

    assert not hasattr(inplace_abn, "_backend")
    for lines in ("inplace_abn.nothing", "from inplace_abn import nothing", "import inplace_abn.nothing"):
        with pytest.raises((ImportError, AttributeError), match="see docs/migrating-from-inplace-abn.md"):
            exec(lines)


@pytest.mark.parametrize(
    "name", ["apex", "amp_C", "apex.amp", "apex.contrib.clip_grad.clip_grad", "inplace_abn"]
)
def test_specs_load_the_modules_that_an_import_gives(fake, name):
    fake({})
    spec = importlib.util.find_spec(name)
    assert spec.name == name and os.path.isfile(spec.origin)
    assert (spec.submodule_search_locations is not None) == spec.origin.endswith("__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own_name = module.__spec__.name
    assert module is importlib.import_module(name) is sys.modules[own_name]
    assert own_name.startswith("fastvit.compat.")


# Import paths

PATHS = """
    amp.amp:half_function amp.amp:register_float_function amp.frontend:initialize amp.handle:scale_loss
    amp.scaler:LossScaler amp._amp_state:maybe_print amp.lists:functional_overrides
    contrib.clip_grad.clip_grad:clip_grad_norm_ contrib.layer_norm.layer_norm:_fast_layer_norm
    contrib.optimizers.fp16_optimizer:FP16_Optimizer contrib.optimizers.fused_adam:FusedAdam
    contrib.optimizers.fused_lamb:FusedLAMB contrib.optimizers.fused_sgd:FusedSGD
    contrib.xentropy.softmax_xentropy:SoftmaxCrossEntropyLoss fp16_utils.fp16_optimizer:FP16_Optimizer
    fp16_utils.fp16util:network_to_half fp16_utils.loss_scaler:DynamicLossScaler
    fused_dense.fused_dense:FusedDenseGeluDense mlp.mlp:mlp_function
    multi_tensor_apply.multi_tensor_apply:MultiTensorApply normalization.fused_layer_norm:fused_layer_norm
    optimizers.fused_adam:FusedAdam optimizers.fused_lamb:FusedLAMB optimizers.fused_novograd:FusedNovoGrad
    optimizers.fused_mixed_precision_lamb:FusedMixedPrecisionLamb optimizers.fused_sgd:FusedSGD
    parallel.LARC:LARC parallel.distributed:flat_dist_call parallel.optimized_sync_batchnorm:SyncBatchNorm
    parallel.sync_batchnorm:SyncBatchNorm
"""


@pytest.mark.parametrize("prefix", ["apex.", "fastvit.compat.apex."], ids=["apex", "fastvit"])
def test_deep_import_paths_of_apex_lead_to_one_module(fake, prefix):
    """Each is the first import of a script, by apex's name and by fastvit's own."""
    for path, _, name in (entry.partition(":") for entry in PATHS.split()):
        if prefix == "apex.":
            for loaded in [n for n in sys.modules if n.partition(".")[0] == "apex"]:
                del sys.modules[loaded]
            fake({})
        scope = {}
        exec(f"from {prefix}{path} import {name}\nimport {prefix}{path}", scope)
        module = importlib.import_module(f"fastvit.compat.apex.{path}")
        assert sys.modules[prefix + path] is module and scope[name] is getattr(module, name), path
        if isinstance(scope[name], type) and scope[name].__module__.startswith("fastvit.compat."):
            assert pickle.loads(f"c{prefix}{path}\n{name}\n.".encode()) is scope[name]


def test_each_module_is_loaded_once(fake):
    fake({})
    import apex
    import inplace_abn

    folder = os.path.dirname(apex.__file__)
    files = {str(path) for path in Path(folder).rglob("*.py")} | {inplace_abn.__file__}
    loaded = [m for n, m in sys.modules.items() if n.partition(".")[0] in ("apex", "inplace_abn")]
    assert {module.__file__ for module in loaded} == files
    assert len({id(module) for module in loaded}) == len(files)


def test_modules_that_only_an_installed_apex_has_are_its_own(fake):
    """Modules that only an installed apex has are apex's, whichever package is preferred."""
    files = ("transformer/__init__", "contrib/__init__", "contrib/sparsity/asp", "contrib/transducer", "mlp")
    files += (
        "contrib/sparsity/__init__",
        "contrib/optimizers/__init__",
        "contrib/optimizers/distributed_fused_adam",
    )
    for prefer in ("apex", "fastvit"):
        fake({f"apex/{file}.py": "real = True\n" for file in ("__init__", *files)}, prefer)
        for file in files:
            name = f"apex.{file.replace('/', '.').removesuffix('.__init__')}"
            module = importlib.import_module(name)
            assert hasattr(module, "real") == (name != "apex.mlp" or prefer == "apex"), name
        from apex.contrib.optimizers import FP16_Optimizer
        from apex.contrib.optimizers.fused_adam import FusedAdam
        from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss
        from apex.mlp import MLP

        compat = fastvit.compat.apex
        assert FP16_Optimizer is compat.FP16_Optimizer and FusedAdam is compat.optimizers.FusedAdam
        assert SoftmaxCrossEntropyLoss is compat.contrib.xentropy.SoftmaxCrossEntropyLoss
        assert MLP is compat.mlp.MLP
        with pytest.raises(ImportError, match="use torch.nn.MultiheadAttention, see docs"):
            importlib.import_module("apex.contrib.multihead_attn")
        for loaded in [n for n in sys.modules if n.partition(".")[0] == "apex"]:
            del sys.modules[loaded]


REAL = {
    "apex/__init__.py": "from . import amp\nreal = True\ndef __getattr__(name):\n"
    "    if name == 'lazy': return 7\n    raise AttributeError(name)\n",
    "apex/amp/__init__.py": "def initialize(): return 'real'\n",
    "apex/contrib.py": "real = True\n",
    "apex/transformer.py": "real = True\n",
    "inplace_abn.py": "class InPlaceABN: real = True\n",
}


def test_an_installed_package_is_used_for_the_parts_that_it_has(fake):
    fake(REAL)
    import apex
    import inplace_abn

    assert apex.amp.initialize() == "real" and apex.real and apex.lazy == 7
    assert apex.amp.scale_loss is fastvit.compat.apex.amp.scale_loss
    assert apex.parallel is fastvit.compat.apex.parallel
    assert inplace_abn.InPlaceABN.real and inplace_abn.ABN is fastvit.compat.inplace_abn.ABN


def test_fastvit_is_used_for_the_parts_that_it_has_if_preferred(fake):
    fake(REAL)
    install("fastvit")
    assert sum(isinstance(finder, _import_hook._CompatFinder) for finder in sys.meta_path) == 1
    import apex
    import inplace_abn
    from apex import contrib, transformer
    from apex.amp import initialize

    assert apex.amp is fastvit.compat.apex.amp and initialize is apex.amp.initialize
    assert apex.real and contrib.real and apex.lazy == 7  # the rest of it stays
    assert transformer.real
    assert inplace_abn is fastvit.compat.inplace_abn


@pytest.mark.parametrize(
    "broken",
    ["import not_there_at_all", "raise ImportError('no such symbol')"],
    ids=["missing_module", "missing_symbol"],
)
def test_fastvit_stands_in_for_an_apex_that_does_not_import(fake, broken):
    fake({"apex/__init__.py": f"from . import amp\n{broken}\n", "apex/amp.py": "real = True\n"})
    with pytest.warns(UserWarning, match="the installed apex fails to import"):
        import apex
    from apex.amp import initialize

    assert apex is fastvit.compat.apex and initialize is fastvit.compat.apex.amp.initialize
    assert sys.modules["apex.amp"] is fastvit.compat.apex.amp


def test_a_clone_of_apex_beside_the_script_is_no_package(fake):
    fake({"apex/apex/__init__.py": "real = True\n"})
    import apex

    assert apex is fastvit.compat.apex


def test_a_wrong_preference_is_refused():
    with pytest.raises(ValueError, match="prefer takes apex or fastvit, got 'torch'"):
        install("torch")


# Distributions, which programs such as transformers read before they import


def test_distributions_of_apex_and_inplace_abn_are_found(fake):
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
def test_the_distribution_of_an_installed_apex_is_its_own(fake, prefer):
    fake({"apex-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n"}, prefer)
    assert importlib.metadata.version("apex") == "0.1"
    assert [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] == "apex"] == ["0.1"]


# Names that 40 public repositories take from apex, by their newest sources in August 2026; 35 get every name

NAMES = """
    amp_C.multi_tensor_adam amp_C.multi_tensor_axpby amp_C.multi_tensor_l2norm amp_C.multi_tensor_lamb
    amp_C.multi_tensor_scale amp_C.multi_tensor_sgd amp_C.multi_tensor_unscale_l2norm
    apex.amp apex.amp._amp_state apex.amp.initialize apex.amp.load_state_dict apex.amp.master_params
    apex.amp.register_half_function apex.amp.scale_loss apex.amp.state_dict
    apex.contrib.clip_grad.clip_grad_norm_ apex.contrib.layer_norm.layer_norm.FastLayerNorm
    apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.contrib.layer_norm.layer_norm._fast_layer_norm
    apex.contrib.optimizers.FP16_Optimizer apex.contrib.xentropy apex.fp16_utils.network_to_half
    apex.mlp.MLP apex.mlp.MlpFunction.backward apex.mlp.MlpFunction.forward
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
    apex.contrib.optimizers.distributed_fused_adam._multi_tensor_copy apex.contrib.sparsity.ASP apex.pyprof
    apex.transformer.enums.AttnMaskType apex.transformer.functional.FusedScaleMaskSoftmax
    apex.transformer.functional.fused_softmax.FusedScaleMaskSoftmax apex.transformer.parallel_state
"""


def resolve(name):
    """Returns the text of the error of `from a.b import c`, `import a.b.c` or `a.b.Class.c`, or None."""
    head, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(head or name)
        head and hasattr(module, last) or importlib.import_module(name)
    except ImportError as error:
        parent, _, kind = head.rpartition(".")
        return None if hasattr(getattr(sys.modules.get(parent), kind, None), last) else str(error)


def test_names_that_public_repositories_import_resolve(fake):
    fake({}, prefer="fastvit")
    lacking = set(LACKING.split())
    missing = {name: error for name in (*NAMES.split(), *lacking) if (error := resolve(name))}
    assert missing.keys() == lacking
    for name, error in missing.items():
        assert "docs/migrating-from-apex.md" in error, (name, error)
