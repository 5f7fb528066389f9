"""The cases of bench_ops.py: activations of convolutional nets and of ViTs."""

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LAYOUTS = ("nchw", "channels_last", "tokens")


@dataclass(frozen=True)
class Case:
    """One activation: (N, C, H, W) in one of torch's memory formats, or tokens (N, L, C)."""

    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def channel_dim(self) -> int:
        return 2 if self.layout == "tokens" else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.size} {self.layout} {self.dtype}"

    def randn(self, device: str) -> torch.Tensor:
        x = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        return x.contiguous(memory_format=torch.channels_last) if self.layout == "channels_last" else x


RESNET = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]  # (C, H = W) of ResNet-50's stages
CONV_STEM = [(48, 112), (96, 56), (192, 28), (384, 14)]  # of a ViT that starts with convolutions


def images(n: int, sizes: list[tuple[int, int]], layouts: tuple[str, ...], dtypes: tuple[str, ...]):
    return [
        Case((n, c, side, side), layout, dtype) for dtype in dtypes for layout in layouts for c, side in sizes
    ]


def tokens(sizes: list[tuple[int, int]], dtypes: tuple[str, ...]):
    return [Case((n, 197, c), "tokens", dtype) for dtype in dtypes for n, c in sizes]


def cases() -> list[Case]:
    """In order of importance: mixed precision first, then float32, small batches, float16."""
    both = ("nchw", "channels_last")
    ordered = [
        *images(128, RESNET[1:4], both, ("bf16",)),
        *tokens([(128, 384), (128, 768)], ("bf16",)),
        *images(128, RESNET[1:4], both, ("fp32",)),
        *images(128, [RESNET[0], RESNET[4]], both, ("bf16", "fp32")),
        *images(8, RESNET[2:], both, ("bf16",)),
        *images(32, RESNET, both, ("bf16",)),
        *tokens([(32, 384), (32, 768), (256, 768)], ("bf16", "fp32")),
        *images(128, CONV_STEM, both, ("bf16",)),
        *images(256, RESNET, both, ("bf16", "fp32")),
        *images(32, RESNET, both, ("fp32",)),
        *images(128, RESNET, both, ("fp16",)),
        *tokens([(128, 384), (128, 768)], ("fp16", "fp32")),
        *images(128, CONV_STEM, both, ("fp32",)),
    ]
    return list(dict.fromkeys(ordered))


def cpu_cases() -> list[Case]:
    """Tokens, channels_last and small planes, of 4 to 13 MB; tokens and planes in the other dtypes too, and
    results of 39 to 103 MB, which are written past the caches.
    """
    both = [
        case
        for dtype in ("fp32", "bf16")
        for case in (
            *tokens([(32, 384)], (dtype,)),
            *images(64, [(320, 10)], ("channels_last", "nchw"), (dtype,)),
            *images(32, [(2048, 7)], ("channels_last", "nchw"), (dtype,)),
            *images(24, [(192, 20)], ("nchw",), (dtype,)),
            *images(16, [(96, 40)], ("channels_last", "nchw"), (dtype,)),
        )
    ]
    others = ("fp16", "fp64")
    large = tokens([(128, 768)], ("fp32", "bf16")) + images(64, [(128, 56)], ("nchw",), ("fp32", "bf16"))
    return [*both, *tokens([(32, 384)], others), *images(16, [(96, 40)], ("nchw",), others), *large]


def quick_cases() -> list[Case]:
    """Small cases for a test of the program; their times are meaningless."""
    return [
        Case((4, 8, 6, 6), "nchw", "fp32"),
        Case((4, 8, 6, 6), "channels_last", "bf16"),
        Case((4, 9, 16), "tokens", "fp32"),
    ]
