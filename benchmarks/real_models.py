"""timm, torchvision and transformers, in what they need of each other: their models only."""

import sys

import torch

_library = None


def import_torchvision():
    """torchvision, without its operators where those were built for another torch: models do not use them."""
    global _library
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        if _library is None:
            _library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
