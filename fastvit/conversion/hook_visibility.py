"""Hides the hooks of scopes from torch's code that counts or compiles hooks.

nn.TransformerEncoderLayer counts the hooks of itself and of its submodules. Without hooks the
layer takes another path in evaluation, whose result is zero at padded positions. torch.jit.script
compiles hooks.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..recompute import dynamo_hooks

# The attributes of a module that nn.TransformerEncoderLayer and TorchScript read.
_HOOK_NAMES = ("_forward_hooks", "_forward_pre_hooks")


class ConversionHook:
    """A hook that conversion adds to modules. TorchScript does not see hooks of this class."""

    def __init__(self) -> None:
        _change_hook_count(1)
        # __del__ would be called at the interpreter's end, too, when this module has lost its globals.
        weakref.finalize(self, _change_hook_count, -1).atexit = False


def is_conversion_hook(hook: object) -> bool:
    """Returns whether conversion has added `hook` to a module."""
    return isinstance(hook, ConversionHook) or hook is dynamo_hooks.announce_compiled_module


def _select_foreign_hooks(hooks: Mapping[int, Callable]) -> OrderedDict[int, Callable]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if not is_conversion_hook(hook))


_lock = threading.RLock()  # Reentrant: the garbage collector may delete a hook while another is counted.
_num_hooks = 0
_replacement: Callable | None = None  # It stands in torch.jit._recursive.get_hook_stubs.


def _change_hook_count(change: int) -> None:
    """Counts hooks. While there are any, the function by which TorchScript reads hooks is replaced."""
    global _num_hooks, _replacement
    torchscript = torch.jit._recursive
    with _lock:
        _num_hooks += change
        if _num_hooks and _replacement is None:
            _replacement = _hide_conversion_hooks(torchscript.get_hook_stubs)
            torchscript.get_hook_stubs = _replacement
        elif not _num_hooks and torchscript.get_hook_stubs is _replacement:
            # If other code has replaced the function since, its replacement calls this one, which stays.
            torchscript.get_hook_stubs = _replacement.__wrapped__  # type: ignore[attr-defined]
            _replacement = None


def _hide_conversion_hooks(get_hook_stubs: Callable) -> Callable:
    @functools.wraps(get_hook_stubs)
    def get_foreign_hook_stubs(module: nn.Module):
        # The view shares all other attributes with the module, whose hooks another thread may call.
        view = object.__new__(type(module))
        view.__dict__.update(module.__dict__)
        for name in _HOOK_NAMES:
            view.__dict__[name] = _select_foreign_hooks(module.__dict__[name])
        return get_hook_stubs(view)

    return get_foreign_hook_stubs


class EncoderLayerHook(ConversionHook):
    """Hides conversion's hooks from an nn.TransformerEncoderLayer during its forward in evaluation."""

    def __reduce__(self):
        return EncoderLayerHook, ()

    def __call__(self, module: nn.Module, args: tuple, *result: object) -> None:
        if torch.compiler.is_compiling() or (module.training and not result):
            return
        with _lock:
            for submodule in module.modules():
                for name in _HOOK_NAMES:
                    hooks = submodule.__dict__.get(name, {})
                    if result and isinstance(hooks, _UncountedHooks):
                        submodule.__dict__[name] = hooks.data
                    elif not result and any(map(is_conversion_hook, hooks.values())):
                        submodule.__dict__[name] = _UncountedHooks(hooks)


class _UncountedHooks(UserDict):
    """Wraps a dictionary of hooks. The length does not count the hooks of conversion.

    Each forward wraps the dictionary of the module, and unwraps one level at its end. If forwards of several
    threads overlap, wrappers are nested.
    """

    def __init__(self, hooks: OrderedDict | UserDict):
        self.data = hooks  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(_select_foreign_hooks(self.data))

    def __bool__(self) -> bool:
        return bool(self.data)

    def move_to_end(self, key: int, last: bool = True) -> None:
        self.data.move_to_end(key, last)  # type: ignore[attr-defined]

    def __reduce__(self):  # A copy of the module during its forward has an ordinary dictionary.
        return OrderedDict, (list(self.items()),)


def reveal_hooks(module: nn.Module) -> None:
    """Unwraps the dictionaries of hooks that a forward has left wrapped, as after a KeyboardInterrupt."""
    for name in _HOOK_NAMES:
        while isinstance(hooks := module.__dict__.get(name), _UncountedHooks):
            module.__dict__[name] = hooks.data
