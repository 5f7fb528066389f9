"""The SyncBatchNorm that apex writes in Python: here there is one, fastvit's."""

from fastvit.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
