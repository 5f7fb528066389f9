"""mapillary's inplace_abn under its names, with its effective weight `|weight| + eps`.

In place: leaky_relu, elu and identity; relu only in `ABN`. leaky_relu with a slope of 0, with which
mapillary's gradients are wrong, is relu here: the layer saves its input, and its output is rebuilt inside
`fastvit.recompute_scope()` or a converted model. Negative slopes are refused.
"""

from .abn import ABN, InPlaceABN, InPlaceABNSync
from .functions import inplace_abn, inplace_abn_sync
from .group import active_group, set_active_group

__all__ = [
    "ABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "active_group",
    "inplace_abn",
    "inplace_abn_sync",
    "set_active_group",
]
