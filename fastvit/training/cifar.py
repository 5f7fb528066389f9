"""CIFAR-10 and CIFAR-100 from the Python version of the files that their authors publish.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The unpickler here allows arrays,
lists and strings only, so an untrusted file cannot run code.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import ConfigError

__all__ = ["read_cifar"]

# Folder, files for training and test, key of the labels, file and key of the names.
FILES = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", b"labels",
                "batches.meta", b"label_names"),
    "cifar100": ("cifar-100-python", ["train"], "test", b"fine_labels", "meta", b"fine_label_names"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    ALLOWED = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of CIFAR")
        return super().find_class(module, name)


def read_cifar(path: str, name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]:
    """Images `(N, 3, 32, 32)` uint8 and labels `(N,)` int64 for training and test, and the class names.

    Args:
        path: the unpacked folder, or its parent.
        name: `cifar10` or `cifar100`.

    Raises:
        OSError: a file is missing or cannot be read.
        ConfigError: there is no such folder, or a file has another content.
    """
    inner, train, test, key, names_file, names_key = FILES[name]
    folder = Path(path) / inner if (Path(path) / inner).is_dir() else Path(path)
    if not (folder / test).is_file():
        raise ConfigError(f"--data-path must hold {inner} for --data {name}, got {path}")
    names = tuple(label.decode() for label in _read(folder / names_file, names_key)[0])
    parts = {part: _images(folder / part, key, len(names)) for part in (*train, test)}
    images, labels = (torch.cat(tensors) for tensors in zip(*(parts[part] for part in train), strict=True))
    return (images, labels), parts[test], names


def _read(path: Path, *keys: bytes) -> list[Any]:
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return [content[key] for key in keys]
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise ConfigError(f"--data-path: {path} is cut off or no file of CIFAR: {error}") from None


def _images(path: Path, key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    pixels, labels = (np.asarray(values) for values in _read(path, b"data", key))
    right = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32)
    if not right or not 0 <= labels.min() <= labels.max() < classes:
        raise ConfigError(f"--data-path: {path} must hold 3072 bytes and a label below {classes} by image")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))
