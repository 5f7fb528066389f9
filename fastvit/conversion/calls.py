"""The arguments of a forward: which of them a trace takes as constants, and whether two calls are alike."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Arguments = tuple[tuple, dict[str, object]]


def as_arguments(inputs: Tensor | Sequence | Mapping | None) -> Arguments | None:
    """Positional and keyword arguments from a tensor, a tuple of arguments or a dict of keyword arguments."""
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


class Signature:
    """The arguments of a forward, without self."""

    def __init__(self, forward: Callable):
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = frozenset(p.name for p in named)
        self.positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}

    def bind(self, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Every argument by its name, defaults included."""
        return self.defaults | dict(zip(self.positional, args, strict=False)) | kwargs

    def constants(self, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments that a trace of this call takes as constants; the others become proxies.

        Constants are defaults and plain values. A tensor, another object, or a number without a default may
        differ in every call.
        """
        return {name: value for name, value in self.bind(args, kwargs).items() if self._constant(name, value)}

    def _constant(self, name: str, value: object) -> bool:
        if name not in self.defaults:
            return name in self.names and isinstance(value, (type(None), bool, str))
        leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)
        return value is self.defaults[name] or all(isinstance(leaf, _PLAIN) for leaf in leaves)


_PLAIN = (type(None), int, float, str, torch.dtype, torch.device, torch.Size)


def plain_output(output: object) -> object:
    """A dataclass (as in transformers) or a mapping as a dict, which pytree flattens."""
    if dataclasses.is_dataclass(output):
        return vars(output)
    return dict(output) if isinstance(output, Mapping) else output


def same_value(a: object, b: object) -> bool:
    """Whether two arguments are the same object, or plain values that are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, float, str, torch.Size, torch.device)):
        return a == b
    if type(a) not in (tuple, list, dict):
        return False
    (first, spec), (second, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other and all(map(same_value, first, second))
