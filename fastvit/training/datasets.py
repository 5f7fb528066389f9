"""Data sets: reads batches of images and labels, and augments them."""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Config, ConfigError, some
from .loaders import ImageDataset, normalise

CIFAR_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
# Folder, files for training and test, key of the labels, file and key of the names.
CIFAR_FILES = {
    "cifar10": ("cifar-10-batches-py", BATCHES, "test_batch", b"labels", "batches.meta", b"label_names"),
    "cifar100": ("cifar-100-python", ["train"], "test", b"fine_labels", "meta", b"fine_label_names"),
}
Augment = Callable[..., Tensor]  # of images and a generator


@dataclass(frozen=True)
class DataSets:
    """Training and test images of one data set."""

    train: ImageDataset
    test: ImageDataset
    classes: tuple[str, ...]  # name of each label
    shape: tuple[int, int, int]  # C, H, W
    left_out: tuple[str, ...] = ()  # files and folders of images, by name and number


@dataclass(eq=False)
class InMemory(ImageDataset):
    """Images in one tensor: uint8 with the mean and std of pixels, or fp32 as the model takes them."""

    images: Tensor
    labels: Tensor
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    augment: Augment | None = None

    def read(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        images = self.images[indices]
        if self.normalisation:
            images = normalise(images, *self.normalisation)
        return self.augment(images, generator=generator) if generator and self.augment else images


class Synthetic(ImageDataset):
    """Generated images: the pattern of the class plus noise; the same for the same index."""

    NOISE_FIELDS = 64

    def __init__(self, count: int, classes: int, size: int, seed: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(classes, 3, size, size, generator=generator)
        self.noise = torch.randn(self.NOISE_FIELDS, 3, size, size, generator=generator)
        self.labels = torch.randint(0, classes, (first + count,), generator=generator)[first:]
        self.first = first

    def read(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        fields = (torch.tensor(indices) + self.first) % self.NOISE_FIELDS
        return 0.5 * self.patterns[self.labels[indices]] + self.noise[fields]


def load(config: Config) -> DataSets:
    """The data set that the configuration names."""
    if config.data == "digits":
        return load_digits(config.data_seed)
    if config.data == "folder":
        return _load_folder(config)
    return _make_synthetic(config) if config.data == "synthetic" else _load_cifar(config)


def load_digits(seed: int) -> DataSets:
    """The 1797 digits that come with scikit-learn, split at random into 1438 for training and 359 for test.

    Images `(N, 1, 8, 8)` fp32 in [-1, 1]. The same seed gives the same split everywhere. Training images
    move by up to a pixel.
    """
    # The file that sklearn.datasets.load_digits reads; importing sklearn takes as long as importing torch.
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[misc,union-attr]
    digits = torch.from_numpy(np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", delimiter=","))
    images = digits[:, :64].view(-1, 1, 8, 8).to(torch.float32) / 8 - 1  # 16 grey levels
    labels = digits[:, 64].to(torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(images) // 5])
    shift = functools.partial(random_shift, pixels=1, background=-1.0)
    training = InMemory(images[train], labels[train], augment=shift)
    return DataSets(training, InMemory(images[test], labels[test]), tuple("0123456789"), (1, 8, 8))


def _load_cifar(config: Config) -> DataSets:
    """The Python version of the files that the authors publish, in `--data-path` or the folder that they
    unpack to: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    inner, train, test, key, names_file, names_key = CIFAR_FILES[config.data]
    path = Path(config.data_path)
    folder = path / inner if (path / inner).is_dir() else path
    if not (folder / test).is_file():
        raise ConfigError(f"--data-path must hold {inner} for --data {config.data}, got {path}")

    def images(parts: list[str], augment: Augment | None = None) -> InMemory:
        pixels, labels = zip(*(_images(folder / part, key, len(names)) for part in parts), strict=True)
        return InMemory(torch.cat(pixels), torch.cat(labels), CIFAR_MEAN_STD, augment)

    names = tuple(label.decode() for label in _unpickle(folder / names_file, names_key)[0])
    return DataSets(images(train, _shift_and_flip), images([test]), names, (3, 32, 32))


class _Unpickler(pickle.Unpickler):
    """Allows arrays, lists and strings only, so that a file cannot run code."""

    # numpy._core is numpy 2's name; _frombuffer is of pickle's protocol 5.
    ALLOWED = (
        r"numpy\.(ndarray|dtype|_?core\.(multiarray\._reconstruct|numeric\._frombuffer))|_codecs\.encode"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not re.fullmatch(self.ALLOWED, f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of CIFAR")
        return super().find_class(module, name)


def _unpickle(path: Path, *keys: bytes) -> list[Any]:
    stored = path.read_bytes()
    try:
        content = _Unpickler(io.BytesIO(stored), encoding="bytes").load()
        return [content[key] for key in keys]
    except Exception as error:  # a damaged pickle may raise any exception
        raise ConfigError(f"--data-path: {path} is cut off or no file of CIFAR: {error}") from None


def _images(path: Path, key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    pixels, labels = (np.asarray(values) for values in _unpickle(path, b"data", key))
    right = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32)
    if not right or not 0 <= labels.min() <= labels.max() < classes:
        raise ConfigError(f"--data-path: {path} must hold 3072 bytes and a label below {classes} by image")
    return torch.tensor(pixels).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _load_folder(config: Config) -> DataSets:
    from .image_folder import ImageFolder

    size, path = config.image_size, Path(config.data_path)
    assert size is not None  # with --data folder
    held_out = path / ("val" if (path / "val").is_dir() else "test")
    train, test = ImageFolder(path / "train", size), ImageFolder(held_out, size)
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise ConfigError(
            f"--data-path {config.data_path}: {train.folder.name} and {test.folder.name} must hold the same "
            f"classes; {some(odd)} are in one of them only"
        )
    left_out = sorted((train.left_out + test.left_out).items())
    names = tuple(f"{count} x {name}" for name, count in left_out)
    return DataSets(train, test, train.classes, (3, size, size), names)


def _make_synthetic(config: Config) -> DataSets:
    classes, size, count = config.classes or 10, config.image_size, config.synthetic_images
    assert size is not None  # with --data synthetic
    train = Synthetic(count, classes, size, config.data_seed)
    test = Synthetic(max(1, count // 4), classes, size, config.data_seed, first=count)
    return DataSets(train, test, tuple(f"pattern {n}" for n in range(classes)), (3, size, size))


def random_shift(images: Tensor, pixels: int, generator: torch.Generator, background: float = 0.0) -> Tensor:
    """Move each image of `(N, C, H, W)` by up to `pixels` along each axis; new pixels are background."""
    n, _, height, width = images.shape
    padded = F.pad(images, [pixels] * 4, value=background)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, row, column, H, W), a view
    rows, columns = torch.randint(0, 2 * pixels + 1, (2, n), generator=generator)
    return windows[torch.arange(n), :, rows, columns]


def _shift_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    return random_flip(random_shift(images, 4, generator), generator)


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half; `(N, C, H, W)`, a new tensor."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flipped, images.flip(3), images)
