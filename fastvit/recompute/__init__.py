"""Rebuilds saved tensors in the backward pass instead of keeping them.

policy.py   what a scope rebuilds
kept.py     what autograd holds for a saved tensor that is kept; masks.py: a bit an element
saved.py    what it holds for another: a recipe
values.py   the op and the inputs of a tensor, and how it is rebuilt
rules.py    the ops that are repeated, by the names of autograd's nodes; norms.py, layers.py, views.py
graph.py    reads the op and its inputs from autograd's graph
calls.py    what the graph lacks, from the calls of torch's functions
places.py   what earlier forwards decided
scope.py    the saved-tensor hooks
opening.py  opens and closes scopes
"""

from .opening import active_scope, close_scope, open_scope, recompute_scope, watched, why_closed
from .places import Place
from .policy import Policy

__all__ = [
    "Place",
    "Policy",
    "active_scope",
    "close_scope",
    "open_scope",
    "recompute_scope",
    "watched",
    "why_closed",
]
