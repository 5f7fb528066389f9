"""Finds the modules of a model whose forwards run in recompute scopes."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["find_blocks", "find_entry_modules", "name_scoped_modules"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def name_scoped_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules whose forwards run in a scope, with their names."""
    names = {module: name for name, module in model.named_modules()}
    return {module: names[module] for module in [*find_entry_modules(model), *find_blocks(model)]}


def find_entry_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that a user calls: the model, or the elements of a ModuleList or ModuleDict."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [module for child in model.children() for module in find_entry_modules(child)]
    return [model]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model, in the order of its modules.

    A block is an element of a container that has a normalisation and a module with a weight of two or more
    dimensions. Outside of such elements, modules of one class that are attributes of one module are blocks
    too, where two or more of them have a normalisation and two such weights: a block of one convolution would
    keep more than it saves. Each nn.TransformerEncoderLayer is a block.
    """
    with_norm, num_weights = _find_norms_and_weights(model)
    found: dict[nn.Module, None] = {}
    inside: set[str] = set()  # names of blocks
    for name, parent in model.named_modules(remove_duplicate=False):
        children = {f"{name}.{key}".lstrip("."): child for key, child in parent.named_children()}
        candidates = {
            child_name: child
            for child_name, child in children.items()
            if not isinstance(child, _CONTAINERS) and child_name in with_norm and num_weights[child_name]
        }
        if not isinstance(parent, _CONTAINERS):
            if _has_prefix(name, inside):
                candidates = {}
            candidates = {key: child for key, child in candidates.items() if num_weights[key] > 1}
            classes = Counter(map(type, candidates.values()))
            candidates = {key: child for key, child in candidates.items() if classes[type(child)] > 1}
        candidates |= {
            child_name: child
            for child_name, child in children.items()
            if isinstance(child, nn.TransformerEncoderLayer)
        }
        inside.update(candidates)
        found.update(dict.fromkeys(candidates.values()))
    return list(found)


def _find_norms_and_weights(model: nn.Module) -> tuple[set[str], Counter[str]]:
    """Returns the names of modules in which there is a normalisation, and the number of weights by name."""
    with_norm: set[str] = set()
    num_weights: Counter[str] = Counter()
    for name, module in model.named_modules(remove_duplicate=False):
        parts = name.split(".")
        above = [".".join(parts[:depth]) for depth in range(len(parts))]
        if "Norm" in type(module).__name__:
            with_norm.update(above)
        elif any(map(_is_weight, module.parameters(recurse=False))):
            num_weights.update([*above, name])
    return with_norm, num_weights


def _is_weight(parameter: nn.Parameter) -> bool:
    # FSDP1 holds all parameters of a module in a vector.
    return is_lazy(parameter) or parameter.dim() >= 2 or type(parameter).__name__ == "FlatParameter"


def _has_prefix(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in names for depth in range(1, len(parts) + 1))
