"""Casts for the user's functions: to half, to float32, or to the widest dtype of the arguments.

They are active where autocast is on, which is inside the forward of a model under O1.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastvit._checks import autocast_dtype

from .forward import cast_floating
from .handle import disable_casts

Function = Callable[..., Any]


def _casting(
    fn: Function, dtype_of: Callable[[torch.dtype, list[Tensor]], torch.dtype | None], inside: bool
) -> Function:
    """`fn`, where casts are active, with floating-point tensor arguments cast to `dtype_of(half, tensors)`.

    Args:
        dtype_of: None for no cast.
        inside: whether casts stay active inside `fn`.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        half = autocast_dtype(tensors[0]) if tensors else None
        if half is None:
            return fn(*args, **kwargs)
        dtype = dtype_of(half, tensors)
        if dtype is not None:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        with nullcontext() if inside else disable_casts():
            return fn(*args, **kwargs)

    return wrapper


def half_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to autocast's dtype."""
    return _casting(fn, lambda half, _: half, inside=True)


def float_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to float32 and runs without autocast."""
    return _casting(fn, lambda *_: torch.float32, inside=False)


def promote_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to the widest dtype among them."""

    def widest(half: torch.dtype, tensors: list[Tensor]) -> torch.dtype | None:
        dtypes = [t.dtype for t in tensors if t.is_floating_point()]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    return _casting(fn, widest, inside=True)


def uncast_function(fn: Function) -> Function:
    """Passes arguments without casts, and disables casts inside."""
    return _casting(fn, lambda *_: None, inside=False)


def _register(wrap: Callable[[Function], Function], module: Any, function_name: str) -> None:
    """Replaces `module.function_name` by `wrap` of it; ValueError for an unknown name."""
    if not hasattr(module, function_name):
        raise ValueError(f"amp: no function named {function_name} in {module}")
    setattr(module, function_name, wrap(getattr(module, function_name)))


register_half_function = functools.partial(_register, half_function)
register_float_function = functools.partial(_register, float_function)
register_promote_function = functools.partial(_register, promote_function)
