"""A deferred output of a BatchNorm, so that one pass normalises, adds the residual and activates.

The trace proves that no other op runs in between: one addition reads the layer's output, and one activation
reads the sum. The layer returns a `Deferred` tensor without values. The addition, which is the user's code
and runs as it is, records the residual. The activation runs the layer. Any other op that reads a `Deferred`
tensor gets the values that the original modules compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..batch_norm_act import BatchNormAct

_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_ADDITIONS_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
_METADATA = (
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,
    Tensor.layout.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size,
)  # fmt: skip


def _refuse_gradient(_: Tensor) -> None:
    raise RuntimeError(
        "fastvit.convert: an autograd.Function has read the output of a layer that is fused with the "
        "addition and the activation after it; the forward has changed since it was traced; convert the "
        "model again"
    )


class Deferred(Tensor):
    """`layer(x)`, or `layer(x) + z`, not computed yet; has the shape, dtype and device of the result."""

    layer: nn.Module
    x: Tensor
    z: Tensor | None

    @staticmethod
    def __new__(cls, layer: nn.Module, x: Tensor, z: Tensor | None = None):
        return Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)

    def __init__(self, layer: nn.Module, x: Tensor, z: Tensor | None = None):
        self.layer, self.x, self.z = layer, x, z
        self.gradients = torch.is_grad_enabled()
        self.versions = self._versions()
        self.value: Tensor | None = None
        self.done = False
        if self.gradients:
            # An autograd.Function reads its inputs without __torch_function__. Its result would have no
            # gradient path to the layer.
            with torch._C.DisableTorchFunctionSubclass():
                self.requires_grad_().register_hook(_refuse_gradient)

    def _versions(self) -> list[int | None]:
        return [None if t is None or t.is_inference() else t._version for t in (self.x, self.z)]

    def plus(self, z: object) -> Deferred | None:
        """The deferred sum; None where the layer cannot add `z` with the same result."""
        if not self._is_valid() or self.z is not None or type(z) is not Tensor:
            return None
        # The sum of two memory formats may have either.
        if any(getattr(z, what) != getattr(self.x, what) for what in ("shape", "dtype", "device", "layout")):
            return None
        if z.stride() != self.x.stride():
            return None
        self.done = True
        return Deferred(self.layer, self.x, z)

    def activated(self) -> Tensor | None:
        """The activated sum, in one pass; None without a residual, or when a tensor has changed."""
        if self.z is None or not self._is_valid():
            return None
        self.done = True
        # By name, since a fastvit.SyncBatchNorm comes first in the method resolution order.
        return BatchNormAct.forward(self.layer, self.x, self.z)

    def _is_valid(self) -> bool:
        untouched = self.value is None and not self.done and self._versions() == self.versions
        return untouched and torch.is_grad_enabled() == self.gradients

    def computed(self) -> Tensor:
        """The values, by the original layer and a plain addition; the same tensor every time."""
        if self.value is None:
            if self.done or self._versions() != self.versions:
                raise RuntimeError(
                    f"fastvit.convert: {type(self.layer).__name__} is fused with the addition and the "
                    "activation after it, but the forward has changed since it was traced "
                    f"({'its output is read again' if self.done else 'an input of it was overwritten'}); "
                    "convert the model again"
                )
            with torch.set_grad_enabled(self.gradients):
                y = self.layer._plain.forward(self.layer, self.x)
                self.value = y if self.z is None else y + self.z
        return self.value

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        in_place = function in _ADDITIONS_IN_PLACE
        if (in_place or function in _ADDITIONS) and len(args) == 2 and not kwargs:
            first, second = args
            if type(second) is cls and not in_place:
                first, second = second, first
            total = first.plus(second) if type(first) is cls else None
            if total is not None:
                return total
        args, kwargs = pytree.tree_map_only(cls, cls.computed, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"fastvit.convert: {function} was given a deferred output of a fused layer")
