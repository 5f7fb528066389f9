"""Casts of arguments, and replacement of functions in modules, for `wrap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .forward import half_type

__all__ = [
    "as_inplace",
    "cached_cast",
    "cast_to",
    "casted_args",
    "collect_fp_tensor_types",
    "get_cuda_version",
    "get_func",
    "has_func",
    "is_cuda_enabled",
    "is_fp_tensor",
    "is_nested",
    "maybe_float",
    "maybe_half",
    "set_func",
    "set_func_save",
    "should_cache",
    "type_string",
    "verbosify",
]


def is_cuda_enabled() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """torch's CUDA version, (12, 6) for example; empty for a CPU build."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    return isinstance(x, (tuple, list))


def is_fp_tensor(x: Any) -> bool:
    """Whether x is a floating-point tensor, or a tuple or list of these only."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def should_cache(x: Any) -> bool:
    """Whether the cast of x is cached: x is a float32 Parameter, or a tuple or list of these only."""
    if is_nested(x):
        return all(should_cache(item) for item in x)
    return isinstance(x, nn.Parameter) and x.dtype == torch.float32


def type_string(x: Tensor) -> str:
    """HalfTensor, FloatTensor and so on, on any device."""
    return x.type().rpartition(".")[2]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """The `type_string` of every floating-point tensor among the arguments."""

    def types(x: Any) -> set[str]:
        return set().union(*map(types, x)) if is_nested(x) else {type_string(x)}

    return set().union(*(types(x) for x in (*args, *kwargs.values()) if is_fp_tensor(x)))


def cast_to(dtype_of: Callable[[Tensor], torch.dtype], x: Any, name: str = "", verbose: bool = False) -> Any:
    """x, a tensor or nested tensors, each cast to `dtype_of(tensor)`."""
    if is_nested(x):
        items = [cast_to(dtype_of, item, name, verbose) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    cast = x.to(dtype_of(x))
    if verbose and cast is not x:
        print(f"{type_string(x)} -> {type_string(cast)} ({name})")
    return cast


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """x, a tensor or nested tensors, in half: float16, and bfloat16 on the CPU."""
    return cast_to(lambda tensor: half_type(tensor.device), x, name, verbose)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """x, a tensor or nested tensors, in float32."""
    return cast_to(lambda tensor: torch.float32, x, name, verbose)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The positional arguments, cast where they are floating-point tensors; changes `kwargs` in place."""
    kwargs.update({key: cast_fn(value) for key, value in kwargs.items() if is_fp_tensor(value)})
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def cached_cast(cast_fn: Callable[[Any], Any], x: Any, cache: dict[Tensor, tuple[int, Tensor]]) -> Any:
    """`cast_fn(x)`, cached until x is written.

    A cast without gradients is not used with gradients, and the reverse; it is repeated then.
    """
    if is_nested(x):
        return type(x)([cached_cast(cast_fn, item, cache) for item in x])
    version, cast = cache.get(x, (-1, x))
    if version != x._version or cast.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        cast = cast_fn(x)
        cache[x] = x._version, cast
    return cast


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """`cast_fn`, which with `verbose` prints its casts for `fn_name`."""
    return functools.partial(cast_fn, name=fn_name, verbose=True) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> Iterator[str]:
    return (f"{name}_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle: Any, mod: Any, fn: str, new_fn: Any) -> None:
    """Replaces `mod.fn` until `handle._deactivate()`."""
    handle._save_func(mod, fn, get_func(mod, fn))
    set_func(mod, fn, new_fn)
