"""The import hook that provides `apex`, with its compiled modules `amp_C` and `apex_C`, and `inplace_abn`.

An installed package is used for the parts that it has. Parts that it lacks, or that fail to import, come from
fastvit. Parts are modules (`apex.amp`) and names in modules (`apex.parallel.LARC`). An alias and fastvit's
name are the same module object, so they share their state.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PREFERENCES = ("apex", "fastvit")
"""The package that provides a part that both have: the installed one, or fastvit."""

_VERSIONS = {"apex": "25.05", "inplace_abn": "1.1.0"}
"""The version of each package whose names fastvit provides."""

_ROOTS = (*_VERSIONS, "amp_C", "apex_C")

_PARTIAL = ("apex", "apex.contrib", "apex.contrib.optimizers")
"""Packages of which an installed apex provides the other parts, even where fastvit is preferred."""

_INSTEAD = {
    "amp_C.multi_tensor_unscale_l2norm": "amp_C.multi_tensor_l2norm",
    "apex.amp.lists.tensor_overrides": "amp.register_half_function",
    "apex.amp.lists.torch_overrides": "amp.register_half_function",
    "apex.amp.AmpOptimizerState": "optimizer.param_groups, whose weights and gradients are float32",
    "apex.amp.AmpOptimizerState.params_have_scaled_gradients": "amp.scale_loss(..., delay_unscale=True)",
    "apex.amp._amp_state": "`raise RuntimeError(message)`",
    "apex.amp.frontend": "amp.frontend.opt_levels",
    "apex.amp.handle": "amp.initialize, with enabled=False for no casts",
    "apex.amp.handle.AmpHandle": "amp.scale_loss, and torch.clear_autocast_cache()",
    "apex.amp.init": "amp.initialize",
    "apex.amp.scaler": "amp_C.multi_tensor_scale, amp_C.multi_tensor_axpby",
    "apex.amp.scaler.LossScaler": "amp.scale_loss, which unscales gradients",
    "apex.fp16_utils.FP16Model": "fp16_utils.network_to_half",
    "apex.fp16_utils.FP16_Optimizer": "param_groups, loss_scaler, and the masters in state_dict()",
    "apex.fp16_utils.convert_module": "fp16_utils.network_to_half",
    "apex.fp16_utils.convert_network": "fp16_utils.network_to_half",
    "apex.fp16_utils.fp16util": "fp16_utils.network_to_half",
    "apex.optimizers.FusedAdagrad": "torch.optim.Adagrad",
    "apex.parallel.DistributedDataParallel": "the gradients of parameters(), reduced after each backward",
    "apex.parallel.distributed": "apex.parallel.distributed.flat_dist_call",
}
"""What is to be used for names that are not there."""

_HERE = __name__.rpartition(".")[0]


def _ours(name: str) -> str | None:
    """fastvit's module for `name`, or None."""
    target = f"{_HERE}.{name}"
    try:
        return target if importlib.util.find_spec(target) else None
    except ModuleNotFoundError:  # the parent is no package
        return None


def _where_to_read(name: str) -> str:
    instead = _INSTEAD.get(name) or _INSTEAD.get(name.rpartition(".")[0])
    return f"{f'use {instead}, ' if instead else ''}see docs/migrating-from-apex.md"


def _missing(name: str) -> ModuleNotFoundError:
    # Without the attribute `name`, by which `from apex import name` would take the error for its own.
    return ModuleNotFoundError(f"No module named {name!r} in fastvit.compat; {_where_to_read(name)}")


def without(owner: str) -> Callable[..., NoReturn]:
    """The `__getattr__` of a module or class, whose error says what to use for a name that is not there."""

    def missing(*self_and_name: Any) -> NoReturn:
        name = self_and_name[-1]
        raise AttributeError(f"{owner}: fastvit has no {name}; {_where_to_read(f'{owner}.{name}')}")

    return missing


def _is_ours(name: str) -> bool:
    return name in sys.modules and sys.modules[name] is sys.modules.get(f"{_HERE}.{name}")


class _Alias(Loader):
    """Loads fastvit's module under the name of the other package."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules. Submodules get entries too, since importing one
        # later would bind it in its parent, over a class of the same name (LARC).
        alias, real = module.__name__, importlib.import_module(self.target)
        inside = {n: m for n, m in sys.modules.items() if n.startswith(f"{self.target}.")}
        sys.modules.update({alias + name.removeprefix(self.target): m for name, m in inside.items()})
        sys.modules[alias] = real


class _Completed(Loader):
    """Loads an installed module, and looks names that it lacks up in fastvit's."""

    def __init__(self, loader: Loader, name: str, target: str) -> None:
        self._loader, self._name, self._target = loader, name, target

    def __getattr__(self, attribute: str) -> Any:  # get_source, is_package, ...
        return getattr(self._loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            warnings.warn(
                f"fastvit.compat: the installed {self._name} fails to import ({error}); using {self._target}",
                stacklevel=2,
            )
            for name in list(sys.modules):
                if name.startswith(f"{self._name}.") and not _is_ours(name):
                    del sys.modules[name]
            sys.modules[self._name] = importlib.import_module(self._target)
            return
        self._complete(module)

    def _complete(self, module: ModuleType) -> None:
        own = module.__dict__.get("__getattr__")

        def missing(attribute: str) -> Any:
            if own is not None:
                try:
                    return own(attribute)
                except AttributeError:
                    pass
            if not attribute.startswith("__"):
                if _ours(f"{self._name}.{attribute}"):
                    return importlib.import_module(f"{self._name}.{attribute}")
                value = getattr(importlib.import_module(self._target), attribute, module)
                if value is not module:
                    return value
            raise AttributeError(f"module {self._name!r} has no attribute {attribute!r}")

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

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = name.removeprefix(f"{_HERE}.").partition(".")[0]
        if root not in _ROOTS:
            return None
        if name.startswith(f"{_HERE}."):  # as `from apex import amp` asks for it: the module has this name
            if PathFinder.find_spec(name, path) is None:
                raise _missing(name.removeprefix(f"{_HERE}."))
            return None
        ours = _ours(name)
        if _is_ours(root):  # a search on the package's path would load a second copy
            if not ours:  # as without any apex; returning None would leave out the reason
                raise _missing(name)
            return self._alias(name, ours)
        if ours and self.prefer == "fastvit" and name not in _PARTIAL:
            return self._alias(name, ours)
        spec = self._real(name, path, target)
        if spec is None:
            return self._alias(name, ours) if ours else None
        if ours and spec.loader:
            spec.loader = _Completed(spec.loader, name, ours)
        return spec

    def _real(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            # A folder without __init__.py (no origin), such as a clone of apex beside the script, is no
            # package.
            if spec is not None and spec.loader is not None and spec.origin is not None:
                return spec
        return None

    @staticmethod
    def _alias(name: str, target: str) -> ModuleSpec:
        spec = importlib.util.find_spec(target)
        assert spec
        return ModuleSpec(name, _Alias(target), is_package=spec.submodule_search_locations is not None)


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
