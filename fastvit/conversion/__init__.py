"""Converts models, so that their backward recomputes saved tensors; measures and verifies the conversion.

convert_model.py   `convert`; skip_pairs.py: its argument `skip`
blocks.py          which modules have a scope of their own
scope_hooks.py     the hooks that open and close scopes, `revert`; hook_visibility.py: hides them from torch
budget.py          which sites meet a budget, by plan_search.py; budget_hook.py: plans in a training step
report_model.py    `report`; memory_report.py: its result, which tells what a training forward keeps
step_memory.py     the bytes over a step, computed by timeline.py; module_labels.py, report_pictures.py
largest_batch.py   the largest batch that fits in a number of bytes
verification.py    whether a converted model computes the same
copy_runner.py     forwards of copies, for all of these; nested_values.py: their arguments
convert.py         the module that older pickles of converted models name
"""

from . import convert as _name_in_pickles  # noqa: F401  # The function `convert` replaces this attribute.
from .convert_model import convert
from .memory_report import Report, TensorReport
from .report_model import report
from .scope_hooks import revert
from .verification import Verification, verify

__all__ = ["Report", "TensorReport", "Verification", "convert", "report", "revert", "verify"]
