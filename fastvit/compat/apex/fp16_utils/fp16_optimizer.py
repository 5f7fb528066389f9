"""FP16_Optimizer, which adds masters and loss scaling to an optimizer, for a model that was cast by hand."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._import_hook import missing_attribute_getter
from .._fused_optimizer import match_strides_before_step, update_master_
from ..amp.handle import (
    SCALE,
    StashedGradients,
    add_stashed_gradients,
    stash_unscaled_gradients,
    unique_parameters,
    unscale_gradients,
    unwrap_larc,
)
from ..amp.weights import HALF_DTYPES
from ..parallel.distributed import parameters_without_sync
from .loss_scaler import DynamicLossScaler, LossScaler


class FP16_Optimizer:
    """Wraps an optimizer whose half parameters are float32 masters while it steps.

    Between steps a half parameter is the model's, and its gradient is unscaled, in float32. Its master takes
    over what the script writes to the parameter.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    A gradient that is not finite skips the step, under a static scale too.

    Args:
        init_optimizer: the optimizer, which is changed in place; use the wrapper instead.
        static_loss_scale: a fixed scale.
        dynamic_loss_scale: start at 2^16, halve it at an overflow, double it after 1000 clean steps.
        dynamic_loss_args: arguments of `DynamicLossScaler` in place of these.
        verbose: print skipped steps.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            DynamicLossScaler(**(dynamic_loss_args or {"init_scale": 2.0**16}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.overflow = False
        self.verbose = verbose
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._stashed_gradients: StashedGradients = {}  # unscaled gradients beside scaled ones
        unwrap_larc(init_optimizer).register_step_pre_hook(match_strides_before_step)

    def _half_parameters(self) -> list[list[nn.Parameter]]:
        """Returns the half parameters of each group."""
        return [[p for p in group["params"] if p.dtype in HALF_DTYPES] for group in self.param_groups]

    @contextlib.contextmanager
    def _use_masters(self) -> Iterator[None]:
        """Makes half parameters their masters in the block, and rounds the masters to them at the end."""
        halves = [(parameter, parameter.data) for group in self._half_parameters() for parameter in group]
        for parameter, half in halves:
            master = self._masters.setdefault(parameter, half.float())
            parameter.data = update_master_(master, half)
        try:
            yield
        finally:
            for parameter, half in halves:
                self._masters[parameter] = parameter.data
                parameter.data = half.copy_(parameter.data)

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale  # the name in apex.contrib.optimizers

    def __getattr__(self, name: str) -> Any:  # passes on state, param_groups
        if name == "optimizer" or name.startswith("__"):  # a copy has no `optimizer` while copy makes it
            raise AttributeError(name)
        if not hasattr(self.optimizer, name):
            missing_attribute_getter("apex.fp16_utils.FP16_Optimizer")(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        self.overflow, self._stashed_gradients = False, {}
        self.optimizer.zero_grad(set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs the backward of the scaled loss, then `update_master_grads` unless that argument is False.

        Under DDP's `no_sync` gradients stay scaled until the backward that reduces them.
        """
        parameters = unique_parameters([self.optimizer])
        # If the script has dropped a gradient (model.zero_grad()), its stashed part is dropped too.
        remaining_stash = {p: g for p, g in self._stashed_gradients.items() if p.grad is not None}
        self._stashed_gradients = remaining_stash | stash_unscaled_gradients(
            parameters, self.loss_scale, None
        )
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype  # DDP takes gradients of no other dtype
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads and parameters_without_sync().isdisjoint(parameters):
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Divides the gradients by the scale, in float32."""
        scaled_parameters = [p for p in unique_parameters([self.optimizer]) if SCALE in vars(p)]
        for parameter in scaled_parameters:
            if parameter.dtype in HALF_DTYPES:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = torch.float32
                parameter.grad = None if gradient is None else gradient.float()
        # `backward` marks the gradients with None in place of amp's scaler.
        self.overflow |= any(flag.item() for flag in unscale_gradients(scaled_parameters)[None])
        add_stashed_gradients(self._stashed_gradients)
        self._stashed_gradients = {}

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor | float:
        """Clips the masters' gradients, and returns the norm before the clip, or -1 after an overflow."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(unique_parameters([self.optimizer]), max_norm, norm_type)

    def step(self, closure: None = None) -> Any:
        """Steps the masters and copies them to the model; does neither after an overflow.

        Raises:
            TypeError: with a closure, because the check for overflow comes before a closure would run.
        """
        if closure is not None:
            raise TypeError("FP16_Optimizer.step takes no closure; call optimizer.backward(loss) before step")
        self.update_master_grads()
        scale = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self.overflow = False
            if self.verbose:
                print(
                    f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {self.loss_scale}"
                )
            self.zero_grad()
            return None
        with self._use_masters():
            return self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns scaler, optimizer and masters, as tensors and numbers that weights_only loads."""
        groups = self._half_parameters()
        with self._use_masters():
            masters = [[p.detach() for p in group] for group in groups]
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": masters,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores masters and model exactly, from files of fastvit and of both of apex's FP16_Optimizers.

        Raises:
            RuntimeError: for a file of apex before October 2019, with one flat tensor of weights a group.
        """
        if "fp32_from_fp16" in state_dict:
            parameters, values = self._half_parameters(), state_dict["fp32_from_fp16"]
            scaler = state_dict["loss_scaler"]
            scaler = scaler if isinstance(scaler, dict) else vars(scaler)  # apex's file has an object
        elif "fp32_groups" in state_dict:  # apex.contrib.optimizers has masters of all parameters
            parameters = [group["params"] for group in self.param_groups]
            values, scaler = state_dict["fp32_groups"], state_dict
        else:
            raise RuntimeError(
                "FP16_Optimizer.load_state_dict: needs 'fp32_from_fp16' or 'fp32_groups', got "
                f"{sorted(state_dict)}; load the weights of files with 'fp32_groups_flat' into the model and "
                "use a new optimizer"
            )
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler() if self.dynamic_loss_scale else LossScaler()
        names = vars(self.loss_scaler).keys()
        vars(self.loss_scaler).update({name: scaler[name] for name in names if name in scaler})
        self.overflow = False
        with self._use_masters():
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
            for group, group_values in zip(parameters, values, strict=True):
                for parameter, value in zip(group, group_values, strict=True):
                    parameter.copy_(value)
