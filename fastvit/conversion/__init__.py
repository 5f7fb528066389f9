"""Converts models: their backward recomputes what it would keep, which is measured and verified.

convert_model.py   `convert`; skip_pairs.py: its argument `skip`
blocks.py          which modules have a scope of their own
scope_hooks.py     the hooks that open and close scopes, `revert`; hook_visibility.py: who does not see them
budget.py          which sites meet a budget, by plan_search.py; budget_hook.py: planned in a training step
memory_report.py   what a training forward keeps
step_memory.py     the bytes over a step, on paper, by timeline.py; module_labels.py, report_pictures.py
largest_batch.py   which batch fits in given memory
verification.py    whether a converted model computes the same
copy_runner.py     forwards of copies, for all of these; nested_values.py: their arguments
convert.py         a name in pickles
"""

from . import convert as _name_in_pickles  # noqa: F401  # before the function of that name
from .convert_model import convert
from .memory_report import Report, TensorReport
from .report_model import report
from .scope_hooks import revert
from .verification import Verification, verify

__all__ = ["Report", "TensorReport", "Verification", "convert", "report", "revert", "verify"]
