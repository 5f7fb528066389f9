"""Labels of the modules that save tensors, for `report`."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

import torch
from torch import nn

from ..recompute import SavedTensorObserver, active_scope, observe_saved_tensors, reason_no_scope
from .scope_hooks import get_scope_hook

_BLOCK_INDEX = re.compile(r"\d+(?=\.)|(?<![^.])\d+$")  # A number before a dot, or a last part of digits.


def make_module_label(name: str) -> str:
    """Returns the name of a module with `*` in place of numbers that change from block to block."""
    return _BLOCK_INDEX.sub("*", name) or "the model"


@contextlib.contextmanager
def observe_modules(model: nn.Module, notes: dict[str, None]) -> Iterator[SavedTensorObserver]:
    """Yields an observer that annotates every saved tensor with the module whose forward is running."""
    module_stack = ["the model"]  # Labels of the modules whose forwards run, the innermost last.

    def enter(label: str, module: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            module_stack.append(label)
            if get_scope_hook(module) is not None and active_scope() is None:
                notes[f"{label}: nothing is recomputed, because {reason_no_scope()}"] = None

    def leave(*_: object) -> None:
        if not torch.compiler.is_compiling():
            module_stack.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # A ScriptModule takes no hooks.
                label = make_module_label(name)
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, label)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield hooks.enter_context(observe_saved_tensors(lambda _: module_stack[-1]))
