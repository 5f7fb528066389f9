"""One folder of images for each class, read with PIL: the layout of torchvision.ImageFolder."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile
from torch import Tensor

from .config import ConfigError
from .loaders import ImageDataset, normalise

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Thumbnails, bins and snapshots of Synology, QNAP, macOS and Windows.
SYSTEM_FOLDERS = set("@eaDir @__thumb @Recycle #recycle #snapshot __MACOSX $RECYCLE.BIN lost+found".split())
IMAGENET_MEAN_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BORDER = 0.0625  # what a test crop leaves out at each side
AREA = (0.08, 1.0)  # area of a training crop over the area of the image
RATIO = (3 / 4, 4 / 3)  # width over height of a training crop


class ImageFolder(ImageDataset):
    """The images of `folder/<class>/...`, of `size` pixels; classes are numbered in the order of their names.

    Training crops are drawn as in Szegedy et al., arXiv:1409.4842: an area, a ratio, a position, and whether
    to mirror. Test images are scaled and cropped in the middle. Of 16 bits the upper 8 are read.

    Links to folders are followed. Images and folders with a dot before their names (`.ipynb_checkpoints`,
    `._x.jpg`), and the `SYSTEM_FOLDERS`, are left out; `left_out` counts them by name.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not folder.is_dir():
            raise ConfigError(f"--data-path: {folder} is no folder; train, and val or test, are expected")
        self.folder, self.size = folder, size
        self.left_out: Counter[str] = Counter()
        self.classes = tuple(self._keep(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())))
        if not self.classes:
            raise ConfigError(f"--data-path: {folder} has no folders, one for each class")
        self.paths: list[str] = []
        labels = []
        for label, name in enumerate(self.classes):
            found = self._images(folder / name)
            if not found:
                raise ConfigError(f"--data-path: {folder / name} has no images ({' '.join(SUFFIXES)})")
            self.paths += found
            labels += [label] * len(found)
        self.labels = torch.tensor(labels)

    def _keep(self, names: Sequence[str]) -> list[str]:
        """The names that are not left out."""
        out = {name for name in names if name.startswith(".") or name in SYSTEM_FOLDERS}
        self.left_out.update(out)
        return [name for name in names if name not in out]

    def _images(self, folder: Path) -> list[str]:
        found = []
        for parent, inner, files in os.walk(folder, followlinks=True):
            above = [Path(parent).resolve(), *Path(parent).resolve().parents]
            # A link to a folder that the link is in is not walked.
            inner[:] = [name for name in self._keep(inner) if Path(parent, name).resolve() not in above]
            images = self._keep([name for name in files if name.lower().endswith(SUFFIXES)])
            found += [os.path.join(parent, name) for name in images]
        return sorted(found)

    def read(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        return torch.stack([self._read(self.paths[index], generator) for index in indices])

    def _read(self, path: str, generator: torch.Generator | None) -> Tensor:
        try:
            with Image.open(path) as file:
                image = _eight_bits(file, path).convert("RGB")
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:  # a damaged file may raise any exception
            raise OSError(f"{path} is damaged: {error}") from error
        size, bilinear = (self.size, self.size), Image.Resampling.BILINEAR
        if generator is None:
            image = ImageOps.fit(image, size, bilinear, bleed=BORDER)
        else:
            image = image.resize(size, bilinear, box=_random_box(*image.size, generator))
            if torch.rand((), generator=generator) < 0.5:
                image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return normalise(pixels, *IMAGENET_MEAN_STD)


def _eight_bits(image: Image.Image, path: str) -> Image.Image:
    """The image with 8 bits a channel. PIL's `convert` cuts more off at 255, which leaves white."""
    # PIL's names for 16 bits of grey; "I" is 16 bits in PGM and older PILs' PNG, and any integer in TIFF.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        depth = image.tag_v2.get(BITSPERSAMPLE, (16,))[0] if isinstance(image, TiffImageFile) else 16
        return Image.fromarray((np.asarray(image) >> (depth - 8)).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ConfigError(
            f"--data-path: {path} has numbers of 32 bits, whose range is not known; save it with 8 or 16 bits"
        )
    return image


def _random_box(width: int, height: int, generator: torch.Generator) -> tuple[float, float, float, float]:
    area, ratio, x, y = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    area = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
    low, high = (math.log(bound) for bound in RATIO)
    ratio = math.exp(low + ratio * (high - low))
    # A box larger than the image is cut to it, so that no draw is rejected.
    wide, high_ = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = x * (width - wide), y * (height - high_)
    return left, top, left + wide, top + high_
