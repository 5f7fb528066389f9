"""Packages that only some tests need."""

import functools
import importlib

import pytest
import torch

from fastvit.training.engine import import_apex


def package(name: str):
    """The package, or the test is skipped with the reason why it cannot be imported."""
    _declare_torchvision_ops()
    try:
        return importlib.import_module(name)
    except Exception as error:  # what does not fit the installed torch fails in its own ways
        pytest.skip(f"{name} cannot be imported: {error}")


def apex(part: str):
    """A part of NVIDIA apex itself, or the test is skipped with the reason why there is none."""
    try:
        return import_apex(part)
    except ImportError as error:
        pytest.skip(f"FASTVIT_APEX may be a folder of apex 25.05's sources: {error}")


@functools.cache
def _declare_torchvision_ops() -> None:
    """Lets torchvision be imported, by timm say, where its compiled part is made for another torch.

    It describes two of its ops to torch as soon as it is imported, which fails where they do not exist. No
    model that has BatchNorm calls them.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
