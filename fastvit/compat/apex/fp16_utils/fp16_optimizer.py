"""FP16_Optimizer: masters and loss scaling around one optimizer, for a model that was cast by hand."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._import_hook import missing_attribute_getter
from .._fused import follow_, lay_out
from ..amp.handle import SCALE, Earlier, before_backward, innermost, parameters_of, put_back, unscale
from ..amp.weights import HALF_TYPES
from ..parallel.distributed import without_sync
from .loss_scaler import DynamicLossScaler, LossScaler


class FP16_Optimizer:
    """Wraps an optimizer whose half parameters are float32 masters while it steps.

    Between steps a half parameter is that of the model, whose written elements the master follows, and its
    gradient is unscaled, in float32.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    It skips the step of a gradient that is not finite, under a static scale too.

    Args:
        init_optimizer: changed in place; use the wrapper instead of it.
        static_loss_scale: a fixed scale.
        dynamic_loss_scale: start at 2^16, halve it at an overflow, double it after 1000 clean steps.
        dynamic_loss_args: those of `DynamicLossScaler` instead.
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
        self._earlier: Earlier = {}  # unscaled gradients beside scaled ones
        innermost(init_optimizer).register_step_pre_hook(lay_out)

    def _halves(self) -> list[list[nn.Parameter]]:
        """The half parameters of each group."""
        return [[p for p in group["params"] if p.dtype in HALF_TYPES] for group in self.param_groups]

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Half parameters are their masters inside; what is written there is rounded to them at the end."""
        halves = [(parameter, parameter.data) for group in self._halves() for parameter in group]
        for parameter, half in halves:
            master = self._masters.setdefault(parameter, half.float())
            parameter.data = follow_(master, half)
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

    cur_scale = loss_scale  # its name in apex.contrib.optimizers

    def __getattr__(self, name: str) -> Any:  # state, param_groups
        if name == "optimizer" or name.startswith("__"):  # while being copied or pickled
            raise AttributeError(name)
        if not hasattr(self.optimizer, name):
            missing_attribute_getter("apex.fp16_utils.FP16_Optimizer")(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        self.overflow, self._earlier = False, {}
        self.optimizer.zero_grad(set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of the loss times its scale; then `update_master_grads`, unless that argument is False.

        Under DDP's `no_sync` gradients stay scaled until the backward that reduces them.
        """
        parameters = parameters_of([self.optimizer])
        kept = {p: g for p, g in self._earlier.items() if p.grad is not None}  # not by model.zero_grad()
        self._earlier = kept | before_backward(parameters, self.loss_scale, None)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype  # DDP takes no other
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads and without_sync().isdisjoint(parameters):
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Divides the gradients by the scale, in float32."""
        held = [p for p in parameters_of([self.optimizer]) if SCALE in vars(p)]
        for parameter in held:
            if parameter.dtype in HALF_TYPES:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = torch.float32
                parameter.grad = None if gradient is None else gradient.float()
        self.overflow |= any(flag.item() for flag in unscale(held)[None])
        put_back(self._earlier)
        self._earlier = {}

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor | float:
        """Clips the masters' gradients and returns their norm before; -1 after an overflow."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(parameters_of([self.optimizer]), max_norm, norm_type)

    def step(self, closure: None = None) -> Any:
        """Steps the masters and copies them to the model; after an overflow it does neither.

        Raises:
            TypeError: with a closure, whose backward would have to come before the check for overflow.
        """
        if closure is not None:
            raise TypeError("FP16_Optimizer.step takes no closure; call backward(loss) before it")
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
        with self._in_float32():
            return self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The scaler, the optimizer and the masters, as tensors and numbers that weights_only loads."""
        groups = self._halves()
        with self._in_float32():
            masters = [[p.detach() for p in group] for group in groups]
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": masters,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores masters and model exactly; loads the files of both of apex's FP16_Optimizers too.

        Raises:
            RuntimeError: a file of apex before October 2019, whose weights are a flat tensor for each group.
        """
        if "fp32_from_fp16" in state_dict:
            parameters, values = self._halves(), state_dict["fp32_from_fp16"]
            scaler = state_dict["loss_scaler"]
            scaler = scaler if isinstance(scaler, dict) else vars(scaler)  # apex's is an object
        elif "fp32_groups" in state_dict:  # of apex.contrib.optimizers: every parameter, and no scaler apart
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
        with self._in_float32():
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
            for group, loaded in zip(parameters, values, strict=True):
                for parameter, value in zip(group, loaded, strict=True):
                    parameter.copy_(value)
