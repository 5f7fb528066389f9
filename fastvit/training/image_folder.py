"""`ImageFolder` reads one folder of images for each class, as torchvision's ImageFolder does, with PIL."""

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
from .loaders import ImageDataset, normalize_pixels

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# These folders have thumbnails, bins and snapshots of Synology, QNAP, macOS and Windows.
SYSTEM_FOLDERS = set("@eaDir @__thumb @Recycle #recycle #snapshot __MACOSX $RECYCLE.BIN lost+found".split())
IMAGENET_MEAN_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEST_CROP_BORDER = 0.0625  # The fraction of the side that a test crop cuts off at each end.
TRAIN_CROP_AREA = (0.08, 1.0)  # The least and greatest area of a training crop, divided by the image's.
TRAIN_CROP_RATIO = (3 / 4, 4 / 3)  # The least and greatest width of a training crop, divided by its height.


class ImageFolder(ImageDataset):
    """The images of `folder/<class>/...`, of `size` pixels; classes are numbered in the order of their names.

    Training crops have a random area, ratio and position, and half of them are mirrored: Szegedy et al.,
    arXiv:1409.4842. Test images are scaled and cropped in the middle. Images of 16 bits are reduced to their
    upper 8 bits.

    Links to folders are followed. Images and folders whose names begin with a dot (`.ipynb_checkpoints`,
    `._x.jpg`), and the `SYSTEM_FOLDERS`, are ignored; `ignored` counts them by name.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not folder.is_dir():
            raise ConfigError(f"--data-path: {folder} is no folder; train, and val or test, are expected")
        self.folder, self.size = folder, size
        self.ignored: Counter[str] = Counter()
        self.classes = tuple(
            self._drop_ignored(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
        )
        if not self.classes:
            raise ConfigError(f"--data-path: {folder} must have a folder for each class; none found")
        self.paths: list[str] = []
        labels = []
        for label, name in enumerate(self.classes):
            paths = self._list_images(folder / name)
            if not paths:
                raise ConfigError(f"--data-path: {folder / name} has no images ({' '.join(SUFFIXES)})")
            self.paths += paths
            labels += [label] * len(paths)
        self.labels = torch.tensor(labels)

    def _drop_ignored(self, names: Sequence[str]) -> list[str]:
        """Returns the names that are not ignored, and counts the others."""
        ignored = {name for name in names if name.startswith(".") or name in SYSTEM_FOLDERS}
        self.ignored.update(ignored)
        return [name for name in names if name not in ignored]

    def _list_images(self, folder: Path) -> list[str]:
        """Returns the paths of all images below a folder, sorted."""
        paths = []
        for parent, subfolders, files in os.walk(folder, followlinks=True):
            ancestors = [Path(parent).resolve(), *Path(parent).resolve().parents]
            # A link to a folder that contains the link is not followed.
            names = self._drop_ignored(subfolders)
            subfolders[:] = [name for name in names if Path(parent, name).resolve() not in ancestors]
            images = self._drop_ignored([name for name in files if name.lower().endswith(SUFFIXES)])
            paths += [os.path.join(parent, name) for name in images]
        return sorted(paths)

    def read_batch(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        return torch.stack([self._read_image(self.paths[index], generator) for index in indices])

    def _read_image(self, path: str, generator: torch.Generator | None) -> Tensor:
        try:
            with Image.open(path) as file:
                image = _to_eight_bits(file, path).convert("RGB")
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:  # A damaged file may raise any exception.
            raise OSError(f"{path} is damaged: {error}") from error
        size, bilinear = (self.size, self.size), Image.Resampling.BILINEAR
        if generator is None:
            image = ImageOps.fit(image, size, bilinear, bleed=TEST_CROP_BORDER)
        else:
            image = image.resize(size, bilinear, box=_random_crop_box(*image.size, generator))
            if torch.rand((), generator=generator) < 0.5:
                image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return normalize_pixels(pixels, *IMAGENET_MEAN_STD)


def _to_eight_bits(image: Image.Image, path: str) -> Image.Image:
    """Returns the image with 8 bits a channel. PIL's `convert` would clip 16 bits at 255, which is white."""
    # PIL has modes "I;16..." for 16-bit grey. "I" is 16-bit in PGM and older PILs' PNG, any integer in TIFF.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        depth = image.tag_v2.get(BITSPERSAMPLE, (16,))[0] if isinstance(image, TiffImageFile) else 16
        return Image.fromarray((np.asarray(image) >> (depth - 8)).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ConfigError(
            f"--data-path: {path} has numbers of 32 bits, whose range is unknown; save the "
            "image with 8 or 16 bits"
        )
    return image


def _random_crop_box(
    width: int, height: int, generator: torch.Generator
) -> tuple[float, float, float, float]:
    """Returns the left, top, right and bottom of a random training crop."""
    area, ratio, x, y = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    area = width * height * (TRAIN_CROP_AREA[0] + area * (TRAIN_CROP_AREA[1] - TRAIN_CROP_AREA[0]))
    low, high = (math.log(bound) for bound in TRAIN_CROP_RATIO)
    ratio = math.exp(low + ratio * (high - low))
    # A box that is larger than the image is cut to the image, so that no draw is rejected.
    box_width, box_height = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    x_min, y_min = x * (width - box_width), y * (height - box_height)
    return x_min, y_min, x_min + box_width, y_min + box_height
