"""The module by which pickles of models know classes of `fusion` and `convert_syncbn`."""

from .convert_syncbn import SyncBatchNormAct
from .fusion import FusedActivationPlaceholder as Absorbed
from .fusion import TanhGELU as GELU
from .fusion import TorchDtypeLayerNorm as LayerNorm

__all__ = ["GELU", "Absorbed", "LayerNorm", "SyncBatchNormAct"]
