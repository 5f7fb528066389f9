"""apex.fp16_utils, which has half networks, masters and loss scaling without amp."""

from . import fp16util, loss_scaler
from .fp16_optimizer import FP16_Optimizer
from .fp16util import *  # noqa: F403
from .loss_scaler import *  # noqa: F403

__all__ = ["FP16_Optimizer", *fp16util.__all__, *loss_scaler.__all__]
