"""The module by which pickles of models know the classes of `sync_batch_norm`."""

from .sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["BatchNorm", "SyncBatchNorm"]
