"""For Lightning's Trainer, a callback that converts the model, and a plugin for synchronised layers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import LayerSync
from torch import nn

from ..conversion import convert
from ..convert_syncbn import convert_syncbn_model, revert_syncbn_model

__all__ = ["Convert", "SyncBatchNorm"]


class Convert(Callback):
    """Converts the module when training begins.

    Args:
        options: keyword arguments of `fastvit.convert`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        convert(pl_module, **self.options)


class SyncBatchNorm(LayerSync):
    """Puts fastvit's SyncBatchNorm in place of torch's, on CPUs too: `Trainer(plugins=[SyncBatchNorm()])`."""

    def apply(self, model: nn.Module) -> nn.Module:
        return convert_syncbn_model(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return revert_syncbn_model(model)
