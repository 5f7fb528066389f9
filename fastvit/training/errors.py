"""The error that ends a run on every rank, and the check for the packages a run needs."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["MissingPackage", "TrainingError", "check_packages"]

_PACKAGES = {
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "tqdm": "tqdm",
    "safetensors": "safetensors",
}


class TrainingError(RuntimeError):
    """Something ended the run, and every rank raises this with the same message at the same point."""


class MissingPackage(RuntimeError):
    """A package of the extra ``train`` is not installed."""


def check_packages() -> None:
    """Raise MissingPackage, naming all that is missing, before a run starts any work."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise MissingPackage(
            f"the trainer needs {', '.join(missing)}, which is not installed: pip install 'fastvit[train]'"
        )
