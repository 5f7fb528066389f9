"""Rebuilds saved tensors in the backward pass instead of keeping them.

policy.py   what a scope rebuilds
record.py   what autograd holds for a saved tensor, and the recipe of one that is rebuilt; masks.py
decide.py   one pass over the graph at the end of a block: what is kept, or rebuilt by which recipe; views.py
rules.py    the ops that are repeated, by the names of autograd's nodes; norms.py
calls.py    what the graph lacks, from the calls of torch's functions
scope.py    the saved-tensor hooks, and the end of a block
stack.py    the stack of open scopes of a thread
decisions.py   what was decided, for those who measure and check it
compiled.py, joint.py   the same under torch.compile
"""

from . import dynamo_hooks
from .observer import SavedMemory, SavedTensorObserver
from .policy import OpSite, Policy, RecomputeLevel, pair
from .scope_stack import (
    active_scope,
    close_scope,
    observe_saved_tensors,
    open_scope,
    reason_no_scope,
    recompute_scope,
)

__all__ = [
    "RecomputeLevel",
    "SavedMemory",
    "Policy",
    "OpSite",
    "SavedTensorObserver",
    "active_scope",
    "close_scope",
    "dynamo_hooks",
    "open_scope",
    "pair",
    "recompute_scope",
    "observe_saved_tensors",
    "reason_no_scope",
]
