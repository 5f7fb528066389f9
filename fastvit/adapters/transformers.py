"""A callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..conversion import convert

__all__ = ["Convert"]


class Convert(TrainerCallback):
    """Converts the model when training begins, in whatever wrapper the model is then.

    Args:
        options: keyword arguments of `fastvit.convert`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        convert(model, **self.options)
