"""NormLayer, the base of the normalisation layers, and SharesGroup, its mixin with a process group."""

import copy
import itertools
import sys
import warnings
from collections.abc import Iterator
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.nn.modules.batchnorm import _BatchNorm

from . import _checks, _library, functional, sync
from ._formulas import ACTIVATIONS, effective_gamma

_UNSAFE = 0.05  # relative error of the recovered xhat above which a layer warns
_CHECK_EVERY = 1024  # forwards; each check reads one number on the host
_CONVERTERS = ("convert_sync_batchnorm", "convert_syncbn_model")  # torch's and timm's, apex's
_LOST = ("channel_last", "fuse_relu", "abs_weight", "activation", "act")  # options that torch's layers lack


class NormLayer(_BatchNorm):
    """BatchNorm, a residual and an activation, with `bias=False` as torch's layers have it since 2.13.

    Statistics are those of this process, unless a class derives from SharesGroup first.
    """

    channel_last = abs_weight = False
    function = "batch_norm_act"  # the name in fastvit.functional, which is in errors
    shown: tuple[str, ...] = ()  # options in the repr besides BatchNorm's
    layer_number = 0
    _forwards_to_check = 0

    def __init__(self, num_features: int, *args, bias: bool = True, **kwargs):
        name = type(self).__name__
        _library.check_built(f"fastvit.{name}")
        if isinstance(num_features, bool) or not isinstance(num_features, Integral) or num_features < 1:
            raise ValueError(f"{name}: num_features is {num_features!r}; a positive int expected")
        super().__init__(num_features, *args, **kwargs)
        _checks.check_eps(name, self.eps)
        _checks.check_momentum(name, self.momentum)
        if not bias:
            self.register_parameter("bias", None)

    def _statistics_group(self) -> "dist.ProcessGroup | None":
        return None

    def _normalise(
        self, x: Tensor, residual: Tensor | None = None, memory: str = "recompute", **layer_options
    ) -> Tensor:
        """The forward of every layer, by torch BatchNorm's rules; `layer_options` are fields of NormOptions.

        Batch statistics are used in training, and in evaluation without running statistics. Running
        statistics are updated only in training with track_running_stats.
        """
        inplace = memory == "inplace"
        if residual is not None and inplace:
            raise ValueError(
                f"{type(self).__name__}: got a residual with memory='inplace'; 'recompute' or 'keep' expected"
            )
        if isinstance(residual, Tensor) and residual.dtype != x.dtype:  # as autocast's may be
            residual = residual.to(x.dtype)
        weight: Tensor | None
        bias: Tensor | None
        batches: Tensor | None
        try:  # nn.Module.__getattr__ takes half a microsecond for each, as a small op does
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var = buffers["running_mean"], buffers["running_var"]
            batches = buffers["num_batches_tracked"]
        except KeyError:  # a tensor is computed (torch.nn.utils.parametrize) or is a plain attribute
            weight, bias, batches = self.weight, self.bias, self.num_batches_tracked
            mean, var = self.running_mean, self.running_var
        if self.abs_weight and weight is not None:
            weight = functional.absolute_weight(weight, self.eps)
        momentum = self.momentum
        if not self.training:
            batches, momentum = None, 0.0
        elif not self.track_running_stats:
            mean, var, batches, momentum = None, None, None, 0.0
        elif batches is None and momentum is None:  # like torch: without a counter there is no update
            momentum = 0.0
        options = functional.NormOptions(
            function="inplace_abn" if inplace else self.function,
            training=self.training or mean is None,
            momentum=momentum,
            eps=self.eps,
            channel_last=self.channel_last,
            inplace=inplace,
            recompute=memory == "recompute",
            layer_number=self.layer_number,
            **layer_options,
        )
        group = self._statistics_group()
        if group is not None and options.training and not self.training:
            if not torch.compiler.is_compiling():
                sync.check()
            group = None  # a rank may evaluate alone, as with torch's SyncBatchNorm
        y = functional.normalise(x, residual, (weight, bias, mean, var, batches), options, group)
        if inplace:
            self.check_conditioning(x)
        return y

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children, of which there are none.

        torch's and apex's converters call this after they have made a torch.nn.SyncBatchNorm of `self`.

        Raises:
            TypeError: a converter calls, and torch's layer lacks an option of this one.
        """
        caller = sys._getframe(1).f_code.co_name
        if caller in _CONVERTERS:
            options = ((name, getattr(self, name, None)) for name in _LOST)
            lost = [f"{name}={value!r}" for name, value in options if value and value != "identity"]
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
        options = [f"{name}={getattr(self, name)}" for name in ("eps", "momentum", "affine")]
        options += [f"bias={self.bias is not None}", f"track_running_stats={self.track_running_stats}"]
        for name in self.shown:
            value = getattr(self, name)
            of_activation = name == "activation" and ACTIVATIONS[value][1] is not None
            if value is not False:
                options.append(f"{name}={value}" + (f"[{self.activation_param}]" if of_activation else ""))
        return ", ".join([str(self.num_features), *options])

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
            weight = functional.absolute_weight(self.weight, self.eps) if self.abs_weight else self.weight
            gamma = effective_gamma(weight, self.bias, x.dtype)
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
                stacklevel=6,
            )


_layer_numbers = itertools.count(1)  # each layer that shares statistics takes one


class SharesGroup(NormLayer):
    """A layer with a process group, None for the default one, in the attribute `group_attribute`.

    Copies of the layer share the group. A pickle has None in its place, since a group is valid in its own
    process only. `layer_number` is unique in this process; ranks compare the order of layers.
    """

    group_attribute = "process_group"

    def __init__(self, *args, **kwargs):
        process_group = kwargs.pop(self.group_attribute, None)
        super().__init__(*args, **kwargs)
        self.set_group(process_group)

    def set_group(self, process_group: "dist.ProcessGroup | None") -> None:
        """Sets the process group over which statistics are shared; None is the default group.

        Raises:
            TypeError: it is the ranks of a group.
        """
        rank = isinstance(process_group, int) and process_group >= 0  # < 0: a group without this rank
        if rank or isinstance(process_group, (list, tuple, range)):
            raise TypeError(
                f"{type(self).__name__}: {self.group_attribute} is {process_group!r}; a group expected, as "
                "torch.distributed.new_group(ranks) makes one on every rank"
            )
        setattr(self, self.group_attribute, process_group)
        self.layer_number = next(_layer_numbers)

    def _statistics_group(self) -> "dist.ProcessGroup | None":
        return sync.default_group(getattr(self, self.group_attribute))

    def __getstate__(self) -> dict:
        return self.__dict__ | {self.group_attribute: None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.layer_number = next(_layer_numbers)

    def __copy__(self):
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__, layer_number=next(_layer_numbers))
        return copied

    def __deepcopy__(self, memo: dict):
        memo[id(self)] = copied = copy.copy(self)
        process_group = getattr(self, self.group_attribute)
        memo[id(process_group)] = process_group
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo), layer_number=copied.layer_number)
        return copied
