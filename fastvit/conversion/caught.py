"""Finds exceptions that a forward catches while it is traced.

A forward may catch the error that a proxy raises where a tensor would not. It then takes another branch than
it takes with tensors, and its trace is worthless.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def noting_errors(errors: list[str]) -> Iterator[None]:
    """Collects in `errors` the exceptions that reach code of a model, caught or not."""
    others: set[int] = set()

    def in_function(frame: types.FrameType, event: str, argument: tuple):
        if event == "exception" and not issubclass(argument[0], _ORDINARY_ERRORS):
            errors.append(f"{frame.f_code.co_name}: {argument[0].__name__}")
        return in_function

    def at_call(frame: types.FrameType, event: str, argument: object):
        if id(frame.f_globals) in others:  # a fast path: this function runs at every call
            return None
        if _module(frame).split(".")[0] in _NOT_MODELS:
            others.add(id(frame.f_globals))
            return None
        caller = frame.f_back
        while _module(caller) in _PASS_ON:
            caller = caller.f_back
        # Code called by an import or by torch's internals is not the model's.
        if getattr(caller, "f_trace", None) is not in_function and not _module(caller).startswith(
            _CALL_MODELS
        ):
            return None
        frame.f_trace_lines = False
        return in_function

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


# Iteration ends by the first two; hasattr and optional imports use the others. A proxy has all attributes.
_ORDINARY_ERRORS = (StopIteration, GeneratorExit, AttributeError, ImportError)
_NOT_MODELS = {"torch", "fastvit", *sys.stdlib_module_names} - {"__main__"}
_CALL_MODELS = ("torch.nn.modules.", "torch.fx._symbolic_trace")
_PASS_ON = {
    "contextlib",
    "functools",
    "torch.utils._contextlib",
    "torch.amp.autocast_mode",
    "torch.utils.checkpoint",
}


def _module(frame: types.FrameType | None) -> str:
    return "" if frame is None else frame.f_globals.get("__name__") or ""


def refuse_swallowed(errors: list[str]) -> None:
    """Raises when a forward has caught one of `errors` during a trace."""
    if errors:
        raise NotImplementedError(f"the forward caught an exception: {', '.join(errors)}")
