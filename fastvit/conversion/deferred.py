"""The output of a BatchNorm that waits for its residual and its activation, so that one pass does all three.

The trace proves that nothing else runs in between: the layer's output is read by one addition, the sum by one
activation. So the layer returns a stand-in that has no values; the addition, which is the user's code and
stays as it is, hands it the residual; and the activation has the layer compute. Whoever else reads a stand-in
after all gets what the original modules compute.
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
        "fastvit.convert: an autograd.Function has read an output that was to be fused with an addition and "
        "an activation; the forward has changed since it was traced; convert the model again"
    )


class Deferred(Tensor):
    """`layer(x)`, or `layer(x) + z`, not computed yet; has the shape, dtype and device that it will have."""

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
            # An autograd.Function is given its inputs without being asked: what it makes of this one would
            # be cut off from the layer.
            with torch._C.DisableTorchFunctionSubclass():
                self.requires_grad_().register_hook(_refuse_gradient)

    def _versions(self) -> list[int | None]:
        return [None if t is None or t.is_inference() else t._version for t in (self.x, self.z)]

    def plus(self, z: object) -> Deferred | None:
        """The sum, not computed either; None where the layer cannot add `z` to the same result."""
        if not self._is_as_it_was() or self.z is not None or type(z) is not Tensor:
            return None
        # the sum of two memory formats may have either
        if any(getattr(z, what) != getattr(self.x, what) for what in ("shape", "dtype", "device", "layout")):
            return None
        if z.stride() != self.x.stride():
            return None
        self.done = True
        return Deferred(self.layer, self.x, z)

    def activated(self) -> Tensor | None:
        """What comes out of the activation, by one pass; None where that is not what was deferred."""
        if self.z is None or not self._is_as_it_was():
            return None
        self.done = True
        # by name: a fastvit.SyncBatchNorm comes before it in the order of classes
        return BatchNormAct.forward(self.layer, self.x, self.z)

    def _is_as_it_was(self) -> bool:
        untouched = self.value is None and not self.done and self._versions() == self.versions
        return untouched and torch.is_grad_enabled() == self.gradients

    def computed(self) -> Tensor:
        """The values, by the original layer and a plain addition; the same tensor every time."""
        if self.value is None:
            if self.done or self._versions() != self.versions:
                raise RuntimeError(
                    f"fastvit.convert: {type(self.layer).__name__} was to be fused with an addition and an "
                    "activation, but the forward has changed since it was traced "
                    f"({'its output is read again' if self.done else 'what it reads was overwritten'}); "
                    "convert the model again"
                )
            with torch.set_grad_enabled(self.gradients):
                y = self.layer._original.forward(self.layer, self.x)
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
        raise RuntimeError(f"fastvit.convert: {function} was given an output that has not been computed yet")
