"""A hook for the Runner of mmengine, which converts its model."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..conversion import convert

__all__ = ["Convert", "FastvitConvertHook"]


@HOOKS.register_module(name=["Convert", "FastvitConvertHook"])
class Convert(Hook):
    """Converts the runner's model before training. The class is also registered as `FastvitConvertHook`.

    Args:
        options: keyword arguments of `fastvit.convert`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def before_train(self, runner: Runner) -> None:
        convert(runner.model, **self.options)


FastvitConvertHook = Convert
