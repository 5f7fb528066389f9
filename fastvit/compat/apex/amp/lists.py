"""Casts of functions, which are active under autocast: in the forward of a model under O1.

The user's functions are cast to half, to float32, or to the widest dtype of the arguments. The lists have the
functions that apex casts, by name, for scripts that change them before `initialize`. O1 uses autocast's
lists, with those changes.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastvit._checks import autocast_dtype

from ..._import_hook import missing_attribute_getter
from .forward import cast_floating
from .handle import disable_casts

Function = Callable[..., Any]


def _with_casts(
    fn: Function,
    choose_dtype: Callable[[torch.dtype, list[Tensor]], torch.dtype | None],
    keeps_autocast: bool,
) -> Function:
    """Returns `fn` with a cast of its floating-point tensor arguments, which is active under autocast.

    Args:
        choose_dtype: returns the dtype for autocast's dtype and the tensors, or None for no cast.
        keeps_autocast: whether `fn` runs under autocast.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        half = autocast_dtype(tensors[0]) if tensors else None
        if half is None:
            return fn(*args, **kwargs)
        dtype = choose_dtype(half, tensors)
        if dtype is not None:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        with nullcontext() if keeps_autocast else disable_casts():
            return fn(*args, **kwargs)

    return wrapper


def half_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to autocast's dtype."""
    return _with_casts(fn, lambda half, _: half, keeps_autocast=True)


def float_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to float32 and runs without autocast."""
    return _with_casts(fn, lambda *_: torch.float32, keeps_autocast=False)


def promote_function(fn: Function) -> Function:
    """Casts floating-point tensor arguments to the widest dtype among them."""

    def find_widest_dtype(_: torch.dtype, tensors: list[Tensor]) -> torch.dtype | None:
        dtypes = [t.dtype for t in tensors if t.is_floating_point()]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    return _with_casts(fn, find_widest_dtype, keeps_autocast=True)


def _register(decorate: Callable[[Function], Function], module: Any, function_name: str) -> None:
    """Replaces `module.function_name` by what `decorate` returns for it."""
    if not hasattr(module, function_name):
        raise ValueError(f"amp: {module} has no function {function_name!r} to register; check the name")
    setattr(module, function_name, decorate(getattr(module, function_name)))


register_half_function = functools.partial(_register, half_function)
register_float_function = functools.partial(_register, float_function)
register_promote_function = functools.partial(_register, promote_function)


class functional_overrides:
    """Names of functions of torch.nn.functional that run in half, or in float32."""

    FP16_FUNCS = ["linear", "conv_tbc", *(f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3))]
    FP32_FUNCS = """
        gelu softplus softmax softmin log_softmax layer_norm group_norm local_response_norm normalize
        cosine_similarity grid_sample interpolate l1_loss smooth_l1_loss mse_loss kl_div nll_loss
        poisson_nll_loss ctc_loss cross_entropy binary_cross_entropy_with_logits soft_margin_loss
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss margin_ranking_loss
        triplet_margin_loss cosine_embedding_loss hinge_embedding_loss
    """.split()


def _list_decorators() -> dict[str, Callable[..., Any]]:
    """Returns the decorator of each function that the lists name now."""
    decorators = dict.fromkeys(functional_overrides.FP16_FUNCS, half_function)
    return decorators | dict.fromkeys(functional_overrides.FP32_FUNCS, float_function)


_INITIAL_DECORATORS = _list_decorators()


class AmpHandle:
    """`_amp_state.handle` under O1. There are no casts while `_is_active` is False.

    A handle applies the changes that a script has made to the lists to casts under autocast. A function that
    was removed from all lists gets its arguments without a cast.
    """

    def __init__(self) -> None:
        self._is_active = True
        self._original_functions: dict[str, Any] = {}
        decorators = _list_decorators()
        for name in _INITIAL_DECORATORS.keys() | decorators.keys():
            decorate = decorators.get(name)
            if decorate is not _INITIAL_DECORATORS.get(name) and hasattr(torch.nn.functional, name):
                function = self._original_functions[name] = getattr(torch.nn.functional, name)
                function = _with_casts(function, lambda *_: None, keeps_autocast=False)
                setattr(torch.nn.functional, name, decorate(function) if decorate else function)

    def is_active(self) -> bool:
        return self._is_active

    _disable_casts = staticmethod(disable_casts)
    _clear_cache = staticmethod(torch.clear_autocast_cache)
    __getattr__ = missing_attribute_getter("apex.amp.handle.AmpHandle")

    def _deactivate(self) -> None:
        """Ends the casts, and restores torch's functions."""
        self._is_active = False
        for name, function in self._original_functions.items():
            setattr(torch.nn.functional, name, function)
