"""LayerNorm and RMSNorm under apex's names, computed by torch's kernels, which are fused too."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastvit._checks import autocast_dtype

from .._warn_once import warn_once
from ..amp._amp_state import _amp_state
from ..amp.forward import cast_floating

Shape = int | Sequence[int]


def _apply_norm(
    norm: Callable[..., Tensor],
    x: Tensor,
    parameters: Sequence[Tensor | None],
    normalized_shape: Shape,
    eps: float | None,
    memory_efficient: bool = False,
    uses_weight_dtype: bool = False,
) -> Tensor:
    """Returns `norm(x, normalized_shape, *parameters, eps)`, computed in the widest dtype of its arguments.

    The result has x's dtype, or with `uses_weight_dtype` the weight's. As in apex, autocast's dtype replaces
    both dtypes, unless x is float64 or amp runs at opt_level O1.
    """
    _warn_memory_efficient(memory_efficient)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    target_dtype, dtype = autocast_dtype(x), x.dtype
    weight_dtype = dtype if parameters[0] is None else parameters[0].dtype
    # _amp_state has a handle only under O1.
    if target_dtype and dtype != torch.float64 and not hasattr(_amp_state, "handle"):
        dtype = weight_dtype = target_dtype
    x, *parameters = cast_floating((x, *parameters), torch.promote_types(dtype, weight_dtype))
    with torch.autocast(x.device.type, enabled=False) if target_dtype else contextlib.nullcontext():
        y = norm(x, shape, *parameters, eps)
    return y.to(weight_dtype if uses_weight_dtype else dtype)


def _warn_memory_efficient(memory_efficient: bool) -> None:
    if memory_efficient:
        reason = "torch saves the input, not the output; leave memory_efficient out"
        warn_once(f"apex.normalization: memory_efficient has no effect, because {reason}")


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Normalises the last dimensions, of sizes `normalized_shape`. The result has the input's dtype."""
    return _apply_norm(F.layer_norm, input, (None, None), normalized_shape, eps, memory_efficient)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    mixed: bool = False,
) -> Tensor:
    """Returns `fused_layer_norm` times weight plus bias; with `mixed` in the dtype of the weight."""
    parameters = weight, bias
    return _apply_norm(
        F.layer_norm, input, parameters, normalized_shape, eps, memory_efficient, uses_weight_dtype=mixed
    )


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Divides by the root mean square over the last dimensions. The result has the input's dtype."""
    return _apply_norm(F.rms_norm, input, (None,), normalized_shape, eps, memory_efficient)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
    *,
    mixed: bool = False,
) -> Tensor:
    """Returns `fused_rms_norm` times weight; with `mixed` in the dtype of the weight."""
    parameters = (weight,)
    return _apply_norm(
        F.rms_norm, input, parameters, normalized_shape, eps, memory_efficient, uses_weight_dtype=mixed
    )


mixed_dtype_fused_layer_norm_affine = functools.partial(fused_layer_norm_affine, mixed=True)
mixed_dtype_fused_rms_norm_affine = functools.partial(fused_rms_norm_affine, mixed=True)


def _fast_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False
) -> Tensor:
    """Applies LayerNorm. The result has the dtype of the weight."""
    return fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient, mixed=True)


def as_autograd_function(function: Callable[..., Tensor]) -> type:
    """Returns apex's form of `function`: a class with `apply(...)`, which torch differentiates.

    The class also has `forward(ctx, ...)` and `backward`, which scripts inspect and wrap.
    """

    def forward(ctx: Any, *arguments: Any) -> Tensor:
        return function(*arguments)

    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            "apex's autograd functions have no backward in fastvit, because torch differentiates `apply`; "
            "call backward of the output"
        )

    # `inspect.signature(forward)` then shows ctx and the arguments of `function`.
    ctx, signature = inspect.signature(forward).parameters["ctx"], inspect.signature(function)
    forward.__signature__ = signature.replace(parameters=[ctx, *signature.parameters.values()])  # type: ignore[attr-defined]
    methods = {"apply": function, "forward": forward, "backward": backward}
    return type("Function", (), {name: staticmethod(method) for name, method in methods.items()})


FastLayerNormFN = as_autograd_function(_fast_layer_norm)
FusedLayerNormAffineFunction = as_autograd_function(fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = as_autograd_function(mixed_dtype_fused_layer_norm_affine)
FusedLayerNormFunction = as_autograd_function(fused_layer_norm)
FusedRMSNormAffineFunction = as_autograd_function(fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = as_autograd_function(mixed_dtype_fused_rms_norm_affine)
FusedRMSNormFunction = as_autograd_function(fused_rms_norm)


class _MemoryEfficientMixin(nn.Module):
    """Adds apex's argument memory_efficient to a layer of torch, which is the second base.

    Args:
        memory_efficient: has no effect, and warns once.
    """

    uses_weight_dtype = False  # True if the output has the dtype of the weight, not of the input

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        _warn_memory_efficient(memory_efficient)
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_MemoryEfficientMixin, nn.LayerNorm):
    """torch.nn.LayerNorm; the output has the dtype of the input, not of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        parameters, shape = (self.weight, self.bias), self.normalized_shape
        return _apply_norm(
            F.layer_norm, input, parameters, shape, self.eps, uses_weight_dtype=self.uses_weight_dtype
        )


class FusedRMSNorm(_MemoryEfficientMixin, nn.RMSNorm):
    """torch.nn.RMSNorm; the output has the dtype of the input, not of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        parameters, shape = (self.weight,), self.normalized_shape
        return _apply_norm(
            F.rms_norm, input, parameters, shape, self.eps, uses_weight_dtype=self.uses_weight_dtype
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose output has the dtype of the weight."""

    uses_weight_dtype = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose output has the dtype of the weight."""

    uses_weight_dtype = True


class FastLayerNorm(MixedFusedLayerNorm):
    """LayerNorm over the last dimension; the output has the weight's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps  # subclasses read it
