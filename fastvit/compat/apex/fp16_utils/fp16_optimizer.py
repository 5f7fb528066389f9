"""FP16_Optimizer: masters and loss scaling around one optimizer, for a model that was cast by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._fused import lay_out
from ..amp.forward import find_ddp, without_sync
from ..amp.optimizer import Earlier, add_gradient, gradients_of, innermost, parameters_of
from ..amp.scaler import unscale_
from ..amp.weights import HALF_TYPES
from .loss_scaler import DynamicLossScaler, LossScaler


class FP16_Optimizer:
    """Wraps an optimizer whose half parameters it replaces by float32 masters.

    A half parameter of the model and its master have one gradient, unscaled in float32.

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
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (half, master)
        self._scaled_by: float | None = None  # the scale of gradients that are not unscaled yet
        self._earlier: Earlier = {}
        self._started = False
        for group in init_optimizer.param_groups:
            self._put_masters(group)
        innermost(init_optimizer).register_step_pre_hook(lay_out)

    def _put_masters(self, group: dict[str, Any]) -> None:
        for index, half in enumerate(group["params"]):
            if half.dtype in HALF_TYPES:
                master = nn.Parameter(half.detach().float(), half.requires_grad)
                group["params"][index] = master
                if half in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(half)
                self._pairs.append((half, master))

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)
        self._put_masters(self.param_groups[-1])

    def _parameters(self) -> list[nn.Parameter]:
        """The model's parameters."""
        halves = {master: half for half, master in self._pairs}
        return [halves.get(p, p) for p in parameters_of([self.optimizer])]

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
        return getattr(self.optimizer, name)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clears the gradients of masters and model."""
        self.optimizer.zero_grad(set_grads_to_None)
        for half, master in self._pairs:
            if master.grad is None or self._scaled_by is not None:
                half.grad = None
        self.overflow, self._scaled_by = False, None

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of the loss times its scale; then `update_master_grads`, unless that argument is False.

        Under DDP's `no_sync` gradients stay scaled until the backward that reduces them.
        """
        if not self._started:
            find_ddp()
            with torch.no_grad():
                for half, master in self._pairs:
                    master.copy_(half)  # which DDP or the script may have written
            self._started = True
        parameters = self._parameters()
        if self._scaled_by is None:
            self._earlier = {p: p.grad for p in parameters if p.grad is not None}
            for parameter in parameters:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype  # DDP takes no other
        else:
            self._earlier = {p: g for p, g in self._earlier.items() if p.grad is not None}
            for gradient in gradients_of(parameters):
                gradient.mul_(self.loss_scale / self._scaled_by)
        self._scaled_by = self.loss_scale
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads and without_sync().isdisjoint(parameters):
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Divides the model's gradients by the scale, and gives them to the masters."""
        if self._scaled_by is None:
            return
        for half, _ in self._pairs:
            if half.grad is not None:
                gradient, half.grad = half.grad.float(), None
                half.grad_dtype = torch.float32
                half.grad = gradient
        parameters = self._parameters()
        self.overflow |= any(f.item() for f in unscale_(gradients_of(parameters), self._scaled_by))
        for parameter in parameters:
            add_gradient(parameter, self._earlier.get(parameter))
        self._earlier, self._scaled_by = {}, None
        for half, master in self._pairs:
            master.grad = half.grad

    @torch.no_grad()
    def _check(self) -> None:
        """Raises RuntimeError where model and masters have parted, which would lose what a script wrote."""
        for half, master in self._pairs:
            if half.grad is None or master.grad is None:
                master.grad = half.grad  # of a backward of the script's own, or dropped by model.zero_grad()
            elif master.grad is not half.grad:
                raise RuntimeError(
                    "FP16_Optimizer.step: the gradient of a master was replaced; write it in place, as by "
                    "grad.mul_(2.0)"
                )
        bits = torch.int16  # a NaN is equal to itself
        if any(
            not torch.equal(half.view(bits), master.to(half.dtype).view(bits)) for half, master in self._pairs
        ):
            raise RuntimeError(
                "FP16_Optimizer.step: weights of the model or its masters were written. Write the masters, "
                "in optimizer.param_groups; optimizer.load_state_dict(optimizer.state_dict()) then writes "
                "the model"
            )

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor | float:
        """Clips the masters' gradients and returns their norm before; -1 after an overflow."""
        if self.overflow:
            return -1
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(self, closure: None = None) -> Any:
        """Steps the masters and copies them to the model; after an overflow it does neither.

        Raises:
            RuntimeError: for weights of the model that were written after the first backward.
            TypeError: with a closure, whose backward would have to come before the check for overflow.
        """
        if closure is not None:
            raise TypeError("FP16_Optimizer.step takes no closure; call backward(loss) before it")
        self.update_master_grads()
        self._check()
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
        result = self.optimizer.step()
        with torch.no_grad():
            for half, master in self._pairs:
                half.copy_(master)
                master.grad = half.grad  # the step may have given it another layout
        return result

    def state_dict(self) -> dict[str, Any]:
        """The scaler, the optimizer and the masters, as tensors and numbers that weights_only loads."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m.detach() for m in group] for group in self._masters_by_group()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores masters and model exactly; loads the files of both of apex's FP16_Optimizers too.

        Raises:
            RuntimeError: a file of apex before October 2019, whose weights are a flat tensor for each group.
        """
        if "fp32_from_fp16" in state_dict:
            parameters, values = self._masters_by_group(), state_dict["fp32_from_fp16"]
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
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, loaded in zip(parameters, values, strict=True):
            for parameter, value in zip(group, loaded, strict=True):
                parameter.copy_(value)
        for half, master in self._pairs:
            half.copy_(master)
        self._started = True

    def _masters_by_group(self) -> list[list[Tensor]]:
        masters = {master for _, master in self._pairs}
        return [[p for p in group["params"] if p in masters] for group in self.param_groups]
