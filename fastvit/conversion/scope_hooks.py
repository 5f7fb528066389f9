"""The hooks that open a recompute scope round the forwards of a model and of its blocks; `revert`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from .._checks import Model, check_module
from ..fusion import unfuse
from ..recompute import Policy, close_scope, dynamo_hooks, open_scope
from .blocks import find_entry_modules, name_scoped_modules
from .hook_visibility import ConversionHook, EncoderLayerHook, is_conversion_hook, reveal_hooks
from .nested_values import iterate_tensors

_HOOK_DICTIONARIES = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"),
)


class ScopeHook(ConversionHook):
    """Opens a recompute scope as a forward pre-hook; closes it as a forward hook, after an exception too."""

    def __init__(self, policy: Policy, block: str):
        super().__init__()
        self.policy = policy
        self.block = block

    def __reduce__(self):
        return type(self), (self.policy, self.block)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, *result: object, depth: int = 1) -> None:
        """Opens the scope, or closes it after a `result`. The frame at `depth` is the module's call."""
        if torch.compiler.is_compiling():
            if result:
                dynamo_hooks.end_traced_scope(module)
            else:
                dynamo_hooks.begin_traced_scope()
        elif result:
            self.close_scope(module, args, kwargs, result[0])
        elif torch.is_grad_enabled():
            self.open_scope(module, args, kwargs, sys._getframe(depth))

    def open_scope(self, module: nn.Module, args: tuple, kwargs: dict, frame: FrameType) -> None:
        """Opens the scope; `frame` is the frame of the module's call."""
        if self.policy.only_sites != frozenset():
            open_scope(module, self.policy, self.block, iterate_tensors((args, kwargs)), frame)

    def close_scope(self, module: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        close_scope(module, iterate_tensors(result))


def add_scope_hooks(
    model: Model, policy: Policy, make_entry_hook: Callable[[Policy, str], ScopeHook] = ScopeHook
) -> Model:
    """Adds hooks in place of those of an earlier conversion; none for a policy that recomputes nothing.

    Args:
        model: the model, which gets the hooks.
        policy: the policy of all hooks.
        make_entry_hook: returns the hook of a module that the user calls.
    """
    _remove_hooks(model)
    if policy.only_sites == frozenset():
        return model
    entry_modules = find_entry_modules(model)
    for module, name in name_scoped_modules(model).items():
        hook = (make_entry_hook if module in entry_modules else ScopeHook)(policy, name)
        _register_first(module, hook, with_kwargs=True)
        if isinstance(module, nn.TransformerEncoderLayer):
            _register_first(module, EncoderLayerHook(), with_kwargs=False)
        dynamo_hooks.enable_traced_scopes(module, policy)
    return model


def _register_first(module: nn.Module, hook: Callable, with_kwargs: bool) -> None:
    """Registers a hook that is called before and after the forward, and before all other hooks.

    A hook that is called first closes the scope before FSDP reshards parameters. Dynamo of torch 2.11 reads
    hooks in the order of insertion, which `prepend=True` does not change: other hooks are inserted again.
    """
    module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    module.register_forward_hook(hook, with_kwargs=with_kwargs, always_call=True)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in list(hooks)[:-1]:
            hooks[key] = hooks.pop(key)


def get_scope_hook(module: nn.Module) -> ScopeHook | None:
    """Returns the hook by which the forward of `module` runs in a scope of its own."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ScopeHook)), None)


def change_policies(model: nn.Module, change: Callable[[Policy], Policy]) -> None:
    """Gives each hook in `model` the policy that `change` returns for the current one."""
    for module in model.modules():
        hook = get_scope_hook(module)
        if hook is not None and (policy := change(hook.policy)) is not hook.policy:
            hook.policy = policy
            dynamo_hooks.set_options(module, policy)


def is_converted(model: nn.Module) -> bool:
    """Returns whether a module in `model` has a scope hook."""
    return any(get_scope_hook(module) is not None for module in model.modules())


def _remove_hooks(model: nn.Module) -> None:
    """Removes the hooks that `add_scope_hooks` has added, and no hook of other code."""
    for module in model.modules():
        reveal_hooks(module)
        hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        for key in [key for key, hook in hooks if is_conversion_hook(hook)]:
            for name in _HOOK_DICTIONARIES:
                getattr(module, name).pop(key, None)
        dynamo_hooks.disable_traced_scopes(module)


def revert(model: Model) -> Model:
    """Undoes `convert` and `fuse` in place.

    Args:
        model: a model that is converted, fused or neither.

    Returns:
        `model`.
    """
    check_module("revert", model)
    _remove_hooks(model)
    return unfuse(model)
