"""The stack of open scopes of a thread: one inside the other, and none where a scope cannot work."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .observer import SavedTensorObserver
from .policy import Policy, RecomputeLevel
from .scope import Scope, top_hooks

_autograd = torch._C._autograd


@contextlib.contextmanager
def recompute_scope(products: bool = False, weight_casts: bool = False) -> Iterator[None]:
    """Around a forward: outputs that take little arithmetic are rebuilt in backward instead of kept.

        with fastvit.recompute_scope():
            loss = criterion(model(x), target)
        loss.backward()

    These are outputs of torch's normalisations, activations, elementwise products, sums, casts, copies,
    concatenations and poolings, and of BatchNormAct layers with memory="recompute", where the inputs of the
    op are kept. An op is repeated by the same op on the same memory layout, so gradients have the same bits
    as without the scope. Running statistics are not touched.

    The backward may run inside or outside of the scope. Scopes nest: at the end of an inner one, outputs that
    wait for an ingredient are kept. Inside other saved-tensor hooks (save_on_cpu, an activation offloader) a
    scope hands on what it keeps; inside torch's checkpoint it has no effect. Where saved-tensor hooks are
    disabled it has none either, and warns once.

    An output that was written to before it was saved is kept, unless the write is an op in place that was
    called in Python and is repeated too. Writes under no_grad, through `detach()`, `.data` and NumPy are
    seen. A write by code that is neither Python's nor counts versions, such as a kernel of one's own, is not
    noticed where the result is rebuilt, or another from it: `fastvit.verify` finds it.

    Args:
        products: rebuild the output of a Linear too, where it is no narrower than the input. This halves the
            remaining bytes, about, for the time of these matrix products. In half precision and under
            autocast tensors are rebuilt then too whose recipe moves more than ten times their bytes.
        weight_casts: cast weights again instead of keeping the half-precision copies that autocast makes: 2
            bytes for each element of a weight, at any batch size. A write to a weight before the backward is
            then an error. A write through `weight.data` is not noticed, and the gradient is that of the new
            weight.
    """
    if torch.compiler.is_compiling():
        yield
        return
    owner = object()
    open_scope(owner, Policy(RecomputeLevel.MATMULS if products else RecomputeLevel.CHEAP, weight_casts), "")
    try:
        yield
    finally:
        close_scope(owner)


class _Stack(threading.local):
    """The scopes that are open in this thread, inner ones last.

    An entry is an owner, its scope, and the policy and the block of that scope before.
    """

    def __init__(self):
        self.entries: list[tuple[object, Scope | None, tuple[Policy, str] | None]] = []
        self.watcher: SavedTensorObserver | None = None


_stack = _Stack()


def open_scope(owner: object, policy: Policy, block: str, inputs: Iterable[object] = ()) -> None:
    """Opens a scope until `close_scope(owner)`, or sets policy and block of the one that is open."""
    scope = active_scope()
    if scope is not None and any(entry[0] is owner and entry[1] is scope for entry in _stack.entries):
        close_scope(owner)  # left open by a KeyboardInterrupt, after which no hook of a module runs
        scope = active_scope()
    before = None
    if scope is not None:
        before = scope.policy, scope.block
        scope.begin(policy, block)
        scope.mark(inputs)
    elif _can_open():
        _let_torch_func_in()
        scope = Scope(_stack.watcher)
        scope.begin(policy, block)
        scope.enter()
    _stack.entries.append((owner, scope, before))


def close_scope(owner: object, results: Iterable[object] = ()) -> None:
    """Closes the scope that `owner` opened, and those inside it that an exception has left open."""
    entries = _stack.entries
    if not any(entry[0] is owner for entry in entries):
        return
    while True:
        one, scope, before = entries.pop()
        if scope is not None:
            if one is owner:
                scope.mark(results)
            scope.decide()
            if before is None:
                scope.leave()
            else:
                scope.policy, scope.block = before
        if one is owner:
            return


@contextlib.contextmanager
def observe_saved_tensors(note: Callable[[Tensor], object]) -> Iterator[SavedTensorObserver]:
    """Gives what ops save in scopes that this thread opens inside, and what `note` returns of it."""
    before, _stack.watcher = _stack.watcher, SavedTensorObserver(note)
    try:
        yield _stack.watcher
    finally:
        _stack.watcher = before


def reason_no_scope() -> str:
    """Why no scope can be opened here; empty where one can."""
    if torch.jit.is_tracing():
        return "torch.jit.trace records it"
    hooks = top_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        # It keeps nothing in its first forward, and counts what is saved in its second.
        return "torch.utils.checkpoint runs it"
    if _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return ""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func keeps what it needs"
    return f"saved-tensor hooks are disabled: {_autograd._saved_tensors_hooks_get_disabled_error_message()}"


def _can_open() -> bool:
    reason = reason_no_scope()
    if reason.startswith("saved-tensor hooks"):
        warnings.warn(f"fastvit: nothing is rebuilt here, because {reason}", stacklevel=5)
    return not reason


def active_scope() -> Scope | None:
    """The scope whose hooks are on top of autograd's stack of hooks, if they are a scope's."""
    if torch.compiler.is_compiling():
        return None
    hooks = top_hooks()
    scope = getattr(hooks[0], "__self__", None) if hooks else None
    return scope if isinstance(scope, Scope) else None


@functools.cache
def _let_torch_func_in() -> None:
    """torch.func calls `disable_saved_tensors_hooks` by this name, which raises where there are hooks."""
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def with_scope_aside(*args, **kwargs):
        scope = active_scope()
        with contextlib.nullcontext() if scope is None else scope.aside(), disable(*args, **kwargs):
            yield

    torch.autograd.graph.disable_saved_tensors_hooks = with_scope_aside
