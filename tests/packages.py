"""Imports packages that only some tests need."""

import contextlib
import importlib

import pytest
from real_models import import_torchvision

from fastvit.training.nvidia_apex import import_apex


def import_or_skip(name: str):
    """Returns a package, or skips the test and says why."""
    try:
        with contextlib.suppress(ImportError):
            import_torchvision()  # timm imports torchvision; no test calls an operator of torchvision
        return importlib.import_module(name)
    except Exception as error:  # a package that does not fit the installed torch raises errors of any kind
        pytest.skip(f"{name} cannot be imported: {error}")


def import_apex_or_skip(module_name: str):
    """Returns a module of NVIDIA apex, or skips the test and says why."""
    try:
        return import_apex(module_name)
    except ImportError as error:
        pytest.skip(f"no apex.{module_name}; FASTVIT_APEX may name a folder of apex 25.05: {error}")
