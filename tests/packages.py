"""Packages that only some tests need."""

import contextlib
import importlib

import pytest
from real_models import import_torchvision

from fastvit.training.nvidia_apex import import_apex


def package(name: str):
    """Imports the package, or skips the test with the reason."""
    try:
        with contextlib.suppress(ImportError):
            import_torchvision()  # timm imports it, and no model here calls its operators
        return importlib.import_module(name)
    except Exception as error:  # what does not fit the installed torch fails in its own ways
        pytest.skip(f"{name} cannot be imported: {error}")


def apex(part: str):
    """Imports a part of NVIDIA apex, or skips the test with the reason."""
    try:
        return import_apex(part)
    except ImportError as error:
        pytest.skip(f"FASTVIT_APEX may be a folder of apex 25.05's sources: {error}")
