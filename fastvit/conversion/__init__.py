"""Reduces the memory that a model keeps for backward: fuses BatchNorm layers, and rebuilds outputs of any op.

convert.py                  `convert` and `revert`
layers.py, activations.py   recognise BatchNorm layers and activations
tracing.py, exporting.py    graphs of a forward: which op reads which tensor
caught.py                   finds exceptions that a forward catches while it is traced
chain.py                    the nodes from a layer to its activation
prove.py                    whether the activation may move, and whether x may be overwritten
plan.py                     the mode of each layer
adopted.py, runtime.py      swap a module's class; the forwards of the new classes
deferred.py                 the output of a layer that adds a residual
rebuilding.py               opens recompute scopes around blocks
budget.py                   chooses what to rebuild for a given share
watch.py                    checks at each call that the model is the one that was traced
calls.py, untouched.py      arguments of a forward; restores a model after a trial run
measure.py, report.py       bytes and tensors that a training forward keeps; the tables
verification.py             `verify`: compares a step of the original and of the converted model
"""

from .convert import convert, revert
from .plan import MEMORY
from .report import LayerReport, Report, TensorReport
from .verification import Verification, verify

__all__ = ["MEMORY", "LayerReport", "Report", "TensorReport", "Verification", "convert", "revert", "verify"]
