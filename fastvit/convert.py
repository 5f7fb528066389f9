"""`convert` and `revert`: recompute scopes round the forwards of a model and of its blocks, by hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .fuse import unfuse
from .recompute import Policy, close_scope, open_scope

__all__ = ["convert", "revert"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class OpenScope:
    """The forward pre-hook: opens a recompute scope."""

    def __init__(self, policy: Policy, block: str):
        self.policy = policy
        self.block = block

    def __call__(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            open_scope(module, self.policy, self.block)


class CloseScope:
    """The forward hook, which runs after an exception too."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            close_scope(module)


def convert(
    model: nn.Module,
    *,
    products: bool = False,
    weight_casts: bool = False,
    budget: float | None = None,
    example_inputs: Tensor | Sequence | Mapping | None = None,
) -> nn.Module:
    _take_off(model)
    policy = Policy(products, weight_casts)
    names = {module: name for name, module in model.named_modules()}
    for module in dict.fromkeys([model, *blocks(model)]):
        # First of all pre-hooks and last of all hooks, so that the scope is round those of others.
        module.register_forward_pre_hook(OpenScope(policy, names[module]), prepend=True)
        module.register_forward_hook(CloseScope(), always_call=True)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of containers in which there is a normalisation."""
    with_norm = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if "Norm" in type(module).__name__:
            parts = name.split(".")
            with_norm.update(".".join(parts[:depth]) for depth in range(len(parts)))
    return [
        child
        for name, container in model.named_modules(remove_duplicate=False)
        if isinstance(container, _CONTAINERS) and (name in with_norm or not name)
        for key, child in container.named_children()
        if not isinstance(child, _CONTAINERS) and f"{name}.{key}".lstrip(".") in with_norm
    ]


def _hidden_from_torchscript(get_hook_stubs: Callable) -> Callable:
    """torch.jit.script compiles hooks; those of a scope mean nothing to it."""

    @functools.wraps(get_hook_stubs)
    def get_hook_stubs_without_scopes(module: nn.Module):
        hooks = module._forward_hooks, module._forward_pre_hooks
        before = [dict(each) for each in hooks]
        _remove(module)
        try:
            return get_hook_stubs(module)
        finally:
            for each, old in zip(hooks, before, strict=True):
                each.clear()
                each.update(old)

    return get_hook_stubs_without_scopes


torch.jit._recursive.get_hook_stubs = _hidden_from_torchscript(torch.jit._recursive.get_hook_stubs)


def revert(model: nn.Module) -> nn.Module:
    """Undoes `convert` and `fuse` in place, and returns `model`."""
    _take_off(model)
    return unfuse(model)


def _take_off(model: nn.Module) -> None:
    for module in model.modules():
        for key in _remove(module):
            module._forward_hooks_always_called.pop(key, None)


def _remove(module: nn.Module) -> list[int]:
    """Removes the hooks of a scope from `module`; returns their keys."""
    removed = []
    for hooks, kind in ((module._forward_pre_hooks, OpenScope), (module._forward_hooks, CloseScope)):
        keys = [key for key, hook in hooks.items() if isinstance(hook, kind)]
        removed += keys
        for key in keys:
            del hooks[key]
    return removed
