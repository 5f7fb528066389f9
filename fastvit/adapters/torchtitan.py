"""A policy of activation checkpointing for torchtitan, which converts the model instead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from .._deprecation import renamed_arguments
from ..conversion import convert

__all__ = ["Convert"]


class Convert(ActivationCheckpointing):
    """Converts the model in place of checkpointing its blocks; `Config` has options of `convert`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        matmuls: bool = False
        recompute_weight_casts: bool = False
        budget: float | str | None = None
        skip: tuple[tuple[str, str], ...] = ()

    def apply(self, model: nn.Module) -> None:
        convert(
            model,
            matmuls=self.config.matmuls,
            recompute_weight_casts=self.config.recompute_weight_casts,
            budget=self.config.budget,
            skip=self.config.skip,
        )


_accept_older_fields = renamed_arguments(products="matmuls", weight_casts="recompute_weight_casts")
Convert.Config.__init__ = _accept_older_fields(Convert.Config.__init__)  # type: ignore[method-assign]
