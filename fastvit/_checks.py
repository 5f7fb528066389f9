"""Checks of the layers' arguments: activations, shapes, dtypes, inputs that may be overwritten."""

import sys
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _autograd

from . import _library
from ._deprecation import user_stacklevel
from ._formulas import ACTIVATIONS

if TYPE_CHECKING:
    from .functional import NormOptions, NormTensors

_FLOAT32_TINY = 2.0**-126  # The smallest normal float32.
INVERTIBLE_ACTIVATIONS = ("identity", "leaky_relu", "elu")
# A function that returns its model has this type, so that type checkers keep the model's class.
Model = TypeVar("Model", bound=nn.Module)


def check_module(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{name}: model must be a torch.nn.Module, got an object of type {kind}")


def check_tensor(name: str, x: object, argument: str | None = None) -> None:
    if not isinstance(x, Tensor):
        name = f"{name}: {argument}" if argument else name
        hint = "; torch.from_numpy makes one" if type(x).__module__ == "numpy" else ""
        raise TypeError(f"{name}: a tensor expected, got an object of type {type(x).__name__}{hint}")


def is_number(value: object, minimum: float, maximum: float) -> TypeGuard[float]:
    """Returns whether `value` is a number from `minimum` to `maximum`. A bool and nan are no numbers."""
    number: Any = value  # Real has no order for type checkers
    return isinstance(value, Real) and not isinstance(value, bool) and minimum <= number <= maximum


def check_eps(name: str, eps: object) -> None:
    if not is_number(eps, 0, 1 / _FLOAT32_TINY):
        raise ValueError(f"{name}: eps is {eps!r}; a number from 0 to 2**126 expected")


def check_momentum(name: str, momentum: object) -> None:
    if momentum is not None and not is_number(momentum, 0, 1):
        raise ValueError(f"{name}: momentum is {momentum!r}; a number from 0 to 1, or None, expected")


def check_dtype(name: str, argument: str, dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name}: {argument} is {dtype!r}; a floating-point torch.dtype or None expected")


def check_flag(name: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {argument} is {value!r}; True or False expected")


def resolve_activation_param(name: str, activation: str, activation_param: float | None) -> float:
    """Returns the parameter to use: the activation's default for None, 0 for an activation without one.

    Args:
        name: the layer or function, for errors.

    Raises:
        ValueError: a wrong name or value.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation is {activation!r}; one of {', '.join(ACTIVATIONS)} expected")
    _, default = ACTIVATIONS[activation]
    if default is None:
        return 0.0
    param = default if activation_param is None else activation_param
    if not is_number(param, -1 / _FLOAT32_TINY, 1 / _FLOAT32_TINY):
        raise ValueError(
            f"{name}: activation_param is {param!r}; a number from -2**126 to 2**126 expected for "
            f"{activation}"
        )
    return param


def resolve_invertible_param(name: str, activation: str, activation_param: float | None) -> float:
    """Does as `resolve_activation_param`, for an activation in place, which is inverted in backward."""
    if activation not in INVERTIBLE_ACTIVATIONS:
        raise ValueError(
            f"{name}: activation is {activation!r}; one of {', '.join(INVERTIBLE_ACTIVATIONS)} expected, "
            "because backward inverts an activation in place"
        )
    if activation == "elu" and activation_param is None:
        message = f"{name}: the alpha of elu is 1 by default, as in BatchNormAct; it was 0.01 before"
        warnings.warn(f"{message}; pass activation_param", FutureWarning, user_stacklevel())
    param = resolve_activation_param(name, activation, activation_param)
    if activation != "identity" and param < _FLOAT32_TINY:
        raise ValueError(
            f"{name}: activation_param is {param!r}; a number from 2**-126 to 2**126 expected for "
            f"{activation} in place, because backward divides by it"
            + (" (slope 0 is relu, which cannot be inverted)" if param == 0 else "")
        )
    return param


def check_dimensions(name: str, x: Tensor) -> None:
    """Raises ValueError unless x has 2 to 5 dimensions."""
    if not 2 <= x.dim() <= 5:
        raise ValueError(f"{name}: expected an input of 2 to 5 dimensions, got {x.dim()}D {tuple(x.shape)}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype if autocast is on for x's device, else None.

    torch.compile of torch 2.11 cannot trace `torch.amp.is_autocast_available`, and is_autocast_enabled raises
    for devices without autocast, such as meta.
    """
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def is_distributed(x: Tensor) -> bool:
    """Returns whether x is a DTensor, which has shards on several ranks."""
    module = None if type(x) is Tensor else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_gpu_has_kernels(name: str, x: Tensor) -> None:
    if x.is_cuda and (problem := _library.gpu_problem(x.device)):
        raise ValueError(f"{name}: the input is on {x.device}, but {problem}")


def check_input(options: "NormOptions", x: Tensor, residual: Tensor | None, tensors: "NormTensors") -> None:
    """Raises ValueError for a wrong shape, dtype or device, and for a wrong eps or momentum.

    An object that is no tensor is a TypeError.
    """
    name, channel_last = options.function_name, options.channel_last
    check_dimensions(name, x)
    channel_dim = options.channel_dim(x)
    check_eps(name, options.eps)
    check_momentum(name, options.momentum)
    is_cumulative = options.training and options.momentum is None and tensors.running_mean is not None
    if is_cumulative and tensors.num_batches_tracked is None:
        raise ValueError(f"{name}: momentum is None without num_batches_tracked; both or a number expected")
    if is_distributed(x):
        raise ValueError(
            f"{name}: the input is a DTensor, whose shards the op cannot read; pass x.to_local(), or keep "
            "torch's layer (call fastvit.fuse after parallelize_module)"
        )
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point input, got {x.dtype}")
    check_gpu_has_kernels(name, x)
    by_argument = dict(zip(tensors._fields, tensors, strict=True))
    for argument, tensor in (*by_argument.items(), ("residual", residual)):
        if tensor is not None:
            check_tensor(name, tensor, argument)
    for argument, tensor in list(by_argument.items())[:-1]:  # The counter has no channels.
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != x.shape[channel_dim]):
            raise ValueError(
                f"{name}: {argument} has shape {tuple(tensor.shape)}, so expected as many channels in "
                f"dimension {channel_dim}, got {x.shape[channel_dim]} (input {tuple(x.shape)}, "
                f"{channel_last=})"
            )
    for argument, tensor in by_argument.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name}: the input is on {x.device} and {argument} on {tensor.device}; one device expected"
            )
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device
    ):
        raise ValueError(
            f"{name}: residual is {tuple(residual.shape)}, {residual.dtype}, on {residual.device}; "
            f"{tuple(x.shape)}, {x.dtype}, on {x.device} expected, as the input"
        )


def check_can_overwrite(name: str, x: Tensor) -> None:
    """Raises RuntimeError where autograd would, but before x is overwritten."""
    is_recording = torch.is_grad_enabled()
    if x.is_neg():
        problem = "is negated by a flag only (torch.Tensor.is_neg)"
    elif x.is_inference() and not torch.is_inference_mode_enabled():
        problem = "is an inference tensor outside inference mode"
    elif is_recording and x._base is not None and x._base.is_leaf and x._base.requires_grad:
        problem = "is a view of a leaf that requires grad"
    elif is_recording and x.requires_grad and x.is_leaf:
        problem = "is a leaf that requires grad"
    elif (
        is_recording
        and x.requires_grad
        and x._is_view()
        and _autograd._get_creation_meta(x) != _autograd.CreationMeta.DEFAULT
    ):
        problem = "is one of the views that one op made (chunk, split, unbind) or a view made without grad"
    else:
        return
    raise RuntimeError(
        f"{name}: the input {problem}, which cannot be overwritten; "
        "pass the result of an op (a clone of it, for example)"
    )
