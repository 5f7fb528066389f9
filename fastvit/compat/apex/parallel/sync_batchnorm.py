"""The module of apex's Python SyncBatchNorm, here fastvit's."""

from fastvit.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
