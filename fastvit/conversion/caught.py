"""Exceptions that a forward catches while it is traced.

A forward that catches what a stand-in for a tensor cannot do goes another way than it does with tensors.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def noting_errors(errors: list[str]) -> Iterator[None]:
    """Collects in `errors` the exceptions that reach code of a model, whether it catches them or not."""
    others: set[int] = set()

    def in_function(frame: types.FrameType, event: str, argument: tuple):
        if event == "exception" and not issubclass(argument[0], _ORDINARY_ERRORS):
            errors.append(f"{frame.f_code.co_name}: {argument[0].__name__}")
        return in_function

    def at_call(frame: types.FrameType, event: str, argument: object):
        if id(frame.f_globals) in others:  # most calls, and this is called for each
            return None
        if _module(frame).split(".")[0] in _NOT_MODELS:
            others.add(id(frame.f_globals))
            return None
        caller = frame.f_back
        while _module(caller) in _PASS_ON:
            caller = caller.f_back
        # an import, or torch at its own work, may come to code that is neither torch's nor the model's
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


# how iteration ends, and how it is asked what is there; a stand-in has all attributes
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
    """Ends a trace in which a forward has caught an exception."""
    if errors:
        raise NotImplementedError(f"caught in a forward, which went on: {', '.join(errors)}")
