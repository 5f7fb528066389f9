"""Checks `convert(skip=)`: pairs of a block's name and an op's name, in the form that `report` prints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from ..recompute import is_op_name, list_recomputable_ops
from .blocks import name_scoped_modules

_NUM_NEAREST = 3  # Names that an error suggests.


def check_skip(model: nn.Module, skip: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Returns the pairs of `skip`.

    Raises:
        ValueError: an element is no pair, `model` has no such block, or no op has such a name.
    """
    pairs = list(skip) if isinstance(skip, Iterable) else [skip]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
            raise ValueError(
                "convert: skip must have pairs of a block's name and an op's name, such as "
                f"('blocks.3', 'gelu'), got {pair!r}"
            )
    blocks = list(name_scoped_modules(model).values()) if pairs else []
    for block, op in pairs:
        if block not in blocks:
            raise ValueError(f"convert: skip must have names of blocks ({blocks}), got {block!r}")
        _check_op_name(op)
    return frozenset(pairs)


def _check_op_name(op: str) -> None:
    if not is_op_name(op):
        nearest = difflib.get_close_matches(op, list_recomputable_ops(), _NUM_NEAREST, cutoff=0)
        raise ValueError(
            f"convert: skip must have names of ops as fastvit.report prints them, got {op!r}; "
            f"the nearest names are {', '.join(map(repr, nearest))}"
        )
