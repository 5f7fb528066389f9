"""Finds the modules of a model whose forwards run in recompute scopes."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.nn.parameter import is_lazy

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

    - An element of a container is a block if it has a normalisation and a module with a weight of two or
      more dimensions.
    - Outside of blocks, attributes of one module are blocks if two or more of one class have a normalisation
      and two such weights: a block of one convolution would keep more than it frees.
    - Each nn.TransformerEncoderLayer is a block.
    """
    ordered_blocks: dict[nn.Module, None] = {}
    block_modules: set[nn.Module] = set()  # Blocks and their submodules.
    for parent in model.modules():
        blocks = [
            child for child in parent.children() if not isinstance(child, _CONTAINERS) and _has_norm(child)
        ]
        if isinstance(parent, _CONTAINERS):
            blocks = [block for block in blocks if _count_weights(block)]
        else:
            blocks = [block for block in blocks if _count_weights(block) > 1 and parent not in block_modules]
            class_counts = Counter(map(type, blocks))
            blocks = [block for block in blocks if class_counts[type(block)] > 1]
        blocks += [child for child in parent.children() if isinstance(child, nn.TransformerEncoderLayer)]
        ordered_blocks.update(dict.fromkeys(blocks))
        block_modules.update(module for block in blocks for module in block.modules())
    return list(ordered_blocks)


def _has_norm(module: nn.Module) -> bool:
    return any("Norm" in type(child).__name__ for child in module.modules() if child is not module)


def _count_weights(module: nn.Module) -> int:
    """Returns the number of modules with weights, without normalisations; shared ones count each time."""
    return sum(
        "Norm" not in type(child).__name__ and any(map(_is_weight, child.parameters(recurse=False)))
        for _, child in module.named_modules(remove_duplicate=False)
    )


def _is_weight(parameter: nn.Parameter) -> bool:
    # FSDP1 holds all parameters of a module in a vector.
    return is_lazy(parameter) or parameter.dim() >= 2 or type(parameter).__name__ == "FlatParameter"
