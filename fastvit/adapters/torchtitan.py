"""A policy of activation checkpointing for torchtitan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ..conversion import convert

__all__ = ["Convert"]


class Convert(ActivationCheckpointing):
    """Converts the model in place of checkpointing its blocks; its Config has two options of `convert`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        products: bool = False
        weight_casts: bool = False

    def apply(self, model: nn.Module) -> None:
        convert(model, products=self.config.products, weight_casts=self.config.weight_casts)
