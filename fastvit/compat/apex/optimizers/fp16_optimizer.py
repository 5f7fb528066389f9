"""FP16_Optimizer of apex before 2020, which scripts for BERT take from apex.optimizers."""

from __future__ import annotations

from typing import Any

import torch

from ..fp16_utils.fp16_optimizer import FP16_Optimizer as General
from ..fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(General):
    """Masters and loss scaling around an optimizer, for a model whose weights are half.

        model.half()
        optimizer = FusedAdam(model.parameters(), lr=1e-4, max_grad_norm=1.0)
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    Unlike `apex.fp16_utils.FP16_Optimizer` it skips the step of a gradient that is not finite under a static
    scale too, and its checkpoints are those of apex.contrib.optimizers.

    Args:
        init_optimizer: changed in place; use the wrapper instead of it.
        static_loss_scale: a fixed scale.
        dynamic_loss_scale: start at 2^16, halve it at an overflow, double it after 1000 clean steps.
        dynamic_loss_args: those of `DynamicLossScaler` instead.
        verbose: print skipped steps.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        dynamic_loss_args = dynamic_loss_args or {"init_scale": 2.0**16}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args, verbose)

    cur_scale = General.loss_scale

    def update_master_grads(self) -> None:
        self.overflow |= any(flag.item() for flag in self._amp.unscale(self.loss_scale))

    def state_dict(self) -> dict[str, Any]:
        """The scale, the optimizer, and in `fp32_groups` the float32 values of every parameter by group."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            **vars(self.loss_scaler),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [[p.detach() for p in group["params"]] for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores masters and model exactly.

        Raises:
            RuntimeError: a file of apex before October 2019, whose weights are a flat tensor for each group.
        """
        if "fp32_groups" not in state_dict:
            raise RuntimeError(
                f"FP16_Optimizer.load_state_dict: needs 'fp32_groups', got {sorted(state_dict)}; load the "
                "weights of files with 'fp32_groups_flat' into the model and use a new optimizer"
            )
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler() if self.dynamic_loss_scale else LossScaler()
        names = vars(self.loss_scaler).keys()
        vars(self.loss_scaler).update((k, v) for k, v in state_dict.items() if k in names)
        parameters = [group["params"] for group in self.param_groups]
        self._load(state_dict["optimizer_state_dict"], parameters, state_dict["fp32_groups"])
