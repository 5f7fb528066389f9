"""Rebuilding in the backward pass what the forward would otherwise have to keep for it.

policy.py   how far a scope goes
saved.py    what stands for a saved tensor: itself, or a recipe
values.py   how a tensor is rebuilt, and from what
rules.py    which ops are done again, and how
graph.py    what autograd's graph tells of how it came about
scope.py    the hooks that decide
"""

from .graph import remember_eps
from .policy import Policy
from .scope import active_scope, policy_scope, recompute_scope

__all__ = ["Policy", "active_scope", "policy_scope", "recompute_scope", "remember_eps"]
