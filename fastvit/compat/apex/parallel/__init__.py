"""apex.parallel over torch.distributed and fastvit's SyncBatchNorm."""

from fastvit.convert_syncbn import convert_syncbn_model
from fastvit.sync_batch_norm import SyncBatchNorm, create_syncbn_process_group

from .distributed import DistributedDataParallel, ReduceOp, Reducer
from .LARC import LARC

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
