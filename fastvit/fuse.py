"""The module by which pickles of models know classes of `fusion` and `convert_syncbn`."""

from ._deprecation import renamed_names
from .convert_syncbn import SyncBatchNormAct
from .fusion import FusedActivationPlaceholder as Absorbed
from .fusion import TanhGELU as GELU
from .fusion import TorchDtypeLayerNorm as LayerNorm

__all__ = ["GELU", "Absorbed", "LayerNorm", "SyncBatchNormAct"]

__getattr__ = renamed_names(
    __name__,
    {
        "convert_syncbn_model": "fastvit.convert_syncbn_model",
        "fuse": "fastvit.fusion.fuse",
        "revert_syncbn_model": "fastvit.revert_syncbn_model",
        "unfuse": "fastvit.unfuse",
    },
)
