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
from torch import nn

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


def _casting(function: Function, handle: Any, change: Callable[[tuple, dict[str, Any]], Any]) -> Function:
    """`function` with the `(args, kwargs)` that `change` makes of its own while the handle is active."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle.is_active():
            args, kwargs = change(args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _replace(mod: Any, fn: str, handle: Any, make: Callable[[Function], Function]) -> None:
    if utils.has_func(mod, fn):
        utils.set_func_save(handle, mod, fn, make(utils.get_func(mod, fn)))


def _change(mod: Any, fn: str, handle: Any, change: Callable[[tuple, dict[str, Any]], Any]) -> None:
    _replace(mod, fn, handle, lambda function: _casting(function, handle, change))


def make_cast_wrapper(
    orig_fn: Function, cast_fn: Function, handle: Any, try_caching: bool = False
) -> Function:
    """`orig_fn` with floating-point arguments cast by `cast_fn`; `try_caching` caches casts of Parameters."""

    def cast(x: Any) -> Any:
        cached = (
            try_caching and handle.has_cache and utils.should_cache(x) and not torch.compiler.is_compiling()
        )
        return utils.cached_cast(cast_fn, x, handle.cache) if cached else cast_fn(x)

    return _casting(orig_fn, handle, lambda args, kwargs: (utils.casted_args(cast, args, kwargs), kwargs))


def make_promote_wrapper(orig_fn: Function, cast_fn: Function, handle: Any) -> Function:
    """`orig_fn` whose floating-point arguments are cast by `cast_fn` when some are half and some float32."""

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:
        return (utils.casted_args(cast_fn, args, kwargs) if _mixed(args, kwargs) else args), kwargs

    return _casting(orig_fn, handle, change)


def _mixed(args: Any, kwargs: dict[str, Any]) -> bool:
    types = utils.collect_fp_tensor_types(args, kwargs)
    return "FloatTensor" in types and not types.isdisjoint(_HALF) and "DoubleTensor" not in types


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
    cast_fn = utils.verbosify(utils.maybe_float, fn, verbose)

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:
        sequence, *others = args
        sequence = list(sequence)
        if _mixed(sequence, {}):
            sequence = utils.casted_args(cast_fn, sequence, {})
        return (sequence, *others), kwargs

    _change(mod, fn, handle, change)


def promote_match_arg0(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes a function that writes its first argument cast the others to the dtype of the first."""

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:
        first, *others = args
        if utils.is_fp_tensor(first):
            others = utils.casted_args(partial(utils.cast_to, lambda _: first.dtype), others, kwargs)
        return (first, *others), kwargs

    _change(mod, fn, handle, change)


def _refuse(fn: str, message: str | None) -> NoReturn:
    raise NotImplementedError(
        message or f"amp: {fn} takes no half tensors, because it writes them in place; cast them to float32"
    )


def err_if_any_half(mod: Any, fn: str, handle: Any, custom_err_msg: str | None = None) -> None:
    """Makes `mod.fn` raise NotImplementedError when an argument is half."""

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:
        if utils.collect_fp_tensor_types(args, kwargs).intersection(_HALF):
            _refuse(fn, custom_err_msg)
        return args, kwargs

    _change(mod, fn, handle, change)


def err_if_arg0_half(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes `mod.fn` raise NotImplementedError for a half first argument, and cast the others to float32."""
    cast = utils.verbosify(utils.maybe_float, fn, verbose)

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:
        first, *others = args
        if utils.type_string(first) in _HALF:
            _refuse(fn, None)
        return (first, *utils.casted_args(cast, others, kwargs)), kwargs

    _change(mod, fn, handle, change)


def new_rnn_cast(fn: str, handle: Any, verbose: bool = False) -> None:
    """Makes torch.nn's "LSTM", "GRU", "RNN_TANH" or "RNN_RELU", or a cell ("LSTM_CELL"), run in half."""

    def change(args: tuple, kwargs: dict[str, Any]) -> Any:  # torch.nn requires the dtype of the weights
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    if not fn.endswith("_CELL"):
        _change(getattr(nn, fn.partition("_")[0]), "forward", handle, change)
    cached_cast(torch._VF, fn.lower(), utils.maybe_half, handle, try_caching=True, verbose=verbose)


def disable_casts(mod: Any, fn: str, handle: Any) -> None:
    """Disables casts inside `mod.fn`."""
    _replace(mod, fn, handle, handle._disable_casts())
