"""CIFAR-10 and CIFAR-100 from the files that their authors publish, the Python version or the binary one.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The Python version consists of
pickles. The unpickler here allows arrays, lists and strings only, so an untrusted file cannot run code.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import ConfigError

__all__ = ["read_cifar"]

IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    classes: int
    python_folder: str
    binary_folder: str
    train: tuple[str, ...]  # without binary's .bin
    test: str
    label_key: bytes
    label_bytes: int  # before each binary image; the last one is the label
    names_file: tuple[str, str]  # of the Python version and of the binary version
    names_key: bytes


LAYOUTS = {
    "cifar10": _Layout(
        10, "cifar-10-batches-py", "cifar-10-batches-bin", tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch", b"labels", 1, ("batches.meta", "batches.meta.txt"), b"label_names",
    ),
    "cifar100": _Layout(
        100, "cifar-100-python", "cifar-100-binary", ("train",),
        "test", b"fine_labels", 2, ("meta", "fine_label_names.txt"), b"fine_label_names",
    ),
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
    layout = LAYOUTS[name]
    for folder in (Path(path), Path(path) / layout.python_folder, Path(path) / layout.binary_folder):
        for suffix, read in (("", _read_python), (".bin", _read_binary)):
            if (folder / (layout.test + suffix)).is_file():
                train = [read(folder / (part + suffix), layout) for part in layout.train]
                joined = torch.cat([part[0] for part in train]), torch.cat([part[1] for part in train])
                test = read(folder / (layout.test + suffix), layout)
                return joined, test, _names(folder, layout)
    raise ConfigError(
        f"--data-path must hold {layout.python_folder} or {layout.binary_folder} for --data {name}, "
        f"got {path}"
    )


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise ConfigError(f"--data-path: {path} is cut off or no file of CIFAR: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--data-path: {path} is no file of CIFAR: it holds a {type(content).__name__}")
    return content


def _read_python(path: Path, layout: _Layout) -> tuple[Tensor, Tensor]:
    content = _unpickle(path)
    images, labels = content.get(b"data"), content.get(layout.label_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or not isinstance(labels, list):
        raise ConfigError(f"--data-path: {path} has no images and {layout.label_key.decode()} of CIFAR")
    return _checked(path, images, np.asarray(labels, dtype=np.int64), layout)


def _read_binary(path: Path, layout: _Layout) -> tuple[Tensor, Tensor]:
    content, record = np.fromfile(path, dtype=np.uint8), layout.label_bytes + IMAGE_BYTES
    if content.size == 0 or content.size % record:
        raise ConfigError(f"--data-path: {path} is cut off: {content.size} bytes are no multiple of {record}")
    rows = content.reshape(-1, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int64)
    return _checked(path, rows[:, layout.label_bytes :], labels, layout)


def _checked(path: Path, images: np.ndarray, labels: np.ndarray, layout: _Layout) -> tuple[Tensor, Tensor]:
    if images.ndim != 2 or images.shape != (len(labels), IMAGE_BYTES):
        raise ConfigError(
            f"--data-path: {path} must hold {IMAGE_BYTES} bytes for each of its {len(labels)} labels, "
            f"got an array {images.shape}"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < layout.classes:
        raise ConfigError(
            f"--data-path: the labels in {path} must be below {layout.classes}, got {labels.max()}; "
            f"cifar10 and cifar100 have different files"
        )
    return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels)


def _names(folder: Path, layout: _Layout) -> tuple[str, ...]:
    """Names of the classes; their numbers when the file with the names is missing."""
    python, binary = (folder / name for name in layout.names_file)
    names: list[str] = []
    if python.is_file():
        names = [name.decode() for name in _unpickle(python).get(layout.names_key, [])]
    elif binary.is_file():
        names = binary.read_text().split()
    return tuple(names) if len(names) == layout.classes else tuple(map(str, range(layout.classes)))
