"""O0 to O3: four sets of defaults, and the options that override them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

__all__ = ["LEVELS", "Properties", "choose"]


@dataclass(frozen=True)
class Properties:
    """The options of one `amp.initialize`. None means that the level does not use the option."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}
"""O0: float32. O1: autocast around forward. O2: half weights, float32 BatchNorm and masters. O3: half."""


def _flag(name: str, value: Any) -> bool:
    value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise ValueError(f"amp.initialize: {name} takes True, False or None, got {value!r}")
    return value


def _loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ValueError(f"amp.initialize: loss_scale takes 'dynamic' or a number above 0, got {value!r}")
    return number


def choose(opt_level: str, overrides: dict[str, Any]) -> Properties:
    """The level's defaults with every override that is not None.

    Raises:
        RuntimeError: an unknown level, or an override that contradicts the level.
        ValueError: an override of a wrong type.
    """
    if opt_level not in LEVELS:
        raise RuntimeError(f"amp.initialize: opt_level takes 'O0', 'O1', 'O2' or 'O3', got {opt_level!r}")
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        if name in given:
            given[name] = _flag(name, given[name])
    if "loss_scale" in given:
        given["loss_scale"] = _loss_scale(given["loss_scale"])
    cast = given.get("cast_model_type")
    if cast is False:
        given["cast_model_type"] = None
    elif cast is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise ValueError(
            f"amp.initialize: cast_model_type takes a floating-point dtype, False or None, got {cast!r}"
        )
    if opt_level == "O1":
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise RuntimeError(
                    f"amp.initialize: {name} has no effect under O1, whose weights are float32; leave it out"
                )
    elif given.get("patch_torch_functions"):
        raise RuntimeError(f"amp.initialize: patch_torch_functions=True is for O1, got it with {opt_level}")
    return replace(LEVELS[opt_level], **given)
