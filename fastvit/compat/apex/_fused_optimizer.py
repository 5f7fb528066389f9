"""The base of apex's optimizers: float32 arithmetic, one list of tensors per device, apex's checkpoints."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._import_hook import missing_attribute_getter

ParamGroup = dict[str, Any]
TensorList = list[Tensor]


def tensor_norms(
    tensors: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Returns the norm of each tensor, computed in `dtype`, or in the dtype of the tensor."""
    tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]
    # Chunks of 2^16 elements keep norms accurate: at 33 million, torch's CPU sum in float32 is 0.15 % off.
    tensors = [
        torch.stack(torch._foreach_norm(t.flatten().split(1 << 16), ord, dtype)) if t.is_cpu else t
        for t in tensors
    ]
    return torch._foreach_norm(tensors, ord, dtype)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype to compute in: float64 for a float64 tensor, float32 for any other."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill a range of memory, in any order of the dimensions."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def with_strides_of(pattern: Tensor, tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy with the strides of `pattern`, which has the same shape and no gaps."""
    if tensor.stride() == pattern.stride() or tensor.squeeze().stride() == pattern.squeeze().stride():
        return tensor
    return torch.empty_like(pattern, dtype=tensor.dtype).copy_(tensor)


@torch.no_grad()
def match_strides_before_step(optimizer: Optimizer, *_: Any) -> None:
    """Prepares memory for the fused step of a torch optimizer, as a hook before the step.

    torch's fused steps read parameter, gradient and state as flat memory, whatever their strides are. So
    gradients and state get the strides of their parameter. A group that has a parameter with gaps is not
    fused any more.
    """
    for group in optimizer.param_groups:
        params_with_grad = [p for p in group["params"] if p.grad is not None] if group.get("fused") else []
        if not all(map(is_non_overlapping_and_dense, params_with_grad)):
            group["fused"] = False
            continue
        for parameter in params_with_grad:
            parameter.grad = with_strides_of(parameter, parameter.grad)
            state = optimizer.state[parameter]
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = with_strides_of(parameter, value)


def update_master_(master: Tensor, half: Tensor) -> Tensor:
    """Updates `master` where its rounding differs from `half`, because `half` was written since."""
    return master.copy_(torch.where(half == master.to(half.dtype), master, half))


def _group_device(group: ParamGroup) -> torch.device | None:
    return group["params"][0].device if group["params"] else None


class FusedOptimizer(Optimizer):
    """A torch optimizer whose arithmetic and state are float32 for half parameters.

    Args:
        defaults: options of the parameter groups.
        set_grad_none: the default of `zero_grad`'s `set_to_none`.
        amsgrad: not supported, as in apex.
    """

    moment_names: tuple[str, ...] = ()  # state tensors of the parameter's shape, which start at 0
    operation_names: tuple[str, ...] = ()  # attributes from amp_C; the first operation steps
    master_weights: bool | torch.dtype | None = False  # float32 copies of half parameters, or of a dtype's
    has_tensor_lr_and_step = False  # True if `lr` and `step` of a group are tensors, written in place

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], set_grad_none: bool, amsgrad: bool = False
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} takes amsgrad=False, got True; use torch.optim.Adam")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device=_group_device(self.param_groups[0]))

    def __getattr__(self, name: str) -> Any:
        if name in self.operation_names:
            return getattr(import_module("fastvit.compat.amp_C"), name)  # amp_C imports this module
        return missing_attribute_getter(f"apex.optimizers.{type(self).__name__}")(name)

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        self._convert_lr_and_step(self.param_groups[-1])

    def _convert_lr_and_step(self, group: ParamGroup) -> None:
        """Makes `lr` and `step` of a group tensors if `has_tensor_lr_and_step`, or else `step` an int."""
        if self.has_tensor_lr_and_step:
            device, step_count = _group_device(group), group.get("step", 0)
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
            group["step"] = torch.as_tensor(step_count, dtype=torch.int, device=device).reshape(1).clone()
        elif "step" in group:
            group["step"] = int(group["step"])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all groups, and returns the result of `closure`, which computes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare_step()
        for group in self.param_groups:
            # Operations take lists of one device and dtype. Parameters without state step apart.
            operands_by_kind: dict[tuple, list[tuple]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    names = [name for name, value in self.state[parameter].items() if value is not None]
                    kind = parameter.device, parameter.dtype, *names
                    operands_by_kind[kind].append(self._prepare_operands(parameter, parameter.grad))
            for operands in operands_by_kind.values():
                parameters, values, gradients = map(list, zip(*operands, strict=True))
                self._update_parameters(group, parameters, values, gradients)
                for parameter, value in zip(parameters, values, strict=True):
                    if value is not parameter:
                        parameter.copy_(value)
        return loss

    def _prepare_operands(self, parameter: nn.Parameter, gradient: Tensor) -> tuple:
        """Returns the parameter, the value to step (its master, or else the parameter), and its gradient."""
        if gradient.is_sparse or gradient.is_complex():
            raise RuntimeError(
                f"{type(self).__name__} takes dense real gradients, got {gradient.layout}, {gradient.dtype}; "
                "use torch.optim.SparseAdam for sparse gradients, torch.optim.Adam for complex ones"
            )
        state = self.state[parameter]
        value: Tensor = parameter
        if compute_dtype(parameter) != parameter.dtype and self.master_weights in (True, parameter.dtype):
            if "master_param" not in state:
                state["master_param"] = parameter.detach().float()
            value = update_master_(state["master_param"], parameter)
        for name in self.moment_names:
            if name not in state:
                state[name] = torch.zeros_like(value, dtype=compute_dtype(value))
        return parameter, value, self._unscale_gradient(gradient, compute_dtype(value))

    def _unscale_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Divides the gradient by the scale of GradScaler, and returns the result in `dtype`.

        GradScaler leaves this to optimizers whose `_step_supports_amp_scaling` is True. It refuses
        half parameters of other optimizers.
        """
        if (scale := vars(self).get("grad_scale")) is None:
            return gradient
        unscaled = gradient.to(dtype).div_(scale.to(gradient.device))
        gradient.copy_(unscaled)
        return unscaled

    def _prepare_step(self) -> None:
        """Counts a step in every group, as in apex, if any parameter of the optimizer has a gradient."""
        counts_steps = "step" in getattr(self, self.operation_names[0]).options
        if counts_steps and any(p.grad is not None for g in self.param_groups for p in g["params"]):
            for group in self.param_groups:
                group.setdefault("step", 0)
                group["step"] += 1

    def _update_parameters(
        self, group: ParamGroup, parameters: TensorList, values: TensorList, gradients: TensorList
    ) -> None:
        """Steps the values in place. All have one device, one dtype, and one set of names in their state."""
        moments = [[self.state[p][name] for p in parameters] for name in self.moment_names]
        self._call_operation([gradients, values, *moments], group)

    def _call_operation(self, lists: list[TensorList], group: ParamGroup) -> None:
        """Calls the operation that steps. Its options are those of the optimizer and of the group."""
        betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        options, operation = vars(self) | group | betas, getattr(self, self.operation_names[0])
        operation(0, self._dummy_overflow_buf, lists, *(options[name] for name in operation.options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of fastvit or of apex. The state of half parameters stays float32."""
        super().load_state_dict(state_dict)  # torch casts the state to the dtypes of the parameters
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[parameter][name].dtype:
                    self.state[parameter][name] = value.to(parameter.device).clone()
        for group in self.param_groups:
            group.update(self.defaults | group)
            # Other files, such as those of apex's first FusedAdam, have a step count for every parameter.
            states = [self.state[p] for p in group["params"] if p in self.state]
            if counts := [state.pop("step") for state in states if "step" in state]:
                group.setdefault("step", max(map(int, counts)))
            self._convert_lr_and_step(group)
