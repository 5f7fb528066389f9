"""Real models by name: timm's, `torchvision:NAME`, `transformers:NAME`, with random weights."""

import importlib

import torch
from torch import nn


def import_torchvision():
    """torchvision; without its operators where those were compiled for another torch. Models need none."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision")


class _Pooled(nn.Module):
    """A transformers model that takes images and returns one tensor."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).pooler_output

    def set_grad_checkpointing(self):
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def _transformers(name: str) -> nn.Module:
    import transformers

    small = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "patch_size": 16}
    small |= {"image_size": 224, "num_hidden_layers": 12, "attn_implementation": "sdpa"}
    kinds = {"vit": "ViT", "siglip": "SiglipVision", "clip": "CLIPVision"}
    config = getattr(transformers, f"{kinds[name]}Config")(**small)
    return _Pooled(getattr(transformers, f"{kinds[name]}Model")(config))


def create(name: str) -> tuple[nn.Module, int]:
    """The model in training, and the size of the images that it takes."""
    library, _, plain = name.rpartition(":")
    import_torchvision()
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(plain).train(), 224
    if library == "transformers":
        return _transformers(plain).train(), 224
    import timm

    sized = {"img_size": 224} if "patch14_dinov2" in plain else {}
    model = timm.create_model(plain, **sized).train()
    return model, sized.get("img_size", model.pretrained_cfg["input_size"][-1])
