"""Letting a model keep less for backward: BatchNorm layers where that is proven, and blocks of any kind.

watch.py                    what runs, and whether that has changed
layers.py, activations.py   what is a BatchNorm, what is an activation
tracing.py, exporting.py    who reads which tensor
caught.py                   exceptions that a forward catches on the way
chain.py                    from a layer to its activation
prove.py, residuals.py      what that allows
plan.py                     what each layer becomes
adopted.py, runtime.py      how a module changes without ceasing to be what it was; what it then does
deferred.py                 an output that waits for its residual and its activation
budget.py                   which of them, so that no more than a share is kept
rebuilding.py               blocks whose norms, activations and the like are rebuilt
convert.py                  convert and revert
report.py, sizes.py         what was done, and what it saves
accounts.py                 what is kept for backward, tensor by tensor, and why
calls.py, untouched.py      how a forward is called for a look at it, and how nothing of that stays
verification.py             whether it was right
"""

from .convert import convert, revert
from .plan import MEMORY
from .report import LayerReport, Report
from .verification import Verification, verify

__all__ = ["MEMORY", "LayerReport", "Report", "Verification", "convert", "revert", "verify"]
