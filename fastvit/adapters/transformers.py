"""A callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..conversion import convert

__all__ = ["Convert"]


class Convert(TrainerCallback):
    """Converts the model when training begins, in the wrapper that the Trainer has put round it.

    Args:
        options: keyword arguments of `fastvit.convert`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        convert(model, **self.options)
