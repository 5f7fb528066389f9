"""Loads the data sets of `--data`, and augments their training images."""

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

from .config import Config, ConfigError, abbreviate
from .loaders import ImageDataset, normalize_pixels

CIFAR_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR10_TRAIN_FILES = [f"data_batch_{i}" for i in range(1, 6)]
# Tuples of: the archive's folder, training files, test file, key of the labels, file and key of class names
CIFAR_FILES = {
    "cifar10": (
        "cifar-10-batches-py",
        CIFAR10_TRAIN_FILES,
        "test_batch",
        b"labels",
        "batches.meta",
        b"label_names",
    ),
    "cifar100": ("cifar-100-python", ["train"], "test", b"fine_labels", "meta", b"fine_label_names"),
}
Augment = Callable[..., Tensor]  # Takes images `(N, C, H, W)` and `generator=`, and returns images.


@dataclass(frozen=True)
class TrainTestData:
    """The training and test images of one data set."""

    train: ImageDataset
    test: ImageDataset
    classes: tuple[str, ...]  # the name of each label
    shape: tuple[int, int, int]  # C, H, W
    ignored: tuple[str, ...] = ()  # the counts of ignored names, as in "2 x .cache"


@dataclass(eq=False)
class InMemoryDataset(ImageDataset):
    """Images in one tensor: uint8 with a mean and std to normalize by, or fp32 as the model takes them."""

    images: Tensor
    labels: Tensor
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    augment: Augment | None = None

    def read_batch(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        images = self.images[indices]
        if self.mean_std:
            images = normalize_pixels(images, *self.mean_std)
        return self.augment(images, generator=generator) if generator and self.augment else images


class SyntheticDataset(ImageDataset):
    """Generated images: the pattern of the class, plus noise that depends on the index alone."""

    NOISE_FIELDS = 64  # Few fields save memory. The noise repeats after so many indices.

    def __init__(self, num_images: int, classes: int, size: int, seed: int, first_index: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(classes, 3, size, size, generator=generator)
        self.noise = torch.randn(self.NOISE_FIELDS, 3, size, size, generator=generator)
        self.labels = torch.randint(0, classes, (first_index + num_images,), generator=generator)
        self.labels = self.labels[first_index:]
        self.first_index = first_index

    def read_batch(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        noise_indices = (torch.tensor(indices) + self.first_index) % self.NOISE_FIELDS
        return 0.5 * self.patterns[self.labels[indices]] + self.noise[noise_indices]


def load_datasets(config: Config) -> TrainTestData:
    """Returns the training and test images of `--data`."""
    if config.data == "digits":
        return load_digits(config.data_seed)
    if config.data == "folder":
        return _load_folder(config)
    return _make_synthetic(config) if config.data == "synthetic" else _load_cifar(config)


def load_digits(seed: int) -> TrainTestData:
    """Returns scikit-learn's 1797 digits, split at random into 1438 for training and 359 for test.

    Images are fp32 `(N, 1, 8, 8)` in [-1, 1]. The same seed gives the same split everywhere. Training images
    are shifted by up to a pixel.
    """
    # sklearn.datasets.load_digits reads this file; importing sklearn takes as long as importing torch.
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[misc,union-attr]
    digits = torch.from_numpy(np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", delimiter=","))
    # Digits have the grey levels 0 to 16.
    images = digits[:, :64].view(-1, 1, 8, 8).to(torch.float32) / 8 - 1
    labels = digits[:, 64].to(torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(images) // 5])
    shift = functools.partial(random_shift, pixels=1, background=-1.0)
    train_set = InMemoryDataset(images[train], labels[train], augment=shift)
    test_set = InMemoryDataset(images[test], labels[test])
    return TrainTestData(train_set, test_set, tuple("0123456789"), (1, 8, 8))


def _load_cifar(config: Config) -> TrainTestData:
    """Reads the Python version of CIFAR's files, in `--data-path` or in the folder that they unpack to.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    archive_dir, train_files, test_file, labels_key, names_file, names_key = CIFAR_FILES[config.data]
    path = Path(config.data_path)
    folder = path / archive_dir if (path / archive_dir).is_dir() else path
    if not (folder / test_file).is_file():
        raise ConfigError(f"--data-path must hold {archive_dir} for --data {config.data}, got {path}")

    def read_files(files: list[str], augment: Augment | None = None) -> InMemoryDataset:
        contents = [_read_cifar_file(folder / file, labels_key, len(names)) for file in files]
        pixels, labels = zip(*contents, strict=True)
        return InMemoryDataset(torch.cat(pixels), torch.cat(labels), CIFAR_MEAN_STD, augment)

    names = tuple(label.decode() for label in _read_pickle_keys(folder / names_file, names_key)[0])
    return TrainTestData(
        read_files(train_files, _shift_and_flip), read_files([test_file]), names, (3, 32, 32)
    )


class _Unpickler(pickle.Unpickler):
    """Allows arrays, lists and strings only, so that a file cannot run code."""

    # numpy._core is numpy 2's name; pickle's protocol 5 uses _frombuffer.
    ALLOWED = (
        r"numpy\.(ndarray|dtype|_?core\.(multiarray\._reconstruct|numeric\._frombuffer))|_codecs\.encode"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not re.fullmatch(self.ALLOWED, f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of CIFAR")
        return super().find_class(module, name)


def _read_pickle_keys(path: Path, *keys: bytes) -> list[Any]:
    """Returns the values of `keys` in a pickled dict."""
    file_bytes = path.read_bytes()
    try:
        content = _Unpickler(io.BytesIO(file_bytes), encoding="bytes").load()
        return [content[key] for key in keys]
    except Exception as error:  # A damaged pickle may raise any exception.
        raise ConfigError(
            f"--data-path: {path} is cut off or no file of CIFAR, copy it again: {error}"
        ) from None


def _read_cifar_file(path: Path, key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    """Returns uint8 images `(N, 3, 32, 32)` and their int64 labels `(N,)`."""
    pixels, labels = (np.asarray(values) for values in _read_pickle_keys(path, b"data", key))
    is_valid = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32)
    if not is_valid or not 0 <= labels.min() <= labels.max() < classes:
        raise ConfigError(
            f"--data-path: {path} must hold 3072 bytes and a label below {classes} for each image"
        )
    return torch.tensor(pixels).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _load_folder(config: Config) -> TrainTestData:
    from .image_folder import ImageFolder

    size, path = config.image_size, Path(config.data_path)
    assert size is not None  # Config sets a default for --data folder.
    test_dir = path / ("val" if (path / "val").is_dir() else "test")
    train, test = ImageFolder(path / "train", size), ImageFolder(test_dir, size)
    if train.classes != test.classes:
        unmatched = sorted(set(train.classes) ^ set(test.classes))
        raise ConfigError(
            f"--data-path {config.data_path}: {train.folder.name} and {test.folder.name} must hold the same "
            f"classes; {abbreviate(unmatched)} are in one of them only"
        )
    ignored = sorted((train.ignored + test.ignored).items())
    names = tuple(f"{count} x {name}" for name, count in ignored)
    return TrainTestData(train, test, train.classes, (3, size, size), names)


def _make_synthetic(config: Config) -> TrainTestData:
    classes, size, num_images = config.classes or 10, config.image_size, config.synthetic_images
    assert size is not None  # Config sets a default for --data synthetic.
    train = SyntheticDataset(num_images, classes, size, config.data_seed)
    test = SyntheticDataset(max(1, num_images // 4), classes, size, config.data_seed, first_index=num_images)
    return TrainTestData(train, test, tuple(f"pattern {n}" for n in range(classes)), (3, size, size))


def random_shift(images: Tensor, pixels: int, generator: torch.Generator, background: float = 0.0) -> Tensor:
    """Shifts each image of `(N, C, H, W)` by up to `pixels` along each axis; new pixels are `background`."""
    n, _, height, width = images.shape
    padded = F.pad(images, [pixels] * 4, value=background)
    # A view (N, C, row, column, H, W) of all windows
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    rows, columns = torch.randint(0, 2 * pixels + 1, (2, n), generator=generator)
    return windows[torch.arange(n), :, rows, columns]


def _shift_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    return random_flip(random_shift(images, 4, generator), generator)


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a new tensor in which half of the images `(N, C, H, W)`, at random, are mirrored."""
    is_flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(is_flipped, images.flip(3), images)
