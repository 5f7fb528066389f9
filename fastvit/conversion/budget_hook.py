"""`BudgetHook`: plans for a budget in a training step of the user, without forwards of its own."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType

import torch
from torch import nn

from ..recompute import (
    Policy,
    SavedTensorObserver,
    StepRecord,
    active_scope,
    dynamo_hooks,
    observe_saved_tensors,
    record_step,
)
from .budget import Budget, StepPlans, apply_plan, describe_unmet_budget, make_recording_policy
from .nested_values import tensor_leaves
from .scope_hooks import ScopeHook, change_policies, get_scope_hook


class BudgetHook(ScopeHook):
    """The hook of a module that a user calls, with a budget.

    The first training forward recomputes every op with a rule inside of blocks, and its record gives the plan
    for later forwards. A forward with inputs of more bytes plans again.

    Args:
        policy: the policy until the first plan. The hooks of the blocks share this object.
        block: the name of the module.
        budget: the budget to meet.
        last_plan: the bytes of the inputs of the last plan (-1 before it), and whether the hook has warned.
    """

    def __init__(self, policy: Policy, block: str, budget: Budget, last_plan: tuple[int, bool] = (-1, False)):
        super().__init__(policy, block)
        self.budget = budget
        self.input_bytes, self.has_warned = last_plan
        # For each thread the observer and the input bytes of the forward that runs and plans.
        self._planning_forwards: dict[int, tuple[SavedTensorObserver, int]] = {}

    def __reduce__(self):
        return BudgetHook, (self.policy, self.block, self.budget, (self.input_bytes, self.has_warned))

    def open_scope(self, module: nn.Module, args: tuple, kwargs: dict, frame: FrameType) -> None:
        # A forward inside another scope gives no plan, because that scope has an observer of its own.
        if module.training and not torch.jit.is_tracing():
            with torch._C.DisableTorchFunction():  # Subclasses of Tensor would see reads of their sizes.
                inputs = tensor_leaves((args, kwargs))
                input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
            if input_bytes > self.input_bytes and not _is_compiled(module):
                self.replace_policies(module, make_recording_policy(self.policy))
                if active_scope() is None:
                    with observe_saved_tensors(lambda _: None) as observer:
                        super().open_scope(module, args, kwargs, frame)
                    self._planning_forwards[threading.get_ident()] = observer, input_bytes
                    return
        super().open_scope(module, args, kwargs, frame)

    def close_scope(self, module: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        super().close_scope(module, args, kwargs, result)
        if not self._planning_forwards or active_scope() is not None:
            return
        planning = self._planning_forwards.pop(threading.get_ident(), None)
        if planning is None or _is_compiled(module):
            return
        observer, input_bytes = planning
        if result is None and sys.exc_info()[0] is not None:  # The forward has raised.
            observer.drop_recipes()
            return
        inputs, results = tensor_leaves((args, kwargs)), tensor_leaves(result)
        with torch._C.DisableTorchFunction():
            excluded = [*module.parameters(), *module.buffers(), *inputs]
            record = record_step(observer, results, exclude=excluded)
            device = next((tensor.device for tensor in results), torch.device("cpu"))
        if any(
            value.nbytes for value in record.values
        ):  # A forward without gradients, or of an empty batch, has none.
            self._plan(module, record, device, input_bytes)

    def _plan(self, module: nn.Module, record: StepRecord, device: torch.device, input_bytes: int) -> None:
        """Chooses the plan for later forwards, and gives its policy to the hooks."""
        step_plans = StepPlans(record, device)
        self.input_bytes = input_bytes
        plan = step_plans.plans[-1]
        if not self.budget.is_least:
            original_peak = step_plans.original_peak
            allowed = self.budget.find_allowed_bytes(original_peak)
            plan = step_plans.choose_plan(allowed) or plan
            if plan.peak_bytes > allowed and not self.has_warned:
                self.has_warned = True
                message = describe_unmet_budget(self.budget, plan.peak_bytes, original_peak, self.policy)
                warnings.warn(
                    f"convert: {message}; at that peak there are {step_plans.describe_holders(plan)} bytes. "
                    f"Until then the plan is the one with the least peak, with inputs of {input_bytes} bytes",
                    UserWarning,
                    stacklevel=2,
                )
        self.replace_policies(module, apply_plan(self.policy, plan, step_plans.plans[0]))

    def replace_policies(self, module: nn.Module, policy: Policy) -> None:
        """Gives `policy` to this hook and to all hooks that share its policy."""
        shared_policy = self.policy
        if policy != shared_policy:
            change_policies(module, lambda current: policy if current is shared_policy else current)


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled scopes in `module`, which have a budget of their own."""
    return any(map(dynamo_hooks.is_compiled, module.modules()))


def find_budget_hooks(model: nn.Module) -> list[tuple[nn.Module, BudgetHook]]:
    """Returns the modules whose forwards may plan, with their hooks."""
    hooks = [(module, get_scope_hook(module)) for module in model.modules()]
    return [(module, hook) for module, hook in hooks if isinstance(hook, BudgetHook)]


def freeze_budgets(model: nn.Module) -> None:
    """Ends planning: each module keeps the policy that its next training forward begins with."""
    for module, hook in find_budget_hooks(model):
        if hook.input_bytes < 0:
            hook.replace_policies(module, make_recording_policy(hook.policy))
        hook.input_bytes = 2**63  # No inputs have more bytes.
