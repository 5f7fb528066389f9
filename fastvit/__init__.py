"""fastvit: fused, memory-saving, synchronised BatchNorm layers, and a ViT trainer for the apex recipe."""

import typing as _typing

from . import _library, functional, ops, sync
from . import fuse as _module_in_pickles  # noqa: F401  # Imported before the function of that name.
from .batch_norm_act import BatchNormAct, BatchNormActSync
from .conversion import Report, TensorReport, Verification, convert, report, revert, verify
from .convert_syncbn import convert_syncbn_model, revert_syncbn_model
from .fusion import fuse, unfuse
from .inplace_abn import InPlaceABN, InPlaceABNSync
from .layer_norm import LayerNorm
from .recompute import recompute_scope
from .sync_batch_norm import SyncBatchNorm, create_syncbn_process_group

__all__ = [
    "BatchNormAct",
    "BatchNormActSync",
    "InPlaceABN",
    "InPlaceABNSync",
    "LayerNorm",
    "Report",
    "SyncBatchNorm",
    "TensorReport",
    "Verification",
    "convert",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "functional",
    "fuse",
    "ops",
    "recompute_scope",
    "report",
    "revert",
    "revert_syncbn_model",
    "sync",
    "unfuse",
    "verify",
]
__version__: str


if not _typing.TYPE_CHECKING:  # type checkers would take every name for an attribute

    def __getattr__(name: str) -> str:
        if name == "__version__":  # computed at the first use, since it reads every source file
            return _library.version()
        raise AttributeError(f"module 'fastvit' has no attribute {name!r}")
