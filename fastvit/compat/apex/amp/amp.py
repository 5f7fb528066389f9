"""`init`, the older way to switch amp on: torch's functions cast their arguments by `lists`."""

from __future__ import annotations

from itertools import chain
from typing import Any

from . import utils, wrap
from ._amp_state import _amp_state
from .functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    uncast_function,
)
from .handle import AmpHandle, NoOpHandle
from .lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = [
    "float_function",
    "follow_changed_lists",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

_OVERRIDES = (functional_overrides, torch_overrides, tensor_overrides)
_RECURRENT = ("RNN_TANH", "RNN_RELU", "LSTM", "GRU")


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Patches torch's functions, and those registered with amp, to cast their arguments.

    Weights stay float32. The loss is scaled by `handle.scale_loss(loss, optimizer)`, or by `scale_loss` of
    `handle.wrap_optimizer(optimizer)`. Half is float16, and bfloat16 on the CPU. Patches of an earlier `init`
    or `initialize` are removed first.

    Args:
        enabled: False only removes patches, and returns a handle without effect.
        loss_scale: "dynamic" or a number.
        enable_caching: reuse the half copy of a weight until the weight is written.
        verbose: print each cast.
        allow_banned: run F.binary_cross_entropy in float32 instead of refusing half tensors.

    Raises:
        NotImplementedError: later, where half tensors are given to F.binary_cross_entropy, or to an in-place
            form of a function that runs in float32.
    """
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    _amp_state.handle = NoOpHandle()
    if not enabled:
        return _amp_state.handle
    handle = AmpHandle(loss_scale, enable_caching, verbose, everywhere=True)
    for overrides in _OVERRIDES:
        for name in overrides.FP16_FUNCS:
            wrap.cached_cast(overrides.MODULE, name, utils.maybe_half, handle, True, verbose)
        for name in overrides.FP32_FUNCS:
            wrap.cached_cast(overrides.MODULE, name, utils.maybe_float, handle, False, verbose)
    for overrides in (torch_overrides, tensor_overrides):
        for name in overrides.CASTS:
            wrap.promote(overrides.MODULE, name, handle, verbose)
        for name in overrides.SEQUENCE_CASTS:
            wrap.sequence_promote(overrides.MODULE, name, handle, verbose)
    for name in utils.as_inplace(torch_overrides.FP32_FUNCS):
        wrap.err_if_any_half(torch_overrides.MODULE, name, handle)
    for name in utils.as_inplace(tensor_overrides.FP32_FUNCS):
        wrap.err_if_arg0_half(tensor_overrides.MODULE, name, handle, verbose)
    for name in utils.as_inplace(chain(tensor_overrides.FP16_FUNCS, tensor_overrides.CASTS)):
        wrap.promote_match_arg0(tensor_overrides.MODULE, name, handle, verbose)
    for name, message in functional_overrides.BANNED_FUNCS:
        if allow_banned:
            wrap.cached_cast(functional_overrides.MODULE, name, utils.maybe_float, handle, False, verbose)
        else:
            wrap.err_if_any_half(functional_overrides.MODULE, name, handle, message)
    for name in _RECURRENT:
        wrap.new_rnn_cast(name, handle, verbose)
        wrap.new_rnn_cast(f"{name}_CELL", handle, verbose)
    _amp_state.handle = handle
    return handle


def _listed(overrides: Any) -> dict[str, str]:
    kinds = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
    return {name: kind for kind in kinds for name in getattr(overrides, kind, ())}


_AT_FIRST = [_listed(overrides) for overrides in _OVERRIDES]
_CASTS = {"FP16_FUNCS": half_function, "FP32_FUNCS": float_function}


def follow_changed_lists(handle: AmpHandle) -> None:
    """Applies changes that a script has made to `lists` to casts under autocast, until
    `handle._deactivate()`. A function that was removed from all lists gets its arguments without a cast.
    """
    for overrides, before in zip(_OVERRIDES, _AT_FIRST, strict=True):
        now = _listed(overrides)
        for name in before.keys() | now.keys():
            if before.get(name) == now.get(name) or not utils.has_func(overrides.MODULE, name):
                continue
            # without the cast that autocast would do inside
            function = uncast_function(utils.get_func(overrides.MODULE, name))
            cast = _CASTS.get(now.get(name, ""))
            utils.set_func_save(handle, overrides.MODULE, name, function if cast is None else cast(function))
