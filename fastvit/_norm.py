"""What the normalisation layers have in common: whose statistics a forward uses, and argument checks."""

import copy
import itertools
import warnings
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase

from ._arguments import channel_dimension, recovery_error
from ._formulas import effective_gamma

if TYPE_CHECKING:  # the mixins are for layers; as subclasses of _NormBase they would stand behind _BatchNorm
    _Layer = _NormBase
else:
    _Layer = object

_UNSAFE = 0.05  # the share of error in the recovered xhat that is worth a warning
_CHECK_EVERY = 1024  # forwards; each check reads one number on the host


def check_num_features(name: str, num_features: int) -> None:
    if isinstance(num_features, bool) or not isinstance(num_features, int) or num_features < 1:
        raise ValueError(f"{name}: num_features is {num_features!r}; a positive int expected")


class ForwardState(TypedDict):
    training: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None


def forward_state(layer: _NormBase) -> ForwardState:
    """Which statistics and buffers a forward of `layer` takes, by torch BatchNorm's rules.

    Batch statistics in training, and in evaluation when there are no running ones. Running statistics are
    updated only in training with track_running_stats.
    """
    training = layer.training or layer.running_mean is None
    use_running = not layer.training or layer.track_running_stats
    update = layer.training and layer.track_running_stats
    # torch leaves the running statistics alone when there is nothing to count a cumulative average with
    uncounted = layer.momentum is None and layer.num_batches_tracked is None
    return {
        "training": training,
        "running_mean": layer.running_mean if use_running else None,
        "running_var": layer.running_var if use_running else None,
        "num_batches_tracked": layer.num_batches_tracked if update else None,
        # without running statistics to update the factor is not used, but an op wants a number
        "momentum": layer.momentum if update and not uncounted else 0.0,
    }


def check_channels(layer: _NormBase, x: Tensor, channel_last: bool) -> None:
    """Raises ValueError when x has not `layer.num_features` channels (a layer may have no weight to tell)."""
    name = type(layer).__name__
    channel_dim = channel_dimension(name, x, channel_last)
    if x.shape[channel_dim] != layer.num_features:
        raise ValueError(
            f"{name}: expected {layer.num_features} channels in dimension {channel_dim}, "
            f"got {x.shape[channel_dim]} (input {tuple(x.shape)}, channel_last={channel_last})"
        )


class OptionalBias(_Layer):
    """Gives a layer the option `bias=False`, a weight alone, as torch's have it since 2.13."""

    def __init__(self, *args, bias: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        )


def cannot_read_values(x: Tensor) -> bool:
    """Whether reading a number on the host is impossible or would stall: no data, or capturing a graph."""
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class ChecksConditioning(_Layer):
    """A layer that can work in place, and so recovers its input from an output of few digits."""

    _forwards_to_check = 0

    def check_conditioning(self, x: Tensor) -> None:
        """Says once when |bias| / |weight| leaves the stored output too few digits to recover xhat from.

        Called after the op, which has seen to it that weight and bias can be read.
        """
        if not self.training or self.weight is None or self.bias is None:
            return
        if self._forwards_to_check < 0 or cannot_read_values(x):
            return
        self._forwards_to_check -= 1
        if self._forwards_to_check >= 0:
            return
        self._forwards_to_check = _CHECK_EVERY
        with torch.no_grad():
            gamma = effective_gamma(self.weight, self.bias, x.dtype)
            ratio = (self.bias.double() / gamma).abs().max().item()
        error = recovery_error(ratio, x.dtype)
        if error > _UNSAFE:
            self._forwards_to_check = -1
            warnings.warn(
                f"{type(self).__name__}({self.num_features}): |bias| / |weight| is up to {ratio:.3g}, so in "
                f"{x.dtype} the input recovered in backward is off by about {min(error, 1):.0%} in that "
                "channel; keep this layer in a wider dtype, or use one that keeps its input "
                "(BatchNormAct with memory='recompute')",
                stacklevel=4,
            )


_layer_numbers = itertools.count(1)


def next_layer_number() -> int:
    """A number for a layer that shares statistics, unlike all others of this process."""
    return next(_layer_numbers)


class SharesGroup(_Layer):
    """A layer that holds a process group, which exists in its own process alone and cannot be copied.

    Copies talk to the same group; a pickle leaves it behind, as None. `group_attribute` names where it is.
    `layer_number` tells the layer from the others of this process; ranks compare their order.
    """

    group_attribute: str
    layer_number: int

    def set_group(self, group: "torch.distributed.ProcessGroup | None") -> None:
        """Shares statistics over another group from now on; None is the default group."""
        setattr(self, self.group_attribute, group)
        self.layer_number = next_layer_number()

    def __getstate__(self) -> dict:
        return self.__dict__ | {self.group_attribute: None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.layer_number = next_layer_number()

    def __copy__(self):
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        copied.layer_number = next_layer_number()
        return copied

    def __deepcopy__(self, memo: dict):
        group = getattr(self, self.group_attribute)
        if group is not None:
            memo[id(group)] = group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.layer_number = next_layer_number()
        return copied
