"""A vision transformer with BatchNorm in a convolutional stem and, by option, in the MLPs.

Stem: Xiao et al., "Early Convolutions Help Transformers See Better", arXiv:2106.14881. Blocks: pre-norm, as
in Dosovitskiy et al., arXiv:2010.11929. BatchNorm in the MLP: Yao et al., "Leveraging Batch Normalization for
Vision Transformers", ICCV Workshops 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norm_act import NormAct

__all__ = ["MLP_NORMS", "VARIANTS", "ViT", "create_vit", "vit_digits"]

MLP_NORMS = ("none", "batch")
"""The values of the argument `mlp_norm`."""


class Stem(nn.Module):
    """Applies 3x3 convolutions, each with BatchNorm and leaky_relu, and makes a token of each patch.

    `(N, in_channels, H, W)` -> `(N, L, dim)`, with L patches of `patch` x `patch` positions.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        strides: Sequence[int],
        patch: int,
        dim: int,
        norm: str,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, stride in zip(channels, strides, strict=True):
            # A bias would be useless, since the BatchNorm that follows subtracts any constant.
            layers.append(nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False))
            layers.append(NormAct(width, norm))
            in_channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(in_channels, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.layers(images)).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, `(N, L, dim)` -> `(N, L, dim)`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        # Query, key and value are `(N, heads, L, dim / heads)` each.
        output = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.project(output.transpose(1, 2).reshape(n, length, dim))


class MLP(nn.Module):
    """Linear, GELU or else BatchNorm and leaky_relu, linear: `(N, L, dim)` -> `(N, L, dim)`."""

    def __init__(self, dim: int, hidden: int, norm: str, mlp_norm: str) -> None:
        super().__init__()
        has_batch_norm = mlp_norm == "batch"
        # Without a bias nn.Linear returns a new tensor for 3-D tokens. With a bias nn.Linear returns a view;
        # after a layer that writes in place, autograd would copy the view's gradient twice.
        self.expand = nn.Linear(dim, hidden, bias=not has_batch_norm)
        self.act = NormAct(hidden, norm, tokens=True) if has_batch_norm else nn.GELU()
        self.contract = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.act(self.expand(x)))


class Block(nn.Module):
    """Attention and an MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, dim: int, heads: int, hidden: int, norm: str, mlp_norm: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden, norm, mlp_norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer with a convolutional stem and mean pooling.

    Args:
        image_size: height and width of the images, in pixels.
        in_channels: channels of the images.
        num_classes: length of the returned logits.
        stem_channels, stem_strides: width and stride of each 3x3 convolution of the stem.
        patch: side of the square of stem positions that becomes one token. The number of positions along a
            side of the image, after the strides, must be a multiple of `patch`.
        dim: width of the tokens; a multiple of `heads`.
        depth: number of blocks.
        heads: attention heads.
        mlp_ratio: width of the MLP's hidden layer, divided by `dim`.
        norm: implementation of BatchNorm and leaky_relu, as in `NormAct`.
        mlp_norm: what stands between the linear layers: `batch` (BatchNorm, leaky_relu) or `none` (GELU).

    `forward(images)` takes `(N, in_channels, image_size, image_size)` and returns logits
    `(N, num_classes)`. The state_dict keys, and the initial weights after the same
    `torch.manual_seed`, do not depend on `norm`.

    Raises:
        ValueError: an argument is invalid; the message has its name and the valid values.
    """

    def __init__(
        self,
        *,
        image_size: int,
        in_channels: int,
        num_classes: int,
        stem_channels: Sequence[int],
        stem_strides: Sequence[int],
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_ratio: int = 4,
        norm: str = "inplace-abn-sync",
        mlp_norm: str = "batch",
    ) -> None:
        super().__init__()
        if mlp_norm not in MLP_NORMS:
            raise ValueError(f"ViT: mlp_norm must be one of {', '.join(MLP_NORMS)}, got {mlp_norm!r}")
        if len(stem_channels) != len(stem_strides):
            raise ValueError(
                f"ViT: stem_channels and stem_strides must have the same length, "
                f"got {len(stem_channels)} and {len(stem_strides)}"
            )
        if dim % heads:
            raise ValueError(f"ViT: dim must be a multiple of heads, got dim {dim} and heads {heads}")
        num_positions = image_size  # along a side of the image, after the stem's convolutions
        for stride in stem_strides:
            num_positions = (num_positions - 1) // stride + 1
        if num_positions % patch:
            raise ValueError(
                f"ViT: patch must divide the {num_positions} positions after the stem, got {patch}"
            )
        self.stem = Stem(in_channels, stem_channels, stem_strides, patch, dim, norm)
        self.position = nn.Parameter(torch.empty(1, (num_positions // patch) ** 2, dim))
        self.blocks = nn.Sequential(
            *(Block(dim, heads, mlp_ratio * dim, norm, mlp_norm) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Returns names of parameters that get no weight decay, besides vectors. timm has the same method."""
        return {"position"}

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images) + self.position
        x = self.blocks(x)
        return self.head(self.norm(x).mean(dim=1))


_VARIANT_FIELDS = ("stem_channels", "stem_strides", "patch", "dim", "depth", "heads")
_VARIANTS: dict[str, tuple[Any, ...]] = {  # The tuples have the values of _VARIANT_FIELDS.
    # This stem has no strides, since digits have 8x8 pixels only.
    "vit_digits": ((32, 32, 64), (1, 1, 1), 2, 64, 4, 4),
    "vit_cifar": ((64, 64, 128), (1, 1, 2), 2, 192, 9, 3),
    # These variants have DeiT's sizes. The stem reduces 224 pixels to 14 tokens along each side.
    "vit_tiny": ((24, 48, 96, 192), (2, 2, 2, 2), 1, 192, 12, 3),
    "vit_small": ((48, 96, 192, 384), (2, 2, 2, 2), 1, 384, 12, 6),
    "vit_base": ((96, 192, 384, 768), (2, 2, 2, 2), 1, 768, 12, 12),
}

VARIANTS = tuple(_VARIANTS)
"""The values of the argument `name` of `create_vit`."""


def create_vit(
    name: str,
    image_size: int,
    in_channels: int = 3,
    num_classes: int = 1000,
    norm: str = "inplace-abn-sync",
    mlp_norm: str = "batch",
) -> ViT:
    """Returns a ViT by its name: `(N, in_channels, image_size, image_size)` -> `(N, num_classes)`.

    `vit_digits` is meant for 8 pixels (247 thousand weights), `vit_cifar` for 32, `vit_tiny`,
    `vit_small` and `vit_base` for 224. Each takes every image size that its strides and patches divide.

    Raises:
        ValueError: the name is unknown, or strides and patches do not divide the image size.
    """
    if name not in _VARIANTS:
        raise ValueError(f"create_vit: name must be one of {', '.join(VARIANTS)}, got {name!r}")
    return ViT(
        image_size=image_size,
        in_channels=in_channels,
        num_classes=num_classes,
        norm=norm,
        mlp_norm=mlp_norm,
        **dict(zip(_VARIANT_FIELDS, _VARIANTS[name], strict=True)),
    )


def vit_digits(norm: str = "inplace-abn-sync", mlp_norm: str = "batch") -> ViT:
    """Returns the ViT for scikit-learn's digits: `(N, 1, 8, 8)` -> `(N, 10)`, with 247 thousand weights."""
    return create_vit("vit_digits", 8, 1, 10, norm, mlp_norm)
