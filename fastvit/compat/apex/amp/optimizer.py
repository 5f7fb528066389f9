"""amp's changes to an optimizer: masters in its parameter groups, unscaled gradients, skipped steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._fused import FusedOptimizer, lay_out
from ..parallel.LARC import LARC
from ._amp_state import _amp_state, maybe_print
from .forward import ddp_groups, find_ddp, without_sync
from .scaler import LossScaler, unscale_
from .weights import HALF_TYPES, masters


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a LARC, or `optimizer` itself."""
    while isinstance(optimizer, LARC):
        optimizer = optimizer.optim
    return optimizer


def several(value: Any) -> list[Any]:
    """The models or optimizers in an iterable, or the one that was given."""
    one = (
        isinstance(value, (nn.Module, Optimizer))
        or not isinstance(value, Iterable)
        or isinstance(value, dict)
    )
    return [value] if one else list(value)


def of(optimizer: Any) -> AmpOptimizer | None:
    """The `AmpOptimizer` that `amp.initialize` attached to `optimizer`, or None."""
    return getattr(innermost(optimizer), "__dict__", {}).get("_amp_stash")


def _nothing() -> None:
    """Of names in apex for which there is nothing left to do."""


class AmpOptimizer:
    """Attached to a torch optimizer by its step hooks, and by methods on the instance where torch has no
    hooks. It is found under apex's name, `_amp_stash`; there scripts that resume also set
    `lazy_init_called`, after a call of `_lazy_init_maybe_master_weights`.

    Args:
        optimizer: its parameter groups are changed in place.
        master_weights: half parameters in the groups are replaced by float32 masters.
        originals: float32 values of parameters that `amp.initialize` has cast to half.
    """

    def __init__(
        self, optimizer: Optimizer, master_weights: bool, originals: dict[nn.Parameter, Tensor]
    ) -> None:
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (half, master)
        self.scaled_by: float | None = None  # the scale of gradients that are not unscaled yet
        self._scaler: LossScaler | None = None
        self._unscaled: list[tuple[nn.Parameter, Tensor]] = []  # sums of earlier backwards
        self._withheld: list[tuple[nn.Parameter, Tensor]] = []
        self.overflow: str | None = None  # the next step prints it and does nothing
        self._started = False
        for group in optimizer.param_groups:
            self._put_masters(group, originals)
        # State that was loaded before gets the dtype of its parameter.
        for parameter, state in () if isinstance(optimizer, FusedOptimizer) else optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    state[name] = value.to(parameter.dtype)
        # A wrapper of an optimizer (Lookahead) may not call Optimizer.__init__, without which torch runs no
        # hooks. __setstate__ adds what is missing.
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._add_param_group, self._zero_grad = optimizer.add_param_group, optimizer.zero_grad
        optimizer.__dict__.update(
            add_param_group=self._add_group, zero_grad=self._zero_all, _amp_stash=self,
            _lazy_init_maybe_master_weights=_nothing,
        )  # fmt: skip

    def remove(self) -> None:
        """Undoes all changes of the optimizer; its groups have the model's parameters again."""
        model_parameters = {master: half for half, master in self.pairs}
        for group in self.optimizer.param_groups:
            group["params"] = [model_parameters.get(p, p) for p in group["params"]]
        for master, half in model_parameters.items():
            if master in self.optimizer.state:
                self.optimizer.state[half] = self.optimizer.state.pop(master)
            masters.pop(half, None)
        for handle in self._handles:
            handle.remove()
        for name in ("add_param_group", "zero_grad", "_amp_stash", "_lazy_init_maybe_master_weights"):
            del self.optimizer.__dict__[name]

    def _put_masters(self, group: dict[str, Any], originals: dict[nn.Parameter, Tensor]) -> None:
        if not self.master_weights:
            return
        for index, half in enumerate(group["params"]):
            if half.dtype not in HALF_TYPES:
                continue
            values = originals.get(half)
            values = half.detach() if values is None else values
            master = nn.Parameter(values.to(torch.float32, copy=True), half.requires_grad)
            group["params"][index] = master
            if half in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(half)
            self.pairs.append((half, master))
            masters[half] = master

    def _add_group(self, group: dict[str, Any]) -> None:
        self._add_param_group(group)
        self._put_masters(self.optimizer.param_groups[-1], {})

    def _zero_all(self, *args: Any, **kwargs: Any) -> None:
        self._zero_grad(*args, **kwargs)
        for half, _ in self.pairs:
            half.grad = None
        self._unscaled.clear()
        self.scaled_by = self.overflow = None

    def _own(self) -> list[nn.Parameter]:
        """The model's parameters without a master."""
        known = {master for _, master in self.pairs}
        return [p for group in self.optimizer.param_groups for p in group["params"] if p not in known]

    def _gradients(self) -> list[Tensor]:
        """The model's gradients as dense tensors that share their memory."""
        gradients = []
        for parameter in [half for half, _ in self.pairs] + self._own():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                gradients.append(parameter.grad._values())
            elif parameter.grad is not None:
                gradients.append(parameter.grad)
        return gradients

    def _follow_weights(self) -> None:
        """Copies weights that were written to the model after `initialize` to the masters: by the script, or
        by DDP, which broadcasts the weights of the first rank.
        """
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        groups_of = ddp_groups(half for half, _ in self.pairs)
        for half, master in self.pairs:
            groups = groups_of[half]
            # A script without DDP makes only the half weights equal over the ranks, so masters are rounded.
            # A loaded master, whose version is above 0, is equal on all ranks.
            rounded = ranks > 1 and not groups and master._version == 0
            master.copy_(half if rounded else torch.where(half == master.to(half.dtype), master, half))
            for group in groups:
                dist.broadcast(master, group=group, group_src=0)

    @torch.no_grad()
    def before_backward(self, scale: float) -> None:
        """Stores the unscaled gradients of earlier losses apart from those of the next backward.

        The first call copies the model's weights to the masters; with DDP every rank takes part.
        """
        if not self._started:
            find_ddp()
            self._follow_weights()
            self._started = True
        if self.scaled_by is not None:
            # `model.zero_grad()` has dropped these gradients, so the stored ones are dropped too.
            self._unscaled = [(p, g) for p, g in self._unscaled if p.grad is not None]
            if self.scaled_by != scale:
                torch._foreach_mul_(self._gradients(), scale / self.scaled_by)
                self.scaled_by = scale
            return
        for half, _ in self.pairs:
            half.grad = None
        gradients = [(p, p.grad) for p in self._own() if p.grad is not None]
        self._unscaled = [(p, gradient.clone()) for p, gradient in gradients]
        for _, gradient in gradients:
            gradient.zero_()

    def abandon_backward(self) -> None:
        """Drops the gradients of a backward that failed, and restores the stored ones. Does nothing
        with scaled gradients, to which the backward has added.
        """
        if self.scaled_by is not None:
            return
        for parameter in [half for half, _ in self.pairs] + self._own():
            parameter.grad = None
        for parameter, gradient in self._unscaled:
            parameter.grad = gradient
        self._unscaled.clear()

    def leave_scaled(self, scale: float, scaler: LossScaler | None = None) -> None:
        """Leaves the gradients scaled until the next backward without a delay, or the step, which `scaler`
        then counts.
        """
        self.scaled_by, self._scaler = scale, scaler

    def is_unreduced(self) -> bool:
        """Whether gradients are not reduced over the ranks yet, in DDP's `no_sync`."""
        return without_sync({half for half, _ in self.pairs} | set(self._own()))

    def unscale_rest(self) -> None:
        """Unscales gradients that were left scaled, and skips the step after an overflow."""
        if self.scaled_by is None:
            return
        flags = self.unscale(self.scaled_by)
        scaler = self._scaler
        if scaler is not None and scaler.update_scale(scaler.dynamic and any(f.item() for f in flags)):
            self.overflow = f"Gradient overflow. Skipping step, reducing loss scale to {scaler.loss_scale()}"

    @torch.no_grad()
    def unscale(self, scale: float) -> list[Tensor]:
        """Adds the model's gradients, divided by `scale`, to those of the stepped parameters.

        Returns flags like `scaler.unscale_`.
        """
        self.scaled_by = None
        fresh = [(master, half.grad.float()) for half, master in self.pairs if half.grad is not None]
        for half, _ in self.pairs:
            half.grad = None  # the master has it as float32
        flags = unscale_([gradient for _, gradient in fresh] + self._gradients(), scale)
        for master, gradient in fresh:
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        for parameter, gradient in self._unscaled:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._unscaled.clear()
        return flags

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None and (self.pairs or any(s.dynamic for s in _amp_state.loss_scalers)):
            raise RuntimeError(
                "amp: optimizer.step takes no closure, because the gradients decide whether the step is "
                "skipped; compute them before"
            )
        self.unscale_rest()
        # A step that calls the step of its base class runs the hooks twice. After a failed step there are
        # withheld gradients too, but also new gradients.
        withheld = bool(self._withheld) and all(p.grad is None for p, _ in self._withheld)
        if self.overflow is not None and not withheld:
            maybe_print(self.overflow, rank0=True)
            # An optimizer changes neither a parameter without a gradient nor its state.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._withheld = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None
        lay_out(optimizer)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld.clear()
        if self.overflow is None and self.pairs:
            halves, values = zip(*self.pairs, strict=True)
            torch._foreach_copy_(halves, values)
        for _, master in self.pairs:  # model.zero_grad() does not clear these
            master.grad = None
        self.overflow = None
