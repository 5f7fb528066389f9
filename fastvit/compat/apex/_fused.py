"""Base of the optimizers: float32 arithmetic, one list of tensors per device, apex's checkpoints."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._import_hook import missing_attribute_getter

State = dict[str, Any]  # what an optimizer holds for a parameter or for a group of parameters
Tensors = list[Tensor]


def norms(
    tensors: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """The norm of each of the tensors, computed in `dtype` or its own."""
    tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]
    # In chunks, since torch's CPU sum in float32 has an error of 0.15 % at 33 million elements.
    tensors = [
        torch.stack(torch._foreach_norm(t.flatten().split(1 << 16), ord, dtype)) if t.is_cpu else t
        for t in tensors
    ]
    return torch._foreach_norm(tensors, ord, dtype)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float64, or float32 for any other."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_flat(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory, in any order of the dimensions."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def laid_as(pattern: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the strides of a flat `pattern` of its shape: itself, or a copy."""
    if tensor.stride() == pattern.stride() or tensor.squeeze().stride() == pattern.squeeze().stride():
        return tensor
    return torch.empty_like(pattern, dtype=tensor.dtype).copy_(tensor)


@torch.no_grad()
def lay_out(optimizer: Optimizer, *_: Any) -> None:
    """Prepares memory for the fused step of a torch optimizer; a hook before its step.

    torch's fused steps read parameter, gradient and state as flat memory, whatever their strides are. So
    gradients and state get the strides of their parameter. A group with a parameter that has gaps is not
    fused any more.
    """
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None] if group.get("fused") else []
        if not all(map(is_flat, stepped)):
            group["fused"] = False
            continue
        for parameter in stepped:
            parameter.grad = laid_as(parameter, parameter.grad)
            state = optimizer.state[parameter]
            for name, held in state.items():
                if isinstance(held, Tensor) and held.shape == parameter.shape:
                    state[name] = laid_as(parameter, held)


def follow_(master: Tensor, half: Tensor) -> Tensor:
    """Copies elements of `half` to its float32 `master` whose rounding they are not: they were written."""
    return master.copy_(torch.where(half == master.to(half.dtype), master, half))


def _device(group: State) -> torch.device | None:
    return group["params"][0].device if group["params"] else None


class FusedOptimizer(Optimizer):
    """A torch optimizer whose arithmetic and state are float32 for half parameters.

    Args:
        defaults: options of the parameter groups.
        set_grad_none: the default of `zero_grad`'s `set_to_none`.
        amsgrad: not supported, as in apex.
    """

    moments: tuple[str, ...] = ()  # state tensors that are like their parameter and start at 0
    operations: tuple[str, ...] = ()  # those of amp_C that are attributes, as in apex; the first one steps
    master_weights: bool | torch.dtype | None = False  # all half parameters, or a dtype, with float32 copies
    tensors_in_groups = False  # whether the rate and the count of a group are tensors, written in place

    def __init__(
        self, params: Iterable[Any], defaults: State, set_grad_none: bool, amsgrad: bool = False
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} has no AMSGrad variant; torch.optim.Adam has")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device=_device(self.param_groups[0]))

    def __getattr__(self, name: str) -> Any:
        if name in self.operations:
            return getattr(import_module("fastvit.compat.amp_C"), name)  # which imports this module
        return missing_attribute_getter(f"apex.optimizers.{type(self).__name__}")(name)

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        self._convert(self.param_groups[-1])

    def _convert(self, group: State) -> None:
        """Makes tensors of the rate and the count of a group, or a number of the count."""
        if self.tensors_in_groups:
            device, count = _device(group), group.get("step", 0)
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
            group["step"] = torch.as_tensor(count, dtype=torch.int, device=device).reshape(1).clone()
        elif "step" in group:
            group["step"] = int(group["step"])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all groups; `closure`, when given, computes the gradients and its result is
        returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self.param_groups:
            # Operations take lists of one device and dtype, and a parameter's first step may differ.
            alike: dict[tuple, list[tuple]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = [name for name, value in self.state[parameter].items() if value is not None]
                    kind = parameter.device, parameter.dtype, *held
                    alike[kind].append(self._operands(parameter, parameter.grad))
            for several in alike.values():
                parameters, values, gradients = map(list, zip(*several, strict=True))
                self._update(group, parameters, values, gradients)
                for parameter, value in zip(parameters, values, strict=True):
                    if value is not parameter:
                        parameter.copy_(value)
        return loss

    def _operands(self, parameter: nn.Parameter, gradient: Tensor) -> tuple:
        """The parameter, its master if it has one or else itself, and its gradient.

        Gradients are divided by the scale of GradScaler, which leaves that to optimizers whose
        `_step_supports_amp_scaling` is True. It refuses half parameters with any other.
        """
        if gradient.is_sparse or gradient.is_complex():
            raise RuntimeError(
                f"{type(self).__name__} takes dense real gradients; torch.optim.SparseAdam sparse ones, "
                "torch.optim.Adam complex ones"
            )
        state = self.state[parameter]
        value: Tensor = parameter
        if wide(parameter) != parameter.dtype and self.master_weights in (True, parameter.dtype):
            if "master_param" not in state:
                state["master_param"] = parameter.detach().float()
            value = follow_(state["master_param"], parameter)
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(value, dtype=wide(value))
        if (scale := vars(self).get("grad_scale")) is not None:
            unscaled = gradient.to(wide(value)).div_(scale.to(gradient.device))
            gradient.copy_(unscaled)
            gradient = unscaled
        return parameter, value, gradient

    def _prepare(self) -> None:
        """Runs before the first group is stepped. Every group counts a step, as in apex, but for one without
        any gradient.
        """
        counts = "step" in getattr(self, self.operations[0]).options
        if counts and any(p.grad is not None for g in self.param_groups for p in g["params"]):
            for group in self.param_groups:
                group.setdefault("step", 0)
                group["step"] += 1

    def _update(self, group: State, parameters: Tensors, values: Tensors, gradients: Tensors) -> None:
        """Steps the values, in place. Those of one call have one device, one dtype, and one set of state."""
        moments = [[self.state[p][name] for p in parameters] for name in self.moments]
        self._run([gradients, values, *moments], group)

    def _run(self, lists: list[Tensors], group: State) -> None:
        """Calls the operation that steps, with options by their names in the optimizer and the group."""
        betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        known, operation = vars(self) | group | betas, getattr(self, self.operations[0])
        operation(0, self._dummy_overflow_buf, lists, *(known[name] for name in operation.options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's files too. The state of half parameters stays float32."""
        super().load_state_dict(state_dict)  # casts the state to the dtypes of the parameters
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[parameter][name].dtype:
                    self.state[parameter][name] = value.to(parameter.device).clone()
        for group in self.param_groups:
            group.update(self.defaults | group)
            # In other files, such as those of apex's first FusedAdam, every parameter has a count.
            states = [self.state[p] for p in group["params"] if p in self.state]
            if counts := [state.pop("step") for state in states if "step" in state]:
                group.setdefault("step", max(map(int, counts)))
            self._convert(group)
