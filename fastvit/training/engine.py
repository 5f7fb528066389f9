"""Where amp, FusedAdam, SyncBatchNorm and DistributedDataParallel with apex's names come from."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from .config import ConfigError

__all__ = ["engine_part"]

APEX_PARTS = ("amp", "parallel", "optimizers")


def engine_part(engine: str, part: str) -> ModuleType:
    """The module ``amp``, ``parallel`` or ``optimizers``: NVIDIA apex's own, or fastvit's look-alike.

    Args:
        engine: ``apex`` or ``torch``.

    Raises:
        ConfigError: ``apex`` was asked for, and what is installed under that name has not all of the parts.
    """
    if engine == "torch":
        return importlib.import_module(f"fastvit.compat.apex.{part}")
    if find_spec("apex") is None:
        raise ConfigError(
            "--engine apex needs NVIDIA apex, which is not installed; --engine torch needs none of it"
        )
    missing = []
    for name in APEX_PARTS:
        try:
            importlib.import_module(f"apex.{name}")
        except ImportError:
            missing.append(f"apex.{name}")
    if missing:
        raise ConfigError(
            f"--engine apex needs {', '.join(missing)}, which the installed apex has not (apex removed "
            f"amp and parallel after release 25.05); --engine torch offers the same levels"
        )
    return importlib.import_module(f"apex.{part}")
