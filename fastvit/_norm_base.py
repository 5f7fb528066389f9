"""The base classes of the BatchNorm layers: BatchNormBase, and ProcessGroupMixin with a process group."""

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
from ._deprecation import renamed_state, user_stacklevel, warn_renamed
from ._formulas import ACTIVATIONS, effective_gamma

# Attributes of a layer that has changed its class; pickles of models have them.
FUSED_FROM, SYNCHRONIZED_FROM = "_fused_from", "_synchronised_from"

_MAX_XHAT_ERROR = 0.05  # Relative error of the recovered xhat above which a layer warns.
_FORWARDS_BETWEEN_CHECKS = 1024  # Each check reads one number on the host.
# The first is torch's and timm's, the second apex's.
_FOREIGN_CONVERTERS = ("convert_sync_batchnorm", "convert_syncbn_model")
_OPTIONS_TORCH_LACKS = ("channel_last", "fuse_relu", "abs_weight", "activation", "act")


class BatchNormBase(_BatchNorm):
    """BatchNorm, a residual and an activation, with `bias=False` as torch's layers have it since 2.13.

    Statistics are those of this process, unless a class derives from ProcessGroupMixin first.
    """

    channel_last = abs_weight = False
    functional_name = "batch_norm_act"  # The function of fastvit.functional that errors name.
    repr_options: tuple[str, ...] = ()  # Options in the repr besides BatchNorm's.
    layer_id = 0
    _forwards_until_check = 0

    def __init__(self, num_features: int, *args, bias: bool = True, **kwargs):
        name = type(self).__name__
        _library.require_kernels(f"fastvit.{name}")
        if isinstance(num_features, bool) or not isinstance(num_features, Integral) or num_features < 1:
            raise ValueError(f"{name}: num_features is {num_features!r}; a positive int expected")
        super().__init__(num_features, *args, **kwargs)
        _checks.check_eps(name, self.eps)
        _checks.check_momentum(name, self.momentum)
        if not bias:
            self.register_parameter("bias", None)

    def _get_process_group(self) -> "dist.ProcessGroup | None":
        return None

    def _forward_batch_norm(
        self, x: Tensor, residual: Tensor | None = None, memory: str = "recompute", **layer_options
    ) -> Tensor:
        """Runs the forward of every layer; `layer_options` are fields of NormOptions."""
        inplace = memory == "inplace"
        if residual is not None and inplace:
            raise ValueError(
                f"{type(self).__name__}: got a residual with memory='inplace'; 'recompute' or 'keep' expected"
            )
        if isinstance(residual, Tensor) and residual.dtype != x.dtype:  # autocast may have cast one of them.
            residual = residual.to(x.dtype)
        tensors, momentum = self._select_statistics(self._get_tensors())
        options = functional.NormOptions(
            function_name="inplace_abn" if inplace else self.functional_name,
            training=self.training or tensors.running_mean is None,
            momentum=momentum,
            eps=self.eps,
            channel_last=self.channel_last,
            inplace=inplace,
            is_recomputable=memory == "recompute",
            layer_id=self.layer_id,
            **layer_options,
        )
        process_group = self._get_process_group()
        if process_group is not None and options.training and not self.training:
            if not torch.compiler.is_compiling():
                sync.check()
            process_group = None  # A rank may evaluate alone, as with torch's SyncBatchNorm.
        y = functional.apply_batch_norm(x, residual, tensors, options, process_group)
        if inplace:
            self._warn_if_ill_conditioned(x)
        return y

    def _get_tensors(self) -> functional.NormTensors:
        """Returns the parameters and buffers.

        The dicts are read directly, because nn.Module.__getattr__ takes half a microsecond a tensor, as much
        as a small op.
        """
        weight: Tensor | None
        try:
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var = buffers["running_mean"], buffers["running_var"]
            batches = buffers["num_batches_tracked"]
        except KeyError:  # A tensor is parametrized or a plain attribute, and is not in the dicts.
            weight, bias, batches = self.weight, self.bias, self.num_batches_tracked
            mean, var = self.running_mean, self.running_var
        if self.abs_weight and weight is not None:
            weight = functional.abs_weight_plus_eps(weight, self.eps)
        return functional.NormTensors(weight, bias, mean, var, batches)

    def _select_statistics(
        self, tensors: functional.NormTensors
    ) -> tuple[functional.NormTensors, float | None]:
        """Returns the tensors that the op gets, and the momentum, by the rules of torch's BatchNorm.

        Batch statistics are used in training, and in evaluation without running statistics. Running
        statistics are updated only in training with track_running_stats; without num_batches_tracked a
        cumulative average is not updated.
        """
        weight, bias, mean, var, batches = tensors
        if not self.training:
            return functional.NormTensors(weight, bias, mean, var, None), 0.0
        if not self.track_running_stats:
            return functional.NormTensors(weight, bias, None, None, None), 0.0
        if batches is None and self.momentum is None:
            return tensors, 0.0
        return tensors, self.momentum

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Guards against converters that would lose options of this layer.

        torch's, timm's and apex's converters call this method after they have built a torch.nn.SyncBatchNorm
        from `self`. Nobody else calls it for a layer without children.

        Raises:
            TypeError: a converter calls, and torch's layer lacks an option of this one.
        """
        caller = sys._getframe(1).f_code.co_name
        if caller in _FOREIGN_CONVERTERS:
            options = ((name, getattr(self, name, None)) for name in _OPTIONS_TORCH_LACKS)
            lost_options = [f"{name}={value!r}" for name, value in options if value and value != "identity"]
            if lost_options:
                raise TypeError(
                    f"{caller}: torch's SyncBatchNorm lacks {', '.join(lost_options)} of "
                    f"{type(self).__name__}; call fastvit.convert_syncbn_model(model) instead"
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
        for name in self.repr_options:
            value = getattr(self, name)
            has_param = name == "activation" and ACTIVATIONS[value][1] is not None
            if value is not False:
                options.append(f"{name}={value}" + (f"[{self.activation_param}]" if has_param else ""))
        return ", ".join([str(self.num_features), *options])

    def _warn_if_ill_conditioned(self, x: Tensor) -> None:
        """Warns once if |bias| / |weight| is so large that xhat, recovered from y, has a large error.

        Called after an op in place, which has checked weight and bias.
        """
        forwards_left = self._forwards_until_check
        if not self.training or forwards_left < 0 or torch.compiler.is_compiling():
            return
        if forwards_left > 0:
            # Module.__setattr__ would take as long as a small op.
            self.__dict__["_forwards_until_check"] = forwards_left - 1
            return
        if self.weight is None or self.bias is None or x.is_meta or isinstance(x, FakeTensor):
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # No number can be read on the host.
            return
        self._forwards_until_check = _FORWARDS_BETWEEN_CHECKS
        with torch.no_grad():
            weight = functional.abs_weight_plus_eps(self.weight, self.eps) if self.abs_weight else self.weight
            gamma = effective_gamma(weight, self.bias, x.dtype)
            ratio = (self.bias.double() / gamma).abs().max().item()
        # y is rounded at the size of |bias| + |weight| |xhat|, by a quarter of eps on average.
        error = torch.finfo(x.dtype).eps / 4 * (1 + ratio**2) ** 0.5
        if error > _MAX_XHAT_ERROR:
            self._forwards_until_check = -1
            warnings.warn(
                f"{type(self).__name__}({self.num_features}): |bias| / |weight| is up to {ratio:.3g}, so in "
                f"{x.dtype} the input recovered in backward is off by about {min(error, 1):.0%} in that "
                "channel; use a wider dtype for this layer, or a layer that saves its input "
                "(BatchNormAct with memory='recompute')",
                stacklevel=user_stacklevel(),
            )


_layer_ids = itertools.count(1)
_OLD_ATTRIBUTES = {"group": "process_group", "layer_number": "layer_id"}  # Pickles have the old names.


class ProcessGroupMixin(BatchNormBase):
    """A layer with a process group: the ranks that share statistics. None is the default group.

    Copies of the layer share the group. A pickle has None in its place, since a group is valid in its own
    process only. `layer_id` is unique in this process; ranks compare the order of layers by it.
    """

    process_group: "dist.ProcessGroup | None" = None

    def __init__(self, *args, process_group: "dist.ProcessGroup | None" = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.set_process_group(process_group)

    def set_process_group(self, process_group: "dist.ProcessGroup | None") -> None:
        """Sets the process group over which statistics are shared; None is the default group.

        Raises:
            TypeError: process_group is a rank or a list of ranks.
        """
        # A negative int is torch's mark for a group without this rank.
        is_rank = isinstance(process_group, int) and process_group >= 0
        if is_rank or isinstance(process_group, (list, tuple, range)):
            raise TypeError(
                f"{type(self).__name__}: process_group is {process_group!r}; a group expected, as "
                "torch.distributed.new_group(ranks) makes one on every rank"
            )
        self.process_group = process_group
        self.layer_id = next(_layer_ids)

    def set_group(self, process_group: "dist.ProcessGroup | None") -> None:
        """Does as `set_process_group`, by its old name."""
        name = type(self).__name__
        warn_renamed(f"{name}.set_group", f"{name}.set_process_group")
        self.set_process_group(process_group)

    def _get_process_group(self) -> "dist.ProcessGroup | None":
        return sync.default_group(self.process_group)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"process_group": None}

    def __setstate__(self, state: dict) -> None:
        state = renamed_state(state, **_OLD_ATTRIBUTES)
        for undo_attribute in {FUSED_FROM, SYNCHRONIZED_FROM} & state.keys():
            cls, old_attributes, names = state[undo_attribute]
            new_names = tuple(_OLD_ATTRIBUTES.get(name, name) for name in names)
            state[undo_attribute] = cls, renamed_state(old_attributes, **_OLD_ATTRIBUTES), new_names
        super().__setstate__(state)
        self.layer_id = next(_layer_ids)

    def __copy__(self):
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__, layer_id=next(_layer_ids))
        return copied

    def __deepcopy__(self, memo: dict):
        memo[id(self)] = copied = copy.copy(self)
        memo[id(self.process_group)] = self.process_group
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo), layer_id=copied.layer_id)
        return copied
