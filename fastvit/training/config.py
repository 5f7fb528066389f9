"""The configuration of a run: one frozen dataclass, from which flags and files are read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..models import MLP_NORMS, NORMS, VARIANTS

DATA = ("digits", "cifar10", "cifar100", "folder", "synthetic")
MEMORY = ("off", "convert", "products")
AMP_LEVELS = ("off", "bf16", "O0", "O1", "O2", "O3")
ALL_NORMS = (*NORMS[:2], "apex-sync", *NORMS[2:])
BASE_LR = {"sgd": 0.05, "adamw": 1e-3, "fused-adam": 1e-3}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05, "fused-adam": 0.05}

MANY = 2**31 - 1
LIMITS = {  # smallest and largest value of every whole number
    **dict.fromkeys(("epochs", "batch_size", "accumulate", "keep"), (1, MANY)),
    **dict.fromkeys(("warmup_epochs", "stop_after"), (0, MANY)),
    "image_size": (1, 2**13), "classes": (1, 10**6), "synthetic_images": (1, 10**7),
    **dict.fromkeys(("workers", "threads"), (0, 1024)),  # more may exhaust the system
    **dict.fromkeys(("seed", "data_seed"), (0, 2**63 - 1)),  # torch takes 64 bits, and epochs add to the seed
}  # fmt: skip
LONGEST_WAIT = 2_000_000  # seconds; poll(), used for workers, takes 31 bits of milliseconds


class ConfigError(ValueError):
    """An option has an invalid value; the message has its name, its value and valid values."""


class TrainingError(RuntimeError):
    """An error that ends the run. Every rank raises it with the same message at the same point."""


def _option(default: Any, group: str, help: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """The options of a run. Each field is a flag and a key of the TOML file.

    `batch_size` is `--batch-size` on the command line and `batch_size = 32` in the file. `None` is replaced
    by a value that depends on other options, so that a saved configuration has every number.
    """

    # fmt: off
    data: str = _option("digits", "data", "digits: scikit-learn's; cifar10, cifar100: local files; folder: "
        "train/ and val/ with a folder of images for each class; synthetic: generated", DATA)
    data_path: str = _option("", "data", "folder with the files of cifar10, cifar100 or folder")
    data_seed: int = _option(0, "data", "seed of the 80/20 split of digits, and of the synthetic images")
    image_size: int | None = _option(None, "data", "side of folder's (224) or synthetic (32) images")
    synthetic_images: int = _option(2048, "data", "number of synthetic training images")
    classes: int | None = _option(None, "data", "outputs of the model (default: the classes of the data)")
    workers: int = _option(None, "data", "processes that load batches (default 0, for folder 4)")

    model: str = _option("auto", "model", f"{', '.join(VARIANTS)}, or timm/<name>; auto: by the images' size")
    norm: str = _option(None, "model", "BatchNorm layer (default inplace-abn-sync, for timm/ "
        "fastvit-sync); torch-sync needs CUDA, apex-sync NVIDIA apex 25.05", ALL_NORMS)
    mlp_norm: str = _option("batch", "model", "in the MLPs: GELU, or BatchNorm, leaky_relu", MLP_NORMS)
    pretrained: str = _option("", "model", "initial weights: a file of safetensors or torch.save, or "
        "'timm' for those that timm downloads")
    memory: str = _option("off", "model", f"keep less for backward: {', '.join(MEMORY)} (matrix products are "
        "repeated too), or budget=0.2, 2GiB or least, the cheapest way to it; as in fastvit.convert")
    freeze: tuple[str, ...] = _option((), "model", "names of parameters that are not trained: 'stem.*'")

    amp: str = _option("off", "precision", "off: fp32; bf16: autocast; O0 to O3: as in apex", AMP_LEVELS)
    loss_scale: str = _option("auto", "precision", "of O0 to O3: dynamic, a number, or auto: by the level")

    epochs: int = _option(30, "recipe", "epochs of the whole schedule")
    batch_size: int = _option(32, "recipe", "images per rank in one forward")
    accumulate: int = _option(1, "recipe", "batches whose gradients make one step")
    optimizer: str = _option("adamw", "recipe", "sgd has momentum 0.9; fused-adam as in apex", tuple(BASE_LR))
    lr: float = _option(None, "recipe", "largest learning rate of the schedule, for one rank and "
        "accumulate 1 (default 0.05 for sgd, else 0.001)")
    scale_lr: bool = _option(True, "recipe", "multiply lr by the number of ranks and by accumulate")
    weight_decay: float = _option(None, "recipe", "of matrices and kernels; vectors have none "
        "(default 5e-4 for sgd, else 0.05)")
    warmup_epochs: int = _option(3, "recipe", "epochs of linear warm-up, before half a cosine to 0")
    clip_norm: float = _option(0.0, "recipe", "largest norm of all gradients together; 0: not clipped")
    label_smoothing: float = _option(0.0, "recipe", "share of each label that is spread over all classes")
    ema: float = _option(0.0, "recipe", "decay of a moving average of the weights; 0: none")
    seed: int = _option(0, "recipe", "seed of the initial weights, the order of images and the augmentation")
    deterministic: bool = _option(False, "recipe", "use only operations that give the same bits in every run")

    device: str = _option("auto", "machine", "auto: CUDA when all ranks have a GPU", ("auto", "cpu", "cuda"))
    threads: int = _option(0, "machine", "CPU threads of each rank; 0 shares the cores among the ranks")
    timeout: float = _option(300.0, "machine", "seconds after which a rank that waits for another gives up")
    channels_last: bool = _option(False, "machine", "images and kernels in torch's channels_last format")
    compile: bool = _option(False, "machine", "compile the model with torch.compile")

    out: str = _option("runs/train", "run", "directory of the run: config, metrics, TensorBoard, checkpoints")
    resume: str = _option("", "run", "continue this run or checkpoint; auto: the run in --out, if any")
    stop_after: int = _option(0, "run", "end after this many epochs of this start, for --resume; 0: none")
    keep: int = _option(2, "run", "number of newest checkpoints that are not removed, besides the best one")
    # fmt: on

    def __post_init__(self) -> None:
        self._fill_in()
        for item in fields(self):
            name, value, choices = item.name, getattr(self, item.name), item.metadata["choices"]
            if choices:
                _require(value in choices, name, f"one of {', '.join(choices)}", repr(value))
            if name in LIMITS and value is not None:
                low, high = LIMITS[name]
                _require(value >= low, name, f"at least {low}", value)
                _require(value <= high, name, f"at most {high}", value)
        for name in ("weight_decay", "clip_norm"):
            _require(0 <= getattr(self, name) < math.inf, name, "at least 0", getattr(self, name))
        _require(0 < self.lr < math.inf, "lr", "above 0", self.lr)
        _require(0 < self.timeout <= LONGEST_WAIT, "timeout", f"above 0, up to {LONGEST_WAIT}", self.timeout)
        for name in ("label_smoothing", "ema"):
            _require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1", getattr(self, name))
        self._check_combinations()

    def _fill_in(self) -> None:
        chosen = {
            "norm": "fastvit-sync" if self.model.startswith("timm/") else "inplace-abn-sync",
            "lr": BASE_LR.get(self.optimizer),
            "weight_decay": WEIGHT_DECAY.get(self.optimizer),
            "workers": 4 if self.data == "folder" else 0,
            "image_size": {"folder": 224, "synthetic": 32}.get(self.data),
        }
        for name, value in chosen.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        timm = self.model.startswith("timm/")
        takes = f"auto, one of {', '.join(VARIANTS)}, or timm/<name>"
        _require(timm or self.model in ("auto", *VARIANTS), "model", takes, repr(self.model))
        if self.data in ("cifar10", "cifar100", "folder") and not self.data_path:
            raise ConfigError(f"--data {self.data} needs --data-path, the folder with its files")
        takes = f"one of {', '.join(MEMORY)}, or budget=<share or bytes>"
        right = self.memory in MEMORY or self.memory.startswith("budget=")
        _require(right, "memory", takes, repr(self.memory))
        if self.loss_scale not in ("auto", "dynamic"):
            try:
                right = 0 < float(self.loss_scale) < math.inf
            except ValueError:
                right = False
            _require(right, "loss_scale", "auto, dynamic or a number above 0", self.loss_scale)
        made = ("folder", "synthetic")
        for name, given, has_effect, where in (
            ("image_size", self.image_size is not None, self.data in made, "--data folder and synthetic"),
            ("loss_scale", self.loss_scale != "auto", self.amp.startswith("O"), "--amp O0 to O3"),
            ("pretrained", self.pretrained == "timm", timm, "--model timm/<name>"),
            ("mlp_norm", self.mlp_norm != "batch", not timm, "fastvit's models"),
            # torch.compile chooses what is kept for backward
            ("memory", self.memory != "off", not self.compile, "models that are not compiled"),
        ):
            if given and not has_effect:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is for {where}")

    def save(self, path: Path) -> None:
        """Write the fields as TOML, which `--config` reads; fields that are None are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # Strings, booleans, numbers and lists of strings are the same in JSON and TOML.
        given = {name: json.dumps(v, ensure_ascii=False) for name, v in values.items() if v is not None}
        path.write_text("".join(f"{name} = {text}\n" for name, text in given.items()), encoding="utf-8")


def check_packages(config: Config) -> None:
    """Raise ConfigError with the names of all missing packages, before a run starts."""
    needed = {"numpy": "numpy", "tensorboard": "tensorboard", "tqdm": "tqdm"}  # by module
    needed |= {"digits": {"sklearn": "scikit-learn"}, "folder": {"PIL": "pillow"}}.get(config.data, {})
    if config.model.startswith("timm/"):
        needed["timm"] = "timm"
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the trainer needs {', '.join(missing)}, which is not installed: pip install 'fastvit[train]'"
            + (" timm" if "timm" in missing else "")
        )


def flag(name: str) -> str:
    """`batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its kind."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def some(names: Iterable[object]) -> str:
    """The first few of the names, for a message."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _require(holds: bool, name: str, takes: str, got: object) -> None:
    # A comparison with nan is false, so nan is refused too.
    if not holds:
        raise ConfigError(f"{flag(name)} must be {takes}, got {got}")
