"""Each thread has a stack of entries: one for each call of `open_scope`, even if no scope could be opened.

A scope is open as long as its owner runs: a call of `recompute_scope`, or a module with hooks. No hook runs
after a KeyboardInterrupt, so an entry holds the frame of the module's call. An entry whose frame is no longer
on Python's stack is dead. The next call that uses the stack closes the dead entry.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from .._deprecation import renamed_arguments
from . import torch_patches
from .observer import SavedTensorObserver
from .policy import Policy, RecomputeLevel
from .scope import Scope, current_saved_tensor_hooks


@renamed_arguments(products="matmuls", weight_casts="recompute_weight_casts")
@contextlib.contextmanager
def recompute_scope(matmuls: bool = False, recompute_weight_casts: bool = False) -> Iterator[None]:
    """Recomputes cheap outputs in backward instead of keeping them, for ops that run inside this context.

        with fastvit.recompute_scope():
            loss = criterion(model(x), target)
        loss.backward()

    Cheap outputs are those of torch's normalisations, activations, elementwise products, sums, casts, copies,
    concatenations and poolings, and of BatchNormAct layers with memory="recompute". If the inputs of an op
    are kept, the same op recomputes its output, on the same memory layout, so gradients have the same bits as
    without the scope. Running statistics are not touched.

    The backward may run inside or outside of the scope. Scopes nest: the end of an inner scope decides which
    outputs are kept, of all that ops have saved in it and in the outer scopes. Saved-tensor hooks around the
    scope (save_on_cpu, an activation offloader) pack the kept tensors. A scope has no effect in torch's
    checkpoint. If saved-tensor hooks are disabled, a scope has no effect either, and warns; Python shows the
    warning once for each line.

    An output that was written to before it was saved is kept, except if the write was an op in place that
    Python code called, and that is recomputed too. A scope sees writes under no_grad, through `detach()`,
    `.data` and NumPy. It does not see writes of other code, such as a custom kernel, that do not raise the
    version counter: gradients of what is recomputed from that memory are wrong. `fastvit.verify` finds such a
    write.

    Args:
        matmuls: recompute the output of a Linear too, if it is no narrower than the input. This about
            halves the remaining bytes, and these matmuls run twice. In half precision and under autocast, it
            also recomputes tensors if that reads and writes more than ten times their bytes.
        recompute_weight_casts: recompute the half-precision copies of weights that autocast makes, instead of
            keeping them: 2 bytes for each element of a weight, at any batch size. A write to a weight before
            the backward is then an error. A write through `weight.data` is not noticed, and the gradient is
            that of the new weight.
    """
    if torch.compiler.is_compiling():
        yield
        return
    owner = object()
    level = RecomputeLevel.MATMULS if matmuls else RecomputeLevel.CHEAP
    open_scope(owner, Policy(level, recompute_weight_casts), "")
    try:
        yield
    finally:
        close_scope(owner)


class _Entry(NamedTuple):
    """A call of `open_scope`. It opened `scope`, or changed policy and block of the open `scope`."""

    owner: object
    scope: Scope | None
    outer_settings: tuple[Policy, str] | None  # policy and block name to restore, if the scope was open
    frame: FrameType | None  # frame of the owner's call; None if the owner always calls `close_scope`

    def is_dead(self) -> bool:
        """Returns whether the owner's call has ended without `close_scope`."""
        if self.frame is None:
            return False
        try:
            # Faster than a search in Python's stack. An ended call loses its locals, which nothing reads.
            self.frame.clear()
        except RuntimeError:  # the frame is executing
            return False
        return True

    def close(self, results: Iterable[object] | None) -> None:
        """Plans the pending tensors, which have no plan yet, or keeps them all if `results` is None."""
        scope = self.scope
        if scope is None:
            return
        try:
            if results is None:
                scope.abandon()
            else:
                scope.mark_block_io(results)
                scope.plan_pending()
        finally:  # The scope is left even if the plan raises.
            if self.outer_settings is None:
                scope.leave()
                if not scope.remove_observer():
                    _stack.scopes_to_unobserve.append(scope)
                torch_patches.remove_open_scope()
            else:
                scope.policy, scope.block = self.outer_settings


class _Stack(threading.local):
    """The open scopes of a thread, inner ones last."""

    def __init__(self):
        self.entries: list[_Entry] = []
        self.saved_tensor_observer: SavedTensorObserver | None = None
        self.scopes_to_unobserve: list[Scope] = []  # closed inside a call that their call observer observes


_stack = _Stack()


def open_scope(
    owner: object,
    policy: Policy,
    block: str,
    inputs: Iterable[object] = (),
    frame: FrameType | None = None,
) -> None:
    """Opens a scope until `close_scope(owner)`, or sets policy and block of the open scope.

    Args:
        block: name of the module whose forward runs; empty outside of converted models.
        inputs: inputs of the block; objects that are no tensors are ignored.
        frame: frame of the call with which the scope dies; None for an owner that always calls `close_scope`.
    """
    close_dead_scopes()
    scope, outer_settings = torch_patches.find_top_scope(), None
    if scope is not None:
        outer_settings = scope.policy, scope.block
        scope.enter_block(policy, block)
        scope.mark_block_io(inputs)
    elif _can_open():
        scope = Scope(_stack.saved_tensor_observer, close_dead_scopes)
        scope.enter_block(policy, block)
        torch_patches.add_open_scope()
        scope.enter()
    _stack.entries.append(_Entry(owner, scope, outer_settings, frame))


def close_scope(owner: object, results: Iterable[object] = ()) -> None:
    """Closes the scope that `owner` opened last, and inner scopes that an exception has left open."""
    entries = _stack.entries
    if entries and (entries[-1].owner is owner or any(entry.owner is owner for entry in entries)):
        while entries[-1].owner is not owner:
            entries.pop().close(None)
        entries.pop().close(results)


def close_dead_scopes() -> None:
    """Closes the scopes whose owner's call has ended without `close_scope`."""
    entries = _stack.entries
    while entries and entries[-1].is_dead():
        entries.pop().close(None)
    if scopes := _stack.scopes_to_unobserve:
        _stack.scopes_to_unobserve = [scope for scope in scopes if not scope.remove_observer()]


@contextlib.contextmanager
def observe_saved_tensors(annotate: Callable[[Tensor], object]) -> Iterator[SavedTensorObserver]:
    """Yields an observer of all tensors that are saved in scopes that this thread opens in the context.

    Args:
        annotate: returns the observer's annotation of a saved tensor.
    """
    outer_observer, _stack.saved_tensor_observer = _stack.saved_tensor_observer, SavedTensorObserver(annotate)
    try:
        yield _stack.saved_tensor_observer
    finally:
        _stack.saved_tensor_observer = outer_observer


def reason_no_scope() -> str:
    """Returns why no scope can be opened, where "it" is the forward that runs; empty if a scope can be."""
    if torch.jit.is_tracing():
        return "torch.jit.trace records it"
    hooks = current_saved_tensor_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        # torch.utils.checkpoint saves nothing in its first forward, and compares the number of saved tensors
        # in the second.
        return "torch.utils.checkpoint runs it"
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return ""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func keeps what it needs"
    error = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return f"saved-tensor hooks are disabled: {error}"


def _can_open() -> bool:
    reason = reason_no_scope()
    if reason.startswith("saved-tensor hooks are disabled"):  # The other reasons are no surprise to a user.
        # The levels are _can_open, open_scope, recompute_scope, contextlib, and the user's `with`.
        warnings.warn(f"fastvit: recompute_scope has no effect here, because {reason}", stacklevel=5)
    return not reason


def active_scope() -> Scope | None:
    """Returns the open scope, unless hooks of others are above its hooks in autograd's stack; else None."""
    if torch.compiler.is_compiling():
        return None
    close_dead_scopes()
    return torch_patches.find_top_scope()
