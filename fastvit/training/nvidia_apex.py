"""Imports NVIDIA apex, for `--norm apex-sync` and for comparisons."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import torch


def import_apex(name: str) -> ModuleType:
    """Returns the module `apex.<name>` of NVIDIA apex, from the folder FASTVIT_APEX or as installed.

    The folder is a clone of apex at release 25.05, or an unpacked archive of it; it need not be compiled.
    apex's Python code runs on the CPU too. Without a GPU its NVTX ranges are disabled.

    Raises:
        ImportError: apex is not found, or has no such module.
    """
    folder = os.environ.get("FASTVIT_APEX")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(f"apex.{name}")
    if module.__name__ != f"apex.{name}":  # fastvit.compat provides missing modules of apex.
        raise ImportError(f"apex.{name} is {module.__name__} of fastvit, not NVIDIA's")
    if not torch.cuda.is_available():
        nvtx = torch.cuda.nvtx
        nvtx.range_push = nvtx.range_pop = lambda *_: -1  # type: ignore[assignment]
    return module
