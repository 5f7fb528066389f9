"""The error that ends a run on every rank, and the check for the packages a run needs."""

from __future__ import annotations

from importlib.util import find_spec

from .config import Config

__all__ = ["MissingPackage", "TrainingError", "check_packages"]

_PACKAGES = {"numpy": "numpy", "tensorboard": "tensorboard", "tqdm": "tqdm"}
_FOR_DATA = {"digits": ("sklearn", "scikit-learn"), "folder": ("PIL", "pillow")}


class TrainingError(RuntimeError):
    """An error that ends the run. Every rank raises it with the same message at the same point."""


class MissingPackage(RuntimeError):
    """A package that this run needs is not installed."""


def check_packages(config: Config) -> None:
    """Raise MissingPackage with the names of all missing packages, before a run starts."""
    needed = _PACKAGES | dict([_FOR_DATA[config.data]] if config.data in _FOR_DATA else [])
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise MissingPackage(
            f"the trainer needs {', '.join(missing)}, which is not installed: pip install 'fastvit[train]'"
        )
    if config.model.startswith("timm/") and find_spec("timm") is None:
        raise MissingPackage(f"--model {config.model} needs timm, which is not installed: pip install timm")
