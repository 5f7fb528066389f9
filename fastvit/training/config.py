"""`Config` is the configuration of a run. Its fields define the flags, and the keys of TOML files."""

from __future__ import annotations

import contextlib
import json
import math
import typing
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._deprecation import user_stacklevel
from ..conversion.budget import parse_budget
from ..models import MLP_NORMS, NORMS, VARIANTS

DATASET_NAMES = ("digits", "cifar10", "cifar100", "folder", "synthetic")
MEMORY_MODES = ("off", "convert", "matmuls")  # The last one recomputes matrix products too.
# Maps (option, old value) to the new value. An old value works for one release.
OLD_VALUES = {("memory", "products"): "matmuls"}
AMP_LEVELS = ("off", "bf16", "O0", "O1", "O2", "O3")
NORM_NAMES = (*NORMS[:2], "apex-sync", *NORMS[2:])  # Layers of torch and apex come before fastvit's.
BASE_LR = {"sgd": 0.05, "adamw": 1e-3, "fused-adam": 1e-3}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05, "fused-adam": 0.05}

MAX_INT32 = 2**31 - 1
MAX_TIMEOUT_SECONDS = 2_000_000  # Python waits for workers by poll(), whose limit is 2**31 milliseconds.
MIN_POSITIVE = 5e-324  # The least float above 0. As a lower limit it excludes 0.
NUMBER_LIMITS: dict[str, tuple[float, float]] = {  # The least and greatest value by option.
    **dict.fromkeys(("epochs", "batch_size", "accumulate", "keep"), (1, MAX_INT32)),
    **dict.fromkeys(("warmup_epochs", "stop_after"), (0, MAX_INT32)),
    "image_size": (1, 2**13), "classes": (1, 10**6), "synthetic_images": (1, 10**7),
    **dict.fromkeys(("workers", "threads"), (0, 1024)),  # More may exhaust the system.
    **dict.fromkeys(("seed", "data_seed"), (0, 2**63 - 1)),  # seed + epoch fits torch's 64 bits.
    **dict.fromkeys(("weight_decay", "clip_norm"), (0, math.inf)),
    **dict.fromkeys(("label_smoothing", "ema"), (0, math.nextafter(1, 0))),
    "lr": (MIN_POSITIVE, math.inf), "timeout": (MIN_POSITIVE, MAX_TIMEOUT_SECONDS),
}  # fmt: skip


class ConfigError(ValueError):
    """Raised for an invalid option. The message has the option's name, its value and the valid values."""


class TrainingError(RuntimeError):
    """Ends a run. The code that raises it does so on every rank, at the same point, with the same message."""


def _option(default: Any, group: str, help: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """The options of a run. Each field is a flag and a key of the TOML file.

    `batch_size` is `--batch-size` on the command line and `batch_size = 32` in the file. None is replaced by
    a default that depends on other options, always in `norm`, `lr` and `weight_decay`. None stays in
    `classes`, in `workers` for folder, and in `image_size` for data of a fixed size.
    """

    # fmt: off
    data: str = _option("digits", "data", "digits: scikit-learn's; cifar10, cifar100: local files; folder: "
        "train/ and val/ with a folder of images for each class; synthetic: generated", DATASET_NAMES)
    data_path: str = _option("", "data", "folder with the files of cifar10, cifar100 or folder")
    data_seed: int = _option(0, "data", "seed of the 80/20 split of digits, and of the synthetic images")
    image_size: int | None = _option(None, "data", "side of images (default: folder 224, synthetic 32)")
    synthetic_images: int = _option(2048, "data", "number of synthetic training images")
    classes: int | None = _option(None, "data", "outputs of the model (default: the classes of the data)")
    workers: int | None = _option(None, "data", "processes that load batches (default 0; for folder as "
        "many as the rank has cores, up to 4)")

    model: str = _option("auto", "model", f"{', '.join(VARIANTS)}, or timm/<name>; auto: by the images' size")
    norm: str = _option(None, "model", "BatchNorm layer (default inplace-abn-sync, for timm/ "
        "fastvit-sync); torch-sync needs CUDA, apex-sync NVIDIA apex 25.05", NORM_NAMES)
    mlp_norm: str = _option("batch", "model", "in MLPs; none: GELU, batch: BatchNorm, leaky_relu", MLP_NORMS)
    pretrained: str = _option("", "model", "initial weights: a file of safetensors or torch.save, or "
        "'timm' for those that timm downloads")
    memory: str = _option("off", "model", "off; convert: keep less for backward; matmuls: recompute "
        "matrix products too; or a budget of fastvit.convert: a fraction as 0.6, bytes as 2GiB, or least")
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
    label_smoothing: float = _option(0.0, "recipe", "fraction of each label that is spread over all classes")
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
    evaluate: str = _option("", "run", "print loss and accuracy of this run or checkpoint on its test "
        "images, and end")
    stop_after: int = _option(0, "run", "end this process after so many epochs, for --resume; 0: none")
    keep: int = _option(2, "run", "number of newest checkpoints that are not removed, besides the best one")
    # fmt: on

    def __post_init__(self) -> None:
        for name in CONFIG_FIELDS:  # The fields of this class by name, see below.
            object.__setattr__(self, name, check_value(name, getattr(self, name)))
        self._set_dependent_defaults()
        self._check_combinations()

    def _set_dependent_defaults(self) -> None:
        """Replaces None by a default that depends on other options."""
        defaults = {
            "norm": "fastvit-sync" if self.model.startswith("timm/") else "inplace-abn-sync",
            "lr": BASE_LR[self.optimizer],
            "weight_decay": WEIGHT_DECAY[self.optimizer],
            "workers": None if self.data == "folder" else 0,  # make_loader replaces None by the rank's cores.
            "image_size": {"folder": 224, "synthetic": 32}.get(self.data),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        is_timm = self.model.startswith("timm/")
        reads_files = self.data in ("cifar10", "cifar100", "folder")
        expected = f"auto, one of {', '.join(VARIANTS)}, or timm/<name>"
        _check_option(is_timm or self.model in ("auto", *VARIANTS), "--model", expected, self.model)
        if reads_files and not self.data_path:
            raise ConfigError(f"--data {self.data} needs --data-path, the folder with its files")
        # Python turns a byte that is not UTF-8 into a surrogate, which encode() replaces by "?".
        is_utf8 = self.out == self.out.encode(errors="replace").decode()
        _check_option(is_utf8, "--out", "UTF-8, which TensorBoard's files need", self.out)
        _ = self.budget  # This raises ConfigError for an invalid budget.
        if self.loss_scale not in ("auto", "dynamic"):
            scale = parse_text(float, self.loss_scale)
            is_valid = isinstance(scale, float) and 0 < scale < math.inf
            _check_option(is_valid, "--loss-scale", "auto, dynamic or a number above 0", self.loss_scale)
        training_scope = "training; --evaluate ends before it"
        needs_timm = self.pretrained == "timm"  # Any other value is a path, or "".
        # An option without an effect may not be set. Messages are "<flag> <value> is for <scope>".
        for name, has_effect, scope in (
            ("data_path", reads_files, "--data cifar10, cifar100 and folder"),
            ("data_seed", not reads_files, "--data digits and synthetic"),
            ("image_size", self.data in ("folder", "synthetic"), "--data folder and synthetic"),
            ("synthetic_images", self.data == "synthetic", "--data synthetic"),
            ("loss_scale", self.amp.startswith("O"), "--amp O0 to O3"),
            ("pretrained", is_timm or not needs_timm, "--model timm/<name>"),
            ("mlp_norm", not is_timm, "fastvit's models"),
            ("out", not self.evaluate, training_scope),
            ("resume", not self.evaluate, training_scope),
            ("stop_after", not self.evaluate, training_scope),
        ):
            if getattr(self, name) != CONFIG_FIELDS[name].default and not has_effect:
                raise ConfigError(f"{option_flag(name)} {getattr(self, name)} is for {scope}")

    @property
    def budget(self) -> str | float | None:
        """The budget in `memory`, as `fastvit.convert` takes it, or None if `memory` is a mode."""
        if self.memory in MEMORY_MODES:
            return None
        text = self.memory.removeprefix("budget=")
        number = parse_text(int, text)
        budget = number if isinstance(number, int) else parse_text(float, text)
        with contextlib.suppress(ValueError):
            parse_budget(budget)  # It refuses a float above 1: bytes are whole, 2.0 may mean twice the peak.
            return budget
        raise ConfigError(
            f"--memory must be one of {', '.join(MEMORY_MODES)}, or a budget: a fraction "
            f"of at most 1 (budget=0.6), bytes (budget=2GiB) or budget=least; budget= may be left "
            f"out; got {self.memory!r}"
        )

    @property
    def checkpoint_option(self) -> str:
        """The option that names the checkpoint, `--resume` or `--evaluate`, for messages."""
        return option_flag("evaluate" if self.evaluate else "resume")

    def save(self, path: Path) -> None:
        """Writes the fields as TOML, which `--config` reads, except for those that are None."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # Strings, booleans, numbers and lists of strings are the same in JSON and TOML.
        texts = {name: json.dumps(v, ensure_ascii=False) for name, v in values.items() if v is not None}
        content = "".join(f"{name} = {text}\n" for name, text in texts.items())
        path.write_text(content, "utf-8", "surrogateescape")  # Paths other than --out may hold any bytes.


CONFIG_FIELDS = {item.name: item for item in fields(Config)}
_CONFIG_TYPE_HINTS = typing.get_type_hints(Config)
OPTION_TYPES: dict[str, type] = {  # The type of a field; `int | None` counts as int.
    name: tuple  # get_args() would give the type of its items.
    if item.default == ()
    else (typing.get_args(_CONFIG_TYPE_HINTS[name]) or (_CONFIG_TYPE_HINTS[name],))[0]
    for name, item in CONFIG_FIELDS.items()
}
_TYPE_TEXTS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    tuple: "texts",
}


def parse_text(kind: type, text: str) -> Any:
    """Converts a flag's text to `kind`. Returns the text if that fails; callers check the type."""
    try:
        return kind(text)
    except ValueError:
        return text


def replace_old_value(name: str, value: Any, label: str) -> Any:
    """Returns the new spelling of an old value, with a warning that names `label`, or else the value."""
    if not isinstance(value, str) or (new := OLD_VALUES.get((name, value))) is None:
        return value
    # Python shows no DeprecationWarning to the user of a program.
    message = f"fastvit-train: {label} {value} is {new} now; the old value is gone in the next release"
    warnings.warn(message, FutureWarning, user_stacklevel())
    return new


def check_value(name: str, value: Any, label: str = "") -> Any:
    """Returns a value of the option `name`, converted to its type. Messages call the option `label`.

    Raises:
        ConfigError: the value has the wrong type, is out of range, or is none of the choices.
    """
    kind, item, label = OPTION_TYPES[name], CONFIG_FIELDS[name], label or option_flag(name)
    if value is None and item.default is None:
        return None
    value = replace_old_value(name, value, label)
    if (kind is float or name in ("loss_scale", "memory")) and type(value) in (int, float):
        # A TOML file may have a number for the two texts.
        value = kind(str(value))  # float() raises for a very large int, but not for its text.
    if kind is tuple:
        value = (value,) if isinstance(value, str) else value
        is_valid = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
        value = tuple(value) if is_valid else value
    else:
        # bool is a subclass of int.
        is_valid = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        is_valid = is_valid and (kind is not float or math.isfinite(value))
    _check_option(is_valid, label, _TYPE_TEXTS[kind], value)
    if choices := item.metadata["choices"]:
        _check_option(value in choices, label, f"one of {', '.join(choices)}", value)
    if name in NUMBER_LIMITS:
        low, high = NUMBER_LIMITS[name]
        _check_option(low <= value, label, "above 0" if low == MIN_POSITIVE else f"at least {low}", value)
        _check_option(value <= high, label, "below 1" if high < 1 else f"at most {high}", value)
    return value


def check_packages(config: Config) -> None:
    """Raises ConfigError with the names of all missing packages, before a run starts."""
    packages = {"numpy": "numpy", "tensorboard": "tensorboard", "tqdm": "tqdm"}  # by module
    packages |= {"digits": {"sklearn": "scikit-learn"}, "folder": {"PIL": "pillow"}}.get(config.data, {})
    if config.model.startswith("timm/"):
        packages["timm"] = "timm"
    missing_packages = [package for module, package in packages.items() if find_spec(module) is None]
    if missing_packages:
        raise ConfigError(
            f"the trainer needs {', '.join(missing_packages)}, which is not installed: pip install '.[train]'"
            + (" timm" if "timm" in missing_packages else "")
            + ", in the folder of fastvit's sources"
        )


def option_flag(name: str) -> str:
    """Returns the flag of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def abbreviate(names: Iterable[object]) -> str:
    """Returns the first five names as one text, for a message."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")


def _check_option(is_valid: bool, label: str, expected: str, value: object) -> None:
    if not is_valid:
        raise ConfigError(f"{label} must be {expected}, got {value!r}")
