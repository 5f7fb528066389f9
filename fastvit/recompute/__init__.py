"""Recomputes saved tensors in the backward pass instead of keeping them.

policy.py            which tensors a scope may recompute
packed_tensor.py     an object for each saved tensor, and its states; pins.py, masks.py
recipe.py            an op call that recomputes a tensor; environment.py
planner.py           a plan of saved tensors: keep, or recompute by which recipe; node_reader.py
recompute_rules.py   the ops that are recomputed, by the names of autograd's nodes; norm_rules.py, views.py
op_names.py          the names of ops that `report` prints and `convert(skip=)` takes
call_observer.py     facts that the graph lacks, from the calls of torch's functions; write_handlers.py
storage.py           the memory in which a tensor lies
weak_list.py         objects that a list does not keep alive
write_tracker.py     writes that neither the graph nor the version counter shows
scope.py             the saved-tensor hooks, and the end of a block
scope_stack.py       the open scopes of a thread; torch_patches.py
observer.py          what is kept and recomputed, for `report`, `verify` and budgets
step_record.py       a record of a training forward, for a replay of the step on paper
dynamo_hooks.py, joint_graph.py   the same under torch.compile
"""

from . import dynamo_hooks
from .observer import SavedMemory, SavedTensorObserver
from .op_names import is_op_name, list_recomputable_ops
from .policy import OpSite, Policy, RecomputeLevel, skip_key
from .scope_stack import (
    active_scope,
    close_scope,
    observe_saved_tensors,
    open_scope,
    reason_no_scope,
    recompute_scope,
)
from .step_record import StepRecord, Value, record_step

__all__ = [
    "RecomputeLevel",
    "SavedMemory",
    "Policy",
    "OpSite",
    "SavedTensorObserver",
    "StepRecord",
    "Value",
    "active_scope",
    "close_scope",
    "dynamo_hooks",
    "is_op_name",
    "list_recomputable_ops",
    "open_scope",
    "skip_key",
    "record_step",
    "recompute_scope",
    "observe_saved_tensors",
    "reason_no_scope",
]
