"""The import hook that provides `apex`, with its compiled modules `amp_C` and `apex_C`, and `inplace_abn`.

An installed package provides the parts that it has. fastvit provides parts that the package lacks, and parts
that fail to import. A part is a module (`apex.amp`) or a name in a module (`apex.parallel.LARC`). An alias
and fastvit's name are the same module object, so both share one state.

`find_spec` returns None for a part that neither package has. The import of such a part, or its use as an
attribute, raises an error that says what to use instead. Every module has a `__path__`, so that
`from module import name` asks the hook for a name that the module lacks.
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
"""Values of `prefer`: the installed package, or fastvit, provides a part that both have."""

_VERSIONS = {"apex": "25.05", "inplace_abn": "1.1.0"}
"""The version of each package whose names fastvit provides."""

_PROVIDED_PACKAGES = (*_VERSIONS, "amp_C", "apex_C")

_INSTALLED_FIRST = ("apex", "apex.contrib", "apex.contrib.optimizers")
"""Packages that an installed apex provides, even if fastvit is preferred: fastvit lacks parts of them."""

_COMPAT_PACKAGE = __name__.rpartition(".")[0]

_ALIASED_PATHS = {
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
"""Maps an import path that is no file of fastvit.compat to the module that has its names."""

_ALTERNATIVES = {
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
"""Maps a name that fastvit lacks to what a script should use instead. A longer name takes the entry of its
longest prefix.
"""


def _find_fastvit_spec(name: str) -> ModuleSpec | None:
    """Returns the spec of fastvit's module for the import path `name`, or None."""
    try:
        return importlib.util.find_spec(f"{_COMPAT_PACKAGE}.{_ALIASED_PATHS.get(name, name)}")
    except ModuleNotFoundError:  # fastvit lacks the parent package too
        return None


def _format_migration_hint(name: str) -> str:
    """Returns the end of an error message: what to use for `name`, and which page explains that."""
    page = "inplace-abn" if name.startswith("inplace_abn") else "apex"
    while name and name not in _ALTERNATIVES:
        name = re.sub(r"(^|[._])[^._]*$", "", name)
    hint = f"see docs/migrating-from-{page}.md in fastvit's repository, or install {page} from source too"
    return f"use {_ALTERNATIVES[name]}, {hint}" if name else hint


def missing_attribute_getter(owner: str) -> Callable[..., NoReturn]:
    """Returns a `__getattr__` for the module or class `owner`, which raises AttributeError.

    The error says what to use instead of the missing name.
    """

    def raise_missing(*self_and_name: Any) -> NoReturn:  # a module's `__getattr__` gets no self
        name = self_and_name[-1]
        raise AttributeError(f"{owner}: fastvit has no {name}; {_format_migration_hint(f'{owner}.{name}')}")

    return raise_missing


def set_up_package(package: str) -> None:
    """Loads all modules of a package of fastvit.compat. Adds the import paths of `_ALIASED_PATHS`, and a
    `__getattr__` that says what to use for a missing name.
    """
    for module_info in pkgutil.walk_packages(getattr(sys.modules[package], "__path__", []), f"{package}."):
        importlib.import_module(module_info.name)
    for name, module in _find_loaded_modules(package).items():
        getter = missing_attribute_getter(name.removeprefix(f"{_COMPAT_PACKAGE}."))
        vars(module).setdefault("__getattr__", getter)
        vars(module).setdefault("__path__", [])
    for path, target in _ALIASED_PATHS.items():
        alias = f"{_COMPAT_PACKAGE}.{path}"
        if alias.startswith(f"{package}."):
            _alias_modules(f"{_COMPAT_PACKAGE}.{target}", alias)
            parent, _, child = alias.rpartition(".")
            vars(sys.modules[parent]).setdefault(child, sys.modules[alias])


def _find_loaded_modules(package: str) -> dict[str, ModuleType]:
    """Returns the package and its loaded modules, by name."""
    return {n: module for n, module in sys.modules.copy().items() if f"{n}.".startswith(f"{package}.")}


def _alias_modules(name: str, alias: str) -> None:
    """Registers the module `name` and the modules in it under `alias` too.

    Otherwise an import of the alias would load a second copy of the module, with a state of its own. That
    import would also bind the copy in the parent package, over a class of the same name (LARC).
    """
    modules = _find_loaded_modules(name).items()
    sys.modules.update({alias + n.removeprefix(name): module for n, module in modules})


class _AliasLoader(Loader):
    """Loads fastvit's module under the name of the other package."""

    def __init__(self, fastvit_spec: ModuleSpec, name: str) -> None:
        self._fastvit_spec, self._name = fastvit_spec, name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._fastvit_spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._fastvit_spec  # the import system has set the spec of the alias
        _alias_modules(self._fastvit_spec.name, self._name)


class _CompletingLoader:
    """Loads an installed module, and takes names that the module lacks from fastvit's module `target`."""

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
            for name in _find_loaded_modules(self._name):
                del sys.modules[name]
            importlib.import_module(self._target)
            _alias_modules(self._target, self._name)
            return
        self._add_fallback_names(module)

    def _add_fallback_names(self, module: ModuleType) -> None:
        installed_getattr = vars(module).get("__getattr__", missing_attribute_getter(self._name))

        def get_fallback(attribute: str) -> Any:
            with contextlib.suppress(AttributeError):
                return installed_getattr(attribute)
            if attribute.startswith("__"):
                raise AttributeError(f"module {self._name!r} has no attribute {attribute!r}")
            if _find_fastvit_spec(f"{self._name}.{attribute}"):
                return importlib.import_module(f"{self._name}.{attribute}")
            return getattr(importlib.import_module(self._target), attribute)

        vars(module)["__getattr__"] = get_fallback


class _Distribution(Distribution):
    """The metadata of a package that fastvit replaces because it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        name, version = self._name, _VERSIONS[self._name]
        summary = f"fastvit.compat in place of {name}, compatible with {version}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+fastvit\nSummary: {summary}\n"
        return {"top_level.txt": f"{name}\n", "METADATA": metadata}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


class _CompatFinder(DistributionFinder):
    def __init__(self, prefer: str) -> None:
        self.prefer = prefer

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        requested_name = context and context.name and context.name.lower().replace("-", "_")
        other_finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_distributions")]
        for name in _VERSIONS:
            name_context = DistributionFinder.Context(name=name)
            installed = (d for finder in other_finders for d in finder.find_distributions(name_context))
            if requested_name in (None, name) and next(installed, None) is None:
                yield _Distribution(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        import_path = name.removeprefix(f"{_COMPAT_PACKAGE}.")
        if import_path.partition(".")[0] not in _PROVIDED_PACKAGES:
            return None
        # `from apex import amp` asks for fastvit's name too, because fastvit's module has that `__name__`.
        find_module_spec = self._find_part if import_path == name else PathFinder.find_spec
        spec = find_module_spec(name, path, target)
        # The frame tells an import, which raises an error with a hint, from importlib.util.find_spec, which
        # returns None. The error has no `name`: `from apex import x` suppresses an error with that name.
        if spec is None and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            hint = _format_migration_hint(import_path)
            raise ModuleNotFoundError(f"No module named {import_path!r} in fastvit.compat; {hint}")
        return spec

    def _find_part(self, name: str, *search_arguments: Any) -> ModuleSpec | None:
        """Returns the spec of the installed module, completed by fastvit's, or that of fastvit's module."""
        fastvit_spec, parent = _find_fastvit_spec(name), name.rpartition(".")[0]
        uses_fastvit = fastvit_spec and self.prefer == "fastvit" and name not in _INSTALLED_FIRST
        # A search on the path of one of fastvit's packages would load a second copy.
        fastvit_parent = sys.modules.get(f"{_COMPAT_PACKAGE}.{parent}")
        is_parent_alias = parent in sys.modules and sys.modules[parent] is fastvit_parent
        spec = None if uses_fastvit or is_parent_alias else self._find_installed(name, *search_arguments)
        if spec is None and fastvit_spec:
            return self._make_alias_spec(name, fastvit_spec)
        if spec and fastvit_spec:
            spec.loader = cast(Loader, _CompletingLoader(spec.loader, name, fastvit_spec.name))
        return spec

    def _make_alias_spec(self, name: str, fastvit_spec: ModuleSpec) -> ModuleSpec:
        spec = ModuleSpec(name, _AliasLoader(fastvit_spec, name), origin=fastvit_spec.origin)
        spec.submodule_search_locations = fastvit_spec.submodule_search_locations
        return spec

    def _find_installed(self, name: str, *search_arguments: Any) -> ModuleSpec | None:
        other_finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (finder.find_spec(name, *search_arguments) for finder in other_finders)
        # A folder without __init__.py has no origin. Such a folder is no package: it may be a clone of apex
        # beside the script.
        return next((spec for spec in specs if spec and spec.loader and spec.origin), None)


def install(prefer: str = "apex") -> None:
    """Makes `import apex` and `import inplace_abn` work in this process and in the processes that it starts.

    Call `install` before the first of these imports, or again to change `prefer`.

    Args:
        prefer: with "apex" an installed package provides the parts that it has; with "fastvit" fastvit
            provides all parts that it has.

    Raises:
        ValueError: `prefer` is neither "apex" nor "fastvit".
    """
    if prefer not in PREFERENCES:
        raise ValueError(f"fastvit.compat.install: prefer takes {' or '.join(PREFERENCES)}, got {prefer!r}")
    os.environ["FASTVIT_COMPAT"] = prefer
    _install_in_subprocesses()
    for finder in sys.meta_path:
        if isinstance(finder, _CompatFinder):
            finder.prefer = prefer
            return
    sys.meta_path.insert(0, _CompatFinder(prefer))


def _install_in_subprocesses() -> None:
    """Puts the folder of the start-up hook on PYTHONPATH, which `subprocess`, `os.exec*` and
    torch.multiprocessing pass to new processes.
    """
    hook_dir, path = str(Path(__file__).parent / "subprocess_hook"), os.environ.get("PYTHONPATH", "")
    if path.partition(os.pathsep)[0] != hook_dir:
        os.environ["PYTHONPATH"] = hook_dir + (os.pathsep + path if path else "")
