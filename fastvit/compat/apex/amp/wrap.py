"""Replaces functions by wrappers that cast their arguments, until their handle is deactivated.

`mod` is a module, a class or a dict, `fn` a name in it, and `handle` the result of `amp.init`. Wrappers do
not cast while the handle is not active. A name that `mod` lacks is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import utils
from .forward import cast_floating

__all__ = [
    "cached_cast",
    "disable_casts",
    "err_if_any_half",
    "err_if_arg0_half",
    "make_cast_wrapper",
    "make_promote_wrapper",
    "new_rnn_cast",
    "promote",
    "promote_match_arg0",
    "sequence_promote",
]

Function = Callable[..., Any]
_HALF = ("HalfTensor", "BFloat16Tensor")


def make_cast_wrapper(
    orig_fn: Function, cast_fn: Function, handle: Any, try_caching: bool = False
) -> Function:
    """`orig_fn` with floating-point arguments cast by `cast_fn`; `try_caching` caches casts of Parameters."""

    def cast(x: Any) -> Any:
        cached = (
            try_caching and handle.has_cache and utils.should_cache(x) and not torch.compiler.is_compiling()
        )
        return utils.cached_cast(cast_fn, x, handle.cache) if cached else cast_fn(x)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle.is_active():
            return orig_fn(*utils.casted_args(cast, args, kwargs), **kwargs)
        return orig_fn(*args, **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Function, cast_fn: Function, handle: Any) -> Function:
    """`orig_fn` whose floating-point arguments are cast by `cast_fn` when some are half and some float32."""

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle.is_active() and _mixed(args, kwargs):
            return orig_fn(*utils.casted_args(cast_fn, args, kwargs), **kwargs)
        return orig_fn(*args, **kwargs)

    return wrapper


def _mixed(args: Any, kwargs: dict[str, Any]) -> bool:
    types = utils.collect_fp_tensor_types(args, kwargs)
    return "FloatTensor" in types and not types.isdisjoint(_HALF) and "DoubleTensor" not in types


def _replace(mod: Any, fn: str, handle: Any, make: Callable[[Function], Function]) -> None:
    if utils.has_func(mod, fn):
        utils.set_func_save(handle, mod, fn, make(utils.get_func(mod, fn)))


def cached_cast(
    mod: Any, fn: str, cast_fn: Function, handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Puts `make_cast_wrapper` around `mod.fn`."""
    cast_fn = utils.verbosify(cast_fn, fn, verbose)
    _replace(mod, fn, handle, lambda function: make_cast_wrapper(function, cast_fn, handle, try_caching))


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes `mod.fn` cast its arguments to float32 where some are half and some float32."""
    cast_fn = utils.verbosify(utils.maybe_float, fn, verbose)
    _replace(mod, fn, handle, lambda function: make_promote_wrapper(function, cast_fn, handle))


def sequence_promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """`promote` for a function whose first argument is a sequence of tensors."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(seq: Any, *args: Any, **kwargs: Any) -> Any:
            if handle.is_active() and _mixed(seq := list(seq), {}):
                seq = utils.casted_args(utils.verbosify(utils.maybe_float, fn, verbose), seq, {})
            return function(seq, *args, **kwargs)

        return wrapper

    _replace(mod, fn, handle, make)


def promote_match_arg0(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes a function that writes its first argument cast the others to the dtype of the first."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(arg0: Tensor, *args: Any, **kwargs: Any) -> Any:
            if handle.is_active() and utils.is_fp_tensor(arg0):
                cast = partial(utils.cast_to, lambda _: arg0.dtype)
                args = tuple(utils.casted_args(cast, args, kwargs))
            return function(arg0, *args, **kwargs)

        return wrapper

    _replace(mod, fn, handle, make)


def _refuse(fn: str, message: str | None) -> NoReturn:
    raise NotImplementedError(
        message or f"amp: {fn} takes no half tensors, because it writes them in place; cast them to float32"
    )


def err_if_any_half(mod: Any, fn: str, handle: Any, custom_err_msg: str | None = None) -> None:
    """Makes `mod.fn` raise NotImplementedError when an argument is half."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if handle.is_active() and utils.collect_fp_tensor_types(args, kwargs).intersection(_HALF):
                _refuse(fn, custom_err_msg)
            return function(*args, **kwargs)

        return wrapper

    _replace(mod, fn, handle, make)


def err_if_arg0_half(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes `mod.fn` raise NotImplementedError for a half first argument, and cast the others to float32."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(arg0: Tensor, *args: Any, **kwargs: Any) -> Any:
            if handle.is_active():
                if utils.type_string(arg0) in _HALF:
                    _refuse(fn, None)
                cast = utils.verbosify(utils.maybe_float, fn, verbose)
                args = tuple(utils.casted_args(cast, args, kwargs))
            return function(arg0, *args, **kwargs)

        return wrapper

    _replace(mod, fn, handle, make)


def new_rnn_cast(fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes torch.nn's "LSTM", "GRU", "RNN_TANH" or "RNN_RELU", or a cell ("LSTM_CELL"), run in half."""

    def make(forward: Function) -> Function:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if handle.is_active():  # torch.nn requires the dtype of the weights
                args, kwargs = cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
            return forward(*args, **kwargs)

        return wrapper

    if not fn.endswith("_CELL"):
        _replace(getattr(nn, fn.partition("_")[0]), "forward", handle, make)
    cached_cast(torch._VF, fn.lower(), utils.maybe_half, handle, try_caching=True, verbose=verbose)


def disable_casts(mod: Any, fn: str, handle: Any) -> None:
    """Disables casts inside `mod.fn`."""

    def make(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with handle._disable_casts():
                return function(*args, **kwargs)

        return wrapper

    _replace(mod, fn, handle, make)
