"""`BudgetHook`: meets a budget from what a training step itself saves. Nothing else is run."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..recompute import (
    OpSite,
    Policy,
    RecomputeLevel,
    SavedMemory,
    SavedTensorObserver,
    active_scope,
    dynamo_hooks,
    observe_saved_tensors,
)
from .budget import Budget, SiteCost, describe_least, order_sites, sum_site_costs
from .nested_values import tensor_leaves
from .scope_hooks import ScopeHook, get_scope_hook


class BudgetHook(ScopeHook):
    """The hook of a module that a user calls, with a budget.

    The first training forward recomputes all that can be, and what it saves says what each site frees. From
    the next forward on the fewest sites are recomputed that meet the budget. Inputs of more bytes plan again.
    If recomputing inside of blocks is not enough, the next forward recomputes across blocks and plans again.

    Args:
        policy: until the first plan, outside of training; shared with the hooks of the blocks.
        block: the name of the module.
        budget: to be met.
        planned: the level, the bytes of the inputs, and the sites of the level below, of the last plan; and
            whether a warning was given.
    """

    def __init__(
        self,
        policy: Policy,
        block: str,
        budget: Budget,
        planned: tuple[int, int, tuple[OpSite, ...], bool] = (RecomputeLevel.EVERY_OP, -1, (), False),
    ):
        super().__init__(policy, block)
        self.budget = budget
        self.level, self.input_bytes, self.sites_of_blocks, self.has_warned = planned
        # The observers and input bytes of the forwards that run now and plan, by thread.
        self._plannings: dict[int, tuple[SavedTensorObserver, int]] = {}

    def __reduce__(self):
        planned = self.level, self.input_bytes, self.sites_of_blocks, self.has_warned
        return BudgetHook, (self.policy, self.block, self.budget, planned)

    def open_scope(self, module: nn.Module, args: tuple, kwargs: dict, frame: FrameType) -> None:
        # A scope around has an observer of its own, so a forward inside of one is not planned from.
        if module.training and not torch.jit.is_tracing():
            with torch._C.DisableTorchFunction():  # of subclasses, which see every look at them
                input_bytes = sum(one.numel() * one.element_size() for one in tensor_leaves((args, kwargs)))
            if input_bytes > self.input_bytes and not _is_compiled(module):
                self._replace_policies(module, sites=None)
                if active_scope() is None:
                    with observe_saved_tensors(lambda _: None) as observer:
                        super().open_scope(module, args, kwargs, frame)
                    self._plannings[threading.get_ident()] = observer, input_bytes
                    return
        super().open_scope(module, args, kwargs, frame)

    def close_scope(self, module: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        super().close_scope(module, args, kwargs, result)
        if not self._plannings or active_scope() is not None:
            return
        planning = self._plannings.pop(threading.get_ident(), None)
        if planning is None or result is None or _is_compiled(module):  # None after an exception
            return
        observer, input_bytes = planning
        inputs = tensor_leaves((args, kwargs))
        with torch._C.DisableTorchFunction():
            decisions = observer.decisions([*module.parameters(), *module.buffers(), *inputs])
        if decisions:
            self._plan(module, decisions, input_bytes)

    def _plan(self, module: nn.Module, decisions: list[SavedMemory], input_bytes: int) -> None:
        """Chooses sites for the forwards to come."""
        costs = sum_site_costs(decisions)
        least = sum(one.kept for one in decisions)
        original = least + sum(one.freed for one in decisions)
        if not original:  # an empty batch
            return
        allowed = self.budget.allowed_bytes(original)
        sites = order_sites(costs, self.level, self.sites_of_blocks)
        excess = least + sum(cost.freed_bytes for cost in costs.values()) - allowed
        freed = accumulate((costs.get(site, SiteCost()).freed_bytes for site in sites), initial=0)
        enough = next((count for count, nbytes in enumerate(freed) if nbytes >= excess), None)
        if enough is None and self.level < RecomputeLevel.ACROSS_BLOCKS:
            self.level, self.sites_of_blocks = RecomputeLevel.ACROSS_BLOCKS, tuple(sites)
            return  # and the next forward plans
        self.input_bytes = input_bytes
        if enough is not None:
            share = self.budget.fraction or allowed / original
            self._replace_policies(module, sites=frozenset(sites[:enough]), share=share)
        elif not self.has_warned:
            self.has_warned = True
            message = describe_least(self.budget, least, original, self.policy)
            warnings.warn(
                f"convert: {message}. Until then the least is kept, with inputs of {input_bytes} bytes",
                UserWarning,
                stacklevel=2,
            )

    def _replace_policies(self, module: nn.Module, **changes: Any) -> None:
        """Gives the hooks that share this hook's policy another one."""
        before = self.policy
        policy = dataclasses.replace(before, level=RecomputeLevel(self.level), **changes)
        if policy == before:
            return
        for inner in module.modules():
            hook = get_scope_hook(inner)
            if hook is not None and hook.policy is before:
                hook.policy = policy
                dynamo_hooks.set_options(inner, policy)


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled scopes of `module`, to whose code it gives the budget."""
    return any(map(dynamo_hooks.is_compiled, module.modules()))


def find_budget_hooks(model: nn.Module) -> list[tuple[nn.Module, BudgetHook]]:
    """Returns the modules whose forwards may plan, with their hooks."""
    hooks = [(module, get_scope_hook(module)) for module in model.modules()]
    return [(module, hook) for module, hook in hooks if isinstance(hook, BudgetHook)]


def freeze_budgets(model: nn.Module) -> None:
    """Ends planning: each module keeps the policy that its next training forward begins with."""
    for module, hook in find_budget_hooks(model):
        if hook.input_bytes < 0:
            hook._replace_policies(module, sites=None)
        hook.input_bytes = 2**63
