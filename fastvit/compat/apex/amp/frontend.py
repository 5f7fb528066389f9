"""`initialize` with the options of O0 to O3, and the state of the loss scalers."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..parallel import LARC
from ..parallel import DistributedDataParallel as ApexDistributedDataParallel
from . import forward
from ._amp_state import Properties, _amp_state, maybe_print
from .forward import ForwardCasts, half_dtype, model_device_type
from .handle import AmpOptimizer, as_list, unwrap_larc
from .lists import AmpHandle
from .scaler import LossScaler
from .weights import HALF_DTYPES

# The columns are the fields of Properties: enabled, opt_level, cast_model_type, patch_torch_functions,
# keep_batchnorm_fp32, master_weights, loss_scale.
opt_levels = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}
"""O0 is float32, O1 runs forward under autocast, O2 is half with float32 BatchNorm, and O3 is half."""


def _parse_option(name: str, value: Any) -> Any:
    """Returns the value of an override, or raises ValueError for a value of a wrong kind."""
    if name == "loss_scale":
        expected = "'dynamic' or a number above 0"
        with contextlib.suppress(TypeError, ValueError):
            if value == "dynamic" or 0 < float(value) < float("inf"):
                return value if value == "dynamic" else float(value)
    elif name == "cast_model_type":
        expected = "a floating-point dtype, False or None"
        if value is False or (isinstance(value, torch.dtype) and value.is_floating_point):
            return value or None
    else:
        expected = "True, False or None"
        if isinstance(value, (bool, str)) and str(value) in ("True", "False"):
            return str(value) == "True"
    raise ValueError(f"amp.initialize: {name} takes {expected}, got {value!r}")


def resolve_properties(opt_level: str, **overrides: Any) -> Properties:
    """Returns the defaults of `opt_level`, with every override that is not None.

    Raises:
        RuntimeError: for an unknown level, or an override that contradicts the level.
        ValueError: for an override of a wrong type.
    """
    if opt_level not in opt_levels:
        raise RuntimeError(f"amp.initialize: opt_level takes 'O0', 'O1', 'O2' or 'O3', got {opt_level!r}")
    options = {name: _parse_option(name, value) for name, value in overrides.items() if value is not None}
    if opt_level == "O1":
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if name in options:
                raise RuntimeError(
                    f"amp.initialize: {name} has no effect under O1, whose weights are float32; leave out "
                    f"{name}"
                )
    elif options.get("patch_torch_functions"):
        raise RuntimeError(
            f"amp.initialize: patch_torch_functions=True is for opt_level 'O1', got {opt_level!r}; leave "
            "patch_torch_functions out"
        )
    return replace(opt_levels[opt_level], **options)


def initialize(
    models: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepares models and optimizers for mixed precision, in place, and returns them as they were passed.

    Call `initialize` after the model was moved to its device. O0 is float32. O1 runs forward under
    torch.autocast. O2 and O3 run forward with inputs and weights cast to half, but O2 does not cast those of
    BatchNorm. The weights are float32 at every level, and so are gradients, checkpoints and the steps of
    optimizers. Outputs in half come back in float32, so that a scaled loss does not overflow. Half is float16
    on CUDA and bfloat16 on the CPU, or `cast_model_type`. A later call with the same models or optimizers
    first undoes the earlier call.

    Args:
        optimizers: the optimizers that step the models; None for inference.
        enabled: False only undoes an earlier call, and turns the other functions of amp into no-ops.
        opt_level: "O0", "O1", "O2" or "O3": the defaults of the next five arguments.
        cast_model_type: dtype of weights and inputs in forward, False for no cast; under O1 autocast's.
        patch_torch_functions: False turns O1's autocast off.
        keep_batchnorm_fp32: BatchNorm layers, torch's and fastvit's, stay float32.
        master_weights: has no effect, since the weights are float32.
        loss_scale: "dynamic" (2^16, doubled after 2000 clean steps, halved by an overflow), or a number.
        cast_model_outputs: dtype of floating-point outputs; None casts those in half to float32.
        num_losses: number of losses, each with its own scale; see `scale_loss`'s loss_id.
        verbosity: 0 prints nothing.
        min_loss_scale, max_loss_scale: floor and ceiling of the dynamic scale; without a floor it is 2^-24.

    Raises:
        RuntimeError: for an override that contradicts the level, or weights in half.
        TypeError, ValueError: for an argument of the wrong kind.
    """
    # An iterator gives its items only once.
    models = list(models) if isinstance(models, Iterator) else models
    optimizers = list(optimizers) if isinstance(optimizers, Iterator) else optimizers
    _amp_state.verbosity = verbosity
    if hasattr(_amp_state, "handle"):
        _amp_state.handle._deactivate()
        del _amp_state.handle
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        _undo_initialize(models, optimizers)
        _amp_state.opt_properties, _amp_state.loss_scalers = Properties(), []
        return result
    properties = resolve_properties(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list = _list_instances("models", models, nn.Module)
    optimizer_list = _list_instances(
        "optimizers", [] if optimizers is None else optimizers, (Optimizer, LARC)
    )
    if properties.cast_model_type is torch.float16 and cast_model_type is None:
        properties.cast_model_type = half_dtype(model_device_type(model_list[0]) if model_list else "cpu")
    scale_limits: dict[str, Any] = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    scalers = [LossScaler(properties.loss_scale, **scale_limits) for _ in range(num_losses)]
    for index, scaler in enumerate(scalers):
        scaler.loss_id = index

    maybe_print(f"amp: {properties}", rank0=True)
    _undo_initialize(model_list, optimizer_list)
    for model in model_list:
        _prepare_model(model, properties, cast_model_outputs)
    has_cast_weights = properties.opt_level != "O1" and properties.cast_model_type in HALF_DTYPES
    for optimizer in optimizer_list:
        AmpOptimizer(unwrap_larc(optimizer), has_cast_weights)
    _amp_state.opt_properties, _amp_state.loss_scalers = properties, scalers
    vars(_amp_state).update(scale_limits)
    if properties.patch_torch_functions:
        _amp_state.handle = AmpHandle()
    return result


def _list_instances(name: str, value: Any, kinds: Any) -> list[Any]:
    """Returns a list of the items in `value`, or raises TypeError for an item of another kind."""
    items = as_list(value)
    for item in items:
        if not isinstance(item, kinds):
            expected = "torch.nn.Module" if name == "models" else "torch.optim.Optimizer"
            kind = type(item).__name__
            raise TypeError(f"amp.initialize: {name} takes one {expected} or a list, got {kind}")
    return items


def _undo_initialize(models: Any, optimizers: Any) -> None:
    """Undoes an earlier `initialize`; ignores objects of other kinds."""
    for model in as_list(models):
        for module in model.modules() if isinstance(model, nn.Module) else ():
            forward.remove_casts(module)
    for optimizer in as_list(optimizers):
        if hasattr(optimizer, "_amp_stash"):
            optimizer._amp_stash.remove()


def _prepare_model(model: nn.Module, properties: Properties, output_dtype: torch.dtype | None) -> None:
    """Puts the casts around the forward of `model`, or of the model in a wrapper of data parallelism."""
    if isinstance(model, (DistributedDataParallel, ApexDistributedDataParallel, DataParallel)):
        model = model.module
    for name, parameter in model.named_parameters():
        if parameter.dtype in HALF_DTYPES and not _amp_state.allow_incoming_model_not_fp32:
            raise RuntimeError(
                f"amp.initialize: parameter {name} is {parameter.dtype}; a float32 model expected, which amp "
                "casts by the level; leave out half() or to() before amp.initialize"
            )
    casts = ForwardCasts(copy.copy(properties), output_dtype)
    forward.install_casts(model, casts)
    if casts.model_dtype is not None:
        model.float()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns {"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}, one entry per loss.

    The float32 weights are in the state_dict of the model.
    """
    destination = {} if destination is None else destination
    for index, scaler in enumerate(getattr(_amp_state, "loss_scalers", ())):
        scaler_state = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
        destination[f"loss_scaler{index}"] = scaler_state
    return destination


def load_state_dict(state: dict[str, Any]) -> None:
    """Restores the scalers from a result of `state_dict`, apex's or fastvit's; call it after `initialize`.

    If the numbers of scalers differ, a message is printed. Surplus entries are ignored. Scalers without an
    entry do not change.

    Raises:
        RuntimeError: for other keys than those of `state_dict`.
    """
    prefix = "loss_scaler"
    unexpected = [k for k in state if not (k.startswith(prefix) and k.removeprefix(prefix).isdigit())]
    if unexpected:
        raise RuntimeError(
            f"amp.load_state_dict: unexpected keys {', '.join(map(repr, unexpected))}; pass a result of "
            "amp.state_dict"
        )
    scalers = getattr(_amp_state, "loss_scalers", [])
    if len(state) != len(scalers) and scalers:
        message = f"amp.load_state_dict: got {len(state)} loss scalers; amp.initialize made {len(scalers)}"
        maybe_print(message, rank0=True)
    for key, value in state.items():
        index = int(key.removeprefix(prefix))
        if index < len(scalers):
            scaler = scalers[index]
            scaler._loss_scale, scaler._unskipped = float(value["loss_scale"]), int(value["unskipped"])
