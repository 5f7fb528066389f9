"""apex.parallel over torch DDP and fastvit's SyncBatchNorm."""

from fastvit.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

from .distributed import DistributedDataParallel, Reducer
from .LARC import LARC

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
