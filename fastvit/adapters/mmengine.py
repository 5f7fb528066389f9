"""A hook for the Runner of mmengine."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..conversion import convert

__all__ = ["FastvitConvertHook"]


@HOOKS.register_module()
class FastvitConvertHook(Hook):
    """Converts the runner's model before training.

    Args:
        options: of `fastvit.convert`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def before_train(self, runner: Runner) -> None:
        convert(runner.model, **self.options)
