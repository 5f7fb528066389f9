"""Replaces two functions of torch as long as a scope is open, because the scope would change their results.

`torch.overrides.has_torch_function` is true under any function mode, and torch's transformer modules then
take another path. `torch.autograd.graph.disable_saved_tensors_hooks`, which torch.func calls, raises if
there are hooks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .call_observer import CallObserver, pop_modes
from .scope import Scope, current_saved_tensor_hooks

_lock = threading.Lock()
_num_open = 0  # number of open scopes in all threads
_replaced: list[tuple[Any, str, Any]] = []  # owners, names and the original functions


def add_open_scope() -> None:
    """Replaces the functions, if no other scope of the process is open."""
    global _num_open
    with _lock:
        _num_open += 1
        if _num_open == 1:
            _replace(torch.overrides, "has_torch_function", _has_torch_function)
            _replace(torch.autograd.graph, "disable_saved_tensors_hooks", _disable_saved_tensors_hooks)


def remove_open_scope() -> None:
    """Restores the functions, if no scope is open any more."""
    global _num_open
    with _lock:
        _num_open -= 1
        while not _num_open and _replaced:
            owner, name, original = _replaced.pop()
            setattr(owner, name, original)


def _replace(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    _replaced.append((owner, name, original))
    setattr(owner, name, wrap(original))


def find_top_scope() -> Scope | None:
    """Returns the scope whose hooks are on top of autograd's stack; None if other hooks are, or none."""
    hooks = current_saved_tensor_hooks()
    scope = getattr(hooks[0], "__self__", None) if hooks else None
    return scope if isinstance(scope, Scope) else None


def _has_torch_function(original: Callable) -> Callable:
    """Returns `has_torch_function` that ignores the modes of scopes."""

    def has_torch_function(relevant_args: Iterable[object]) -> bool:
        if torch.compiler.is_compiling():
            return original(relevant_args)
        modes = pop_modes()
        try:
            return not all(isinstance(mode, CallObserver) for mode in modes) or original(relevant_args)
        finally:
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)

    return functools.wraps(original)(has_torch_function)


def _disable_saved_tensors_hooks(original: Callable) -> Callable:
    """Returns `disable_saved_tensors_hooks` that removes the hooks of a scope meanwhile."""

    @contextlib.contextmanager
    @functools.wraps(original)
    def disable_saved_tensors_hooks(*args, **kwargs):
        scope = find_top_scope()
        with contextlib.nullcontext() if scope is None else scope.suspended(), original(*args, **kwargs):
            yield

    return disable_saved_tensors_hooks
