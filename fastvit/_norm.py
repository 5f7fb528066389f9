"""Shared parts of the normalisation layers: the statistics that a forward uses, checks, process groups."""

import copy
import itertools
import sys
import warnings
from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.nn.modules.batchnorm import _BatchNorm

from . import _library, functional, sync
from ._autograd import NormOptions
from ._formulas import effective_gamma
from .functional import NormTensors

_UNSAFE = 0.05  # relative error of the recovered xhat above which a layer warns
_CHECK_EVERY = 1024  # forwards; each check reads one number on the host
_CONVERTERS = ("convert_sync_batchnorm", "convert_syncbn_model")  # torch's and timm's, apex's


def _check_num_features(name: str, num_features: object) -> None:
    _library.check_built(f"fastvit.{name}")
    if isinstance(num_features, bool) or not isinstance(num_features, Integral) or num_features < 1:
        raise ValueError(f"{name}: num_features is {num_features!r}; a positive int expected")


def forward_state(layer: _BatchNorm) -> tuple[NormTensors, bool, float | None]:
    """The tensors that a forward of `layer` uses, training and momentum, by torch BatchNorm's rules.

    Batch statistics are used in training, and in evaluation without running statistics. Running statistics
    are updated only in training with track_running_stats.
    """
    weight: Tensor | None
    bias: Tensor | None
    tracked: Tensor | None
    try:  # nn.Module.__getattr__ takes half a microsecond for each, as a small op does
        parameters, buffers = layer._parameters, layer._buffers
        weight, bias = parameters["weight"], parameters["bias"]
        running_mean, running_var = buffers["running_mean"], buffers["running_var"]
        tracked = buffers["num_batches_tracked"]
    except KeyError:  # one is computed (torch.nn.utils.parametrize) or was replaced by a plain attribute
        weight, bias, tracked = layer.weight, layer.bias, layer.num_batches_tracked
        running_mean, running_var = layer.running_mean, layer.running_var
    # Ops read parameters without gaps; a parameter may be a slice of a matrix, or one number expanded.
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if not layer.training:
        return NormTensors(weight, bias, running_mean, running_var), running_mean is None, 0.0
    if not layer.track_running_stats:
        return NormTensors(weight, bias, None, None), True, 0.0  # without an update the factor is not used
    momentum = layer.momentum
    # Like torch: a cumulative average without a counter does not update.
    factor = 0.0 if momentum is None and tracked is None else momentum
    return NormTensors(weight, bias, running_mean, running_var, tracked), True, factor


class NormLayer(_BatchNorm):
    """What the layers share: the option `bias=False`, as torch's have since 2.13, and one forward.

    Statistics are those of this process, unless SharesGroup comes before it.
    """

    channel_last = False
    abs_weight = False
    _forwards_to_check = 0

    def __init__(self, num_features: int, *args, bias: bool = True, **kwargs):
        _check_num_features(type(self).__name__, num_features)
        super().__init__(num_features, *args, **kwargs)
        if not bias:
            self.register_parameter("bias", None)

    def _statistics_group(self) -> "tuple[torch.distributed.ProcessGroup | None, int]":
        return None, 0

    def _normalise(
        self,
        name: str,
        x: Tensor,
        z: Tensor | None = None,
        activation: str = "identity",
        activation_param: float = 0.0,
        *,
        in_place: bool = False,
        recompute: bool = True,
    ) -> Tensor:
        """`functional.normalise` with the layer's tensors and options."""
        tensors, training, momentum = forward_state(self)
        if self.abs_weight and tensors.weight is not None:
            tensors = tensors._replace(weight=functional.absolute_weight(tensors.weight, self.eps))
        if z is not None and z.dtype != x.dtype:  # under autocast a residual may have another dtype
            z = z.to(x.dtype)
        options = NormOptions(
            training, momentum, self.eps, activation, activation_param, self.channel_last, recompute
        )
        group, layer = self._statistics_group()
        y = functional.normalise(name, x, z, tensors, options, group, layer, in_place)
        if in_place:
            self.check_conditioning(x)
        return y

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """None; others' converters ask for them when they have made a torch.nn.SyncBatchNorm of `self`.

        Raises:
            TypeError: one of them asks, and torch's layer lacks something that this one does.
        """
        caller = sys._getframe(1).f_code.co_name
        if caller in _CONVERTERS:
            more = {name: getattr(self, name, None) for name in ("channel_last", "fuse_relu", "abs_weight")}
            more["activation"] = getattr(self, "activation", "identity")
            lost = [f"{name}={value!r}" for name, value in more.items() if value and value != "identity"]
            if lost:
                raise TypeError(
                    f"{caller}: a SyncBatchNorm of torch lacks {', '.join(lost)} of {type(self).__name__}; "
                    "call fastvit.convert_syncbn_model(model) instead"
                )
        return super().named_children()

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

    def check_conditioning(self, x: Tensor) -> None:
        """Warns once when |bias| / |weight| is so large that xhat, recovered from y, has a large error.

        Called after an op in place, which has checked weight and bias.
        """
        left = self._forwards_to_check
        if not self.training or left < 0 or torch.compiler.is_compiling():
            return
        if left > 0:
            self.__dict__["_forwards_to_check"] = left - 1  # Module.__setattr__ takes as long as a small op
            return
        if self.weight is None or self.bias is None or x.is_meta or isinstance(x, FakeTensor):
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # no number can be read on the host
            return
        self._forwards_to_check = _CHECK_EVERY
        with torch.no_grad():
            gamma = effective_gamma(self.weight, self.bias, x.dtype)
            ratio = (self.bias.double() / gamma).abs().max().item()
        # y is rounded at the size of |bias| + |weight| |xhat|, by a quarter of eps on average.
        error = torch.finfo(x.dtype).eps / 4 * (1 + ratio**2) ** 0.5
        if error > _UNSAFE:
            self._forwards_to_check = -1
            warnings.warn(
                f"{type(self).__name__}({self.num_features}): |bias| / |weight| is up to {ratio:.3g}, so in "
                f"{x.dtype} the input recovered in backward is off by about {min(error, 1):.0%} in that "
                "channel; use a wider dtype for this layer, or a layer that saves its input "
                "(BatchNormAct with memory='recompute')",
                stacklevel=5,
            )


_layer_numbers = itertools.count(1)  # of the layers of this process that share statistics


class SharesGroup(_BatchNorm):
    """A layer with a process group, which is valid in its own process only and cannot be copied.

    Copies of the layer share the group. A pickle has None in its place. `group_attribute` is the name of the
    attribute that holds it. `layer_number` is unique in this process; ranks compare the order of layers.
    """

    group_attribute: str
    layer_number: int

    def set_group(self, process_group: "torch.distributed.ProcessGroup | None") -> None:
        """Sets the process group over which statistics are shared; None is the default group.

        Raises:
            TypeError: it is the ranks of a group.
        """
        ranks = (
            process_group >= 0 if isinstance(process_group, int) else None
        )  # < 0: of which this is no rank
        if ranks or isinstance(process_group, (list, tuple, range)):
            raise TypeError(
                f"{type(self).__name__}: {self.group_attribute} is {process_group!r}; a group expected, as "
                "torch.distributed.new_group(ranks) makes one on every rank"
            )
        setattr(self, self.group_attribute, process_group)
        self.layer_number = next(_layer_numbers)

    def _statistics_group(self) -> "tuple[torch.distributed.ProcessGroup | None, int]":
        """The group of the next forward, None without torch.distributed, and this layer's number."""
        return sync.default_group(getattr(self, self.group_attribute)), self.layer_number

    def __getstate__(self) -> dict:
        return self.__dict__ | {self.group_attribute: None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.layer_number = next(_layer_numbers)

    def __copy__(self):
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        copied.layer_number = next(_layer_numbers)
        return copied

    def __deepcopy__(self, memo: dict):
        process_group = getattr(self, self.group_attribute)
        if process_group is not None:
            memo[id(process_group)] = process_group
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.layer_number = next(_layer_numbers)
        return copied
