"""Checks `convert(skip=)`: pairs of a block's name and an op's name, in the form that `report` prints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.autograd import Function

from ..recompute.masks import ACTIVATION_MASKS
from ..recompute.policy import display_op_name, op_name
from ..recompute.recompute_rules import RECOMPUTE_RULES
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
    # Outputs of ops without a rule are always kept, but a report may name these ops, so they are accepted.
    recomputable = _list_op_names(("Dropout", *RECOMPUTE_RULES, *ACTIVATION_MASKS))
    if op not in recomputable and op not in _list_op_names(
        (*dir(torch._C._functions), *_iterate_function_nodes())
    ):
        nearest = difflib.get_close_matches(op, sorted(recomputable), _NUM_NEAREST, cutoff=0)
        raise ValueError(
            f"convert: skip must have names of ops as fastvit.report prints them, got {op!r}; "
            f"the nearest names are {', '.join(map(repr, nearest))}"
        )


def _list_op_names(node_names: Iterable[str]) -> set[str]:
    """Returns the names that a report prints for the ops of autograd nodes, and their plain names."""
    return {name for node in node_names for name in (display_op_name(node), op_name(node)) if name}


def _iterate_function_nodes() -> Iterator[str]:
    """Yields the node names of all classes of torch.autograd.Function that exist."""
    classes = [Function]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        yield f"{cls.__name__}Backward"
