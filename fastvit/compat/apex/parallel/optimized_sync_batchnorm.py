"""The SyncBatchNorm that apex compiles: here there is one, fastvit's."""

from fastvit.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
