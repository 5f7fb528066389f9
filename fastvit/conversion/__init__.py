"""Converts models: what their training keeps is rebuilt, measured and verified.

convert.py       a scope round a model's forward
budget.py        the part of it that a share of the bytes needs
report.py        what a training forward keeps
verification.py  whether a converted model computes the same
trial.py         forwards of copies, for these
"""

from .convert_model import convert, revert
from .memory_report import Report, TensorReport, report
from .verification import Verification, verify

__all__ = ["Report", "TensorReport", "Verification", "convert", "report", "revert", "verify"]
