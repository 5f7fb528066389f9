"""The import hook that provides `apex`, with its compiled modules `amp_C` and `apex_C`, and `inplace_abn`.

An installed package is used for the parts that it has. Parts that it lacks, or that fail to import, come from
fastvit. Parts are modules (`apex.amp`) and names in modules (`apex.parallel.LARC`). An alias and fastvit's
name are the same module object, so they share their state.

`find_spec` of what neither has is None; its import, or use as an attribute, is an error that tells what to
use. Every module has a `__path__`, so that `from module import name` asks the hook for a name it lacks.
"""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

PREFERENCES = ("apex", "fastvit")
"""The package that provides a part that both have: the installed one, or fastvit."""

_VERSIONS = {"apex": "25.05", "inplace_abn": "1.1.0"}
"""The version of each package whose names fastvit provides."""

_ROOTS = (*_VERSIONS, "amp_C", "apex_C")

_PARTIAL = ("apex", "apex.contrib", "apex.contrib.optimizers")
"""Packages of which an installed apex provides the other parts, even where fastvit is preferred."""

_HERE = __name__.rpartition(".")[0]

_PATHS = {
    "apex.contrib.layer_norm": "apex.normalization.fused_layer_norm",
    "apex.contrib.optimizers": "apex.optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "apex.fp16_utils.fp16_optimizer",
} | {
    path: path.rpartition(".")[0]
    for path in """
        apex.amp.amp apex.contrib.clip_grad.clip_grad apex.contrib.layer_norm.layer_norm
        apex.contrib.xentropy.softmax_xentropy apex.fused_dense.fused_dense apex.mlp.mlp
        apex.multi_tensor_apply.multi_tensor_apply apex.parallel.optimized_sync_batchnorm
        apex.parallel.sync_batchnorm inplace_abn.abn inplace_abn.functions inplace_abn.group
    """.split()
}
"""Import paths that are no files here, and the module that has their names."""

_INSTEAD = {
    "amp_C.multi_tensor_adagrad": "torch.optim.Adagrad",
    "amp_C.multi_tensor_adam": "amp_C.multi_tensor_adam_capturable",
    "amp_C.multi_tensor_l2norm": "amp_C.multi_tensor_l2norm",
    "amp_C.multi_tensor_lamb": "amp_C.multi_tensor_lamb",
    "amp_C.update_scale_hysteresis": "torch.amp.GradScaler",
    "apex.DeprecatedFeatureWarning": "FutureWarning",
    "apex.RNN": "torch.nn.LSTM, GRU and RNN",
    "apex.RankInfoFormatter": "logging.Formatter",
    "apex._autocast_utils": "torch.amp.custom_fwd",
    "apex.amp": "amp.initialize",
    "apex.amp.AmpOptimizerState": "optimizer.param_groups, whose weights and gradients are float32",
    "apex.amp.AmpOptimizerState.params_have_scaled_gradients": "amp.scale_loss(..., delay_unscale=True)",
    "apex.amp._amp_state": "`raise RuntimeError(message)`",
    "apex.amp.frontend": "amp.frontend.opt_levels",
    "apex.amp.handle": "amp.initialize, with enabled=False for no casts",
    "apex.amp.handle.AmpHandle": "amp.scale_loss, and torch.clear_autocast_cache()",
    "apex.amp.lists": "amp.register_half_function",
    "apex.amp.lists.functional_overrides": "`from apex.amp.lists import functional_overrides`",
    "apex.amp.scaler": "amp_C.multi_tensor_scale, amp_C.multi_tensor_axpby",
    "apex.amp.scaler.LossScaler": "amp.scale_loss, which unscales gradients",
    "apex.check_cudnn_version_and_warn": "torch.backends.cudnn.version()",
    "apex.contrib": "torch.nn and torch.compile",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.optimizers": "FSDP2 or torch.distributed.optim.ZeroRedundancyOptimizer",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.deprecated_warning": "warnings.warn",
    "apex.fp16_utils": "fp16_utils.network_to_half",
    "apex.fp16_utils.FP16_Optimizer": "param_groups, loss_scaler, and the masters in state_dict()",
    "apex.handler": "logging.StreamHandler",
    "apex.normalization": "torch.nn.functional.layer_norm or rms_norm",
    "apex.optimizers.FusedAdagrad": "torch.optim.Adagrad",
    "apex.optimizers.FusedAdam": 'optimizer.state[parameter]["master_param"]',
    "apex.optimizers.FusedAdam.multi_tensor_adam": "amp_C.multi_tensor_adam_capturable",
    "apex.optimizers.FusedMixedPrecisionLamb": 'optimizer.state[parameter]["master_param"]',
    "apex.optimizers.fused_adagrad": "torch.optim.Adagrad",
    "apex.parallel": "torch.distributed",
    "apex.parallel.DistributedDataParallel": "the gradients of parameters(), reduced after each backward",
    "apex.parallel.distributed": "apex.parallel.distributed.flat_dist_call",
    "apex.parallel.multiproc": "torchrun",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron-Core",
}
"""What is to be used for names that are not there, and for longer names that begin so."""


def _ours(name: str) -> ModuleSpec | None:
    """The spec of fastvit's module for `name`, or None."""
    try:
        return importlib.util.find_spec(f"{_HERE}.{_PATHS.get(name, name)}")
    except ModuleNotFoundError:  # of the parent
        return None


def _where_to_read(name: str) -> str:
    page = "inplace-abn" if name.startswith("inplace_abn") else "apex"
    while name and name not in _INSTEAD:
        name = re.sub(r"(^|[._])[^._]*$", "", name)
    see = f"see docs/migrating-from-{page}.md in fastvit's repository, or install {page} from source too"
    return f"use {_INSTEAD[name]}, {see}" if name else see


def without(owner: str) -> Callable[..., NoReturn]:
    """The `__getattr__` of a module or class, whose error says what to use for a name that is not there."""

    def missing(*self_and_name: Any) -> NoReturn:
        name = self_and_name[-1]
        raise AttributeError(f"{owner}: fastvit has no {name}; {_where_to_read(f'{owner}.{name}')}")

    return missing


def finish(package: str) -> None:
    """Loads all modules of a package, and gives them the import paths of `_PATHS` and errors that say what to
    use for names that are not there.
    """
    for found in pkgutil.walk_packages(getattr(sys.modules[package], "__path__", []), f"{package}."):
        importlib.import_module(found.name)
    for name, module in _inside(package).items():
        vars(module).setdefault("__getattr__", without(name.removeprefix(f"{_HERE}.")))
        vars(module).setdefault("__path__", [])
    for path, target in _PATHS.items():
        alias = f"{_HERE}.{path}"
        if alias.startswith(f"{package}."):
            _share(f"{_HERE}.{target}", alias)
            parent, _, child = alias.rpartition(".")
            vars(sys.modules[parent]).setdefault(child, sys.modules[alias])


def _inside(package: str) -> dict[str, ModuleType]:
    return {n: module for n, module in sys.modules.copy().items() if f"{n}.".startswith(f"{package}.")}


def _share(name: str, alias: str) -> None:
    """Makes `alias` a name of the module `name` too, and so for the modules in it. A second copy of one would
    have a state of its own, and its import would bind it in its parent, over a class of its name (LARC).
    """
    sys.modules.update({alias + n.removeprefix(name): module for n, module in _inside(name).items()})


class _Alias(Loader):
    """Loads fastvit's module under the name of the other package."""

    def __init__(self, ours: ModuleSpec, name: str) -> None:
        self._ours, self._name = ours, name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._ours.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._ours  # the import system has put the alias's there
        _share(self._ours.name, self._name)


class _Completed:
    """Loads an installed module, and looks names that it lacks up in fastvit's."""

    def __init__(self, loader: Any, name: str, target: str) -> None:
        self._loader, self._name, self._target = loader, name, target

    def __getattr__(self, attribute: str) -> Any:  # create_module, get_source, is_package, ...
        return getattr(self._loader, attribute)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            warnings.warn(
                f"fastvit.compat: the installed {self._name} fails to import ({error}); using {self._target}",
                stacklevel=2,
            )
            for name in _inside(self._name):
                del sys.modules[name]
            importlib.import_module(self._target)
            _share(self._target, self._name)
            return
        own = vars(module).get("__getattr__", without(self._name))

        def missing(attribute: str) -> Any:
            with contextlib.suppress(AttributeError):
                return own(attribute)
            if attribute.startswith("__"):
                raise AttributeError(f"module {self._name!r} has no attribute {attribute!r}")
            if _ours(f"{self._name}.{attribute}"):
                return importlib.import_module(f"{self._name}.{attribute}")
            return getattr(importlib.import_module(self._target), attribute)

        vars(module)["__getattr__"] = missing


class _Distribution(Distribution):
    """The metadata of a package that is not installed and that fastvit replaces."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        name, version = self._name, _VERSIONS[self._name]
        summary = f"fastvit.compat in place of {name}, compatible with {version}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+fastvit\nSummary: {summary}\n"
        return {"top_level.txt": f"{name}\n", "METADATA": metadata}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    def __init__(self, prefer: str) -> None:
        self.prefer = prefer

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        wanted = context and context.name and context.name.lower().replace("-", "_")
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_distributions")]
        for name in _VERSIONS:
            named = DistributionFinder.Context(name=name)
            found = (distribution for f in others for distribution in f.find_distributions(named))
            if wanted in (None, name) and next(found, None) is None:
                yield _Distribution(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        part = name.removeprefix(f"{_HERE}.")
        if part.partition(".")[0] not in _ROOTS:
            return None
        # `from apex import amp` asks for fastvit's name too, since the module has that one.
        find = self._provided if part == name else PathFinder.find_spec
        spec = find(name, path, target)
        # An import gets words, importlib.util.find_spec None. The attribute `name` of an import's error stays
        # empty: `from apex import name` would take the error for its own.
        if spec is None and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(f"No module named {part!r} in fastvit.compat; {_where_to_read(part)}")
        return spec

    def _provided(self, name: str, *where: Any) -> ModuleSpec | None:
        ours, parent = _ours(name), name.rpartition(".")[0]
        preferred = ours and self.prefer == "fastvit" and name not in _PARTIAL
        # A search on the path of a package of fastvit's would load a second copy.
        in_ours = parent in sys.modules and sys.modules[parent] is sys.modules.get(f"{_HERE}.{parent}")
        real = None if preferred or in_ours else self._real(name, *where)
        if real is None and ours:
            real = ModuleSpec(name, _Alias(ours, name), origin=ours.origin)
            real.submodule_search_locations = ours.submodule_search_locations
        elif real and ours:
            real.loader = cast(Loader, _Completed(real.loader, name, ours.name))
        return real

    def _real(self, name: str, *where: Any) -> ModuleSpec | None:
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(name, *where) for finder in others)
        # A folder without __init__.py (no origin), such as a clone of apex beside the script, is no package.
        return next((spec for spec in found if spec and spec.loader and spec.origin), None)


def install(prefer: str = "apex") -> None:
    """Makes `import apex` and `import inplace_abn` work in this process and in those that it starts. Call it
    before the first such import, or again to change `prefer`.

    Args:
        prefer: "apex" uses an installed package for the parts that it has, "fastvit" does not.

    Raises:
        ValueError: `prefer` is neither.
    """
    if prefer not in PREFERENCES:
        raise ValueError(f"fastvit.compat.install: prefer takes {' or '.join(PREFERENCES)}, got {prefer!r}")
    os.environ["FASTVIT_COMPAT"] = prefer
    _install_in_children()
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.prefer = prefer
            return
    sys.meta_path.insert(0, _Finder(prefer))


def _install_in_children() -> None:
    """By the environment, which `subprocess`, `os.exec*` and torch.multiprocessing all hand on."""
    folder, path = str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH", "")
    if path.partition(os.pathsep)[0] != folder:
        os.environ["PYTHONPATH"] = folder + (os.pathsep + path if path else "")
