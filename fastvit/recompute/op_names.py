"""The names of ops that `report` prints and `convert(skip=)` takes."""

from collections.abc import Iterable, Iterator

import torch
from torch.autograd import Function

from .masks import ACTIVATION_MASKS
from .policy import display_op_name, op_name
from .recompute_rules import RECOMPUTE_RULES


def list_recomputable_ops() -> list[str]:
    """Returns the names of ops whose outputs a scope may recompute, or replace by a mask."""
    return sorted(_name_ops(("Dropout", *RECOMPUTE_RULES, *ACTIVATION_MASKS)))


def is_op_name(name: str) -> bool:
    """Returns whether an op has the name. A report may name ops without a rule, which are kept anyway."""
    return name in list_recomputable_ops() or name in _name_ops(
        (*dir(torch._C._functions), *_list_function_nodes())
    )


def _name_ops(node_names: Iterable[str]) -> set[str]:
    """Returns the names that a report prints for the ops of autograd nodes, and their plain names."""
    return {name for node in node_names for name in (display_op_name(node), op_name(node)) if name}


def _list_function_nodes() -> Iterator[str]:
    """Yields the node names of all classes of torch.autograd.Function that exist."""
    classes = [Function]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        yield f"{cls.__name__}Backward"
