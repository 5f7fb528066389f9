"""The module by which pickles of models know the classes of `sync_batch_norm`."""

from ._deprecation import renamed_names
from .sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["BatchNorm", "SyncBatchNorm"]

__getattr__ = renamed_names(__name__, {"create_syncbn_process_group": "fastvit.create_syncbn_process_group"})
