"""Keeps the hooks of scopes out of the sight of torch's code that asks for hooks.

nn.TransformerEncoderLayer counts the hooks of itself and of what is in it: where there are none it takes
another path in evaluation, whose result is zero at padded positions. torch.jit.script compiles hooks.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping

import torch
from torch import nn

from ..recompute import dynamo_hooks

__all__ = ["EncoderLayerHook", "OwnHook", "is_own_hook", "reveal_hooks"]

_COUNTED = ("_forward_hooks", "_forward_pre_hooks")  # what nn.TransformerEncoderLayer counts


class OwnHook:
    """A hook that conversion adds to modules. While one exists, TorchScript does not see such hooks."""

    def __init__(self) -> None:
        _script_patch.acquire()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _script_patch.release()


def is_own_hook(hook: object) -> bool:
    """Returns whether conversion has added `hook`."""
    return isinstance(hook, OwnHook) or hook is dynamo_hooks.announce_compiled_module


class _ScriptPatch:
    """Replaces torch.jit._recursive.get_hook_stubs while there is a hook that TorchScript must not see."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the garbage collector may release a hook while another is acquired
        self.num_hooks = 0
        self.original: Callable | None = None
        self.replacement: Callable | None = None

    def acquire(self) -> None:
        with self.lock:
            self.num_hooks += 1
            if self.replacement is None:
                self.original = torch.jit._recursive.get_hook_stubs
                self.replacement = _make_get_hook_stubs(self.original)
                torch.jit._recursive.get_hook_stubs = self.replacement

    def release(self) -> None:
        with self.lock:
            self.num_hooks -= 1
            # A later replacement by other code calls this one, which then stays.
            if not self.num_hooks and torch.jit._recursive.get_hook_stubs is self.replacement:
                torch.jit._recursive.get_hook_stubs = self.original  # type: ignore[assignment]
                self.replacement = self.original = None


def _make_get_hook_stubs(get_hook_stubs: Callable) -> Callable:
    @functools.wraps(get_hook_stubs)
    def get_hook_stubs_without_scopes(module: nn.Module):
        counted = [module.__dict__[name] for name in _COUNTED]
        if not any(is_own_hook(hook) for hooks in counted for hook in hooks.values()):
            return get_hook_stubs(module)
        # A module that shares all with the original, whose hooks another thread may call now.
        view = object.__new__(type(module))
        view.__dict__.update(module.__dict__)
        for name, hooks in zip(_COUNTED, counted, strict=True):
            others = [(key, hook) for key, hook in hooks.items() if not is_own_hook(hook)]
            view.__dict__[name] = OrderedDict(others)
        return get_hook_stubs(view)

    return get_hook_stubs_without_scopes


_script_patch = _ScriptPatch()


class EncoderLayerHook(OwnHook):
    """Lets an nn.TransformerEncoderLayer in evaluation count the hooks of others alone, in its forward."""

    def __reduce__(self):
        return EncoderLayerHook, ()

    def __call__(self, module: nn.Module, args: tuple, *result: object) -> None:
        if torch.compiler.is_compiling():
            return
        if result:
            _reveal(module)
        elif not module.training:
            for inner in module.modules():
                for name in _COUNTED:
                    hooks = inner.__dict__.get(name, {})
                    if isinstance(hooks, _UncountedHooks):
                        hooks.num_forwards += 1
                    elif any(map(is_own_hook, hooks.values())):
                        inner.__dict__[name] = _UncountedHooks(hooks)


class _UncountedHooks(MutableMapping):
    """A dictionary of hooks whose length is the number of those of others. It stands for `hooks`."""

    def __init__(self, hooks: OrderedDict):
        self.hooks = hooks
        self.num_forwards = 1  # that need it

    def __len__(self) -> int:
        return sum(not is_own_hook(hook) for hook in self.hooks.values())

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.hooks)

    def __getitem__(self, key: int) -> Callable:
        return self.hooks[key]

    def __setitem__(self, key: int, hook: Callable) -> None:
        self.hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.hooks[key]

    def move_to_end(self, key: int, last: bool = True) -> None:
        self.hooks.move_to_end(key, last)

    def items(self):
        return self.hooks.items()

    def values(self):
        return self.hooks.values()

    def __reduce__(self):  # a copy of the module that is made meanwhile has an ordinary dictionary
        return OrderedDict, (list(self.hooks.items()),)


def _reveal(module: nn.Module) -> None:
    for inner in module.modules():
        for name in _COUNTED:
            hooks = inner.__dict__.get(name)
            if isinstance(hooks, _UncountedHooks):
                hooks.num_forwards -= 1
                if hooks.num_forwards <= 0:
                    inner.__dict__[name] = hooks.hooks


def reveal_hooks(module: nn.Module) -> None:
    """Puts back the dictionaries of hooks that a forward has left hidden, after a KeyboardInterrupt."""
    for name in _COUNTED:
        if isinstance(hooks := module.__dict__.get(name), _UncountedHooks):
            module.__dict__[name] = hooks.hooks
