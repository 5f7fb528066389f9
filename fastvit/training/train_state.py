"""What a step changes: model, optimizer, schedule, loss scale and averaged weights, built in order."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from .config import Config
from .conversion import SavedMemory, save_memory
from .distributed import Ranks, broadcast_weights
from .engine import engine_part
from .errors import TrainingError
from .optimization import make_average, make_optimizer, make_scheduler
from .precision import Precision, make_precision

__all__ = ["TrainState", "data_parallel", "make_train_state", "settle_buckets"]


@dataclass
class TrainState:
    """Everything that training changes, and the few numbers that say how a step is made."""

    model: nn.Module  # without DistributedDataParallel
    parallel: Any  # a module: what a training step calls
    optimizer: Optimizer
    scheduler: LambdaLR
    precision: Precision
    average: AveragedModel | None
    memory: SavedMemory | None
    device: torch.device
    config: Config

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch where and how the model takes it."""
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.to(self.device, non_blocking=True, memory_format=layout)
        return images, labels.to(self.device, non_blocking=True)

    @contextmanager
    def no_sync(self, local: bool) -> Iterator[None]:
        """When `local`, gradients of forwards and backwards in here wait for the next ones outside."""
        if not local or self.parallel is self.model:
            yield
        elif hasattr(self.parallel, "no_sync"):
            with self.parallel.no_sync():
                yield
        else:  # apex's DistributedDataParallel
            self.parallel.disable_allreduce()
            try:
                yield
            finally:
                self.parallel.enable_allreduce()

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps as safetensors: `model`, and `average` when there is one."""
        files = {"model": self.model.state_dict()}
        if self.average is not None:
            files["average"] = self.average.module.state_dict()
        return files

    def state_dict(self) -> dict[str, Any]:
        """The rest of what a checkpoint keeps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "precision": self.precision.state_dict(),
            "averaged": int(self.average.n_averaged) if self.average is not None else 0,
            "memory": self.memory.decided_by if self.memory is not None else {},
        }

    def load(self, weights: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Put back what `weights` and `state_dict` gave.

        Raises:
            TrainingError: they are of another model.
        """
        parts = [("model.safetensors", self.model.load_state_dict, weights["model"])]
        if self.average is not None:
            parts.append(("average.safetensors", self.average.module.load_state_dict, weights["average"]))
            self.average.n_averaged.fill_(state["averaged"])
        for name in ("optimizer", "scheduler", "precision"):
            parts.append((f"{name} in state.pt", getattr(self, name).load_state_dict, state[name]))
        for name, load, value in parts:
            try:
                load(value)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TrainingError(f"--resume: {name} of the checkpoint does not fit: {what}") from error


def make_train_state(
    model: nn.Module,
    config: Config,
    ranks: Ranks,
    shape: tuple[int, int, int],
    steps_per_epoch: int,
    saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None,
) -> TrainState:
    """Move the model to the device and put optimizer, precision and data parallelism around it.

    The order matters: weights are equal on all ranks before layers are converted according to them and amp
    makes its masters of them, the average is a copy of the converted model, and amp has changed the model
    before DistributedDataParallel looks at its parameters.

    Args:
        shape: C, H, W of the images.
        steps_per_epoch: steps of the optimizer.
        saved: weights and state of a checkpoint to go on from.
    """
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(ranks.device, memory_format=layout)  # type: ignore[call-overload]  # lacks this one
    broadcast_weights(model)
    precision = make_precision(config, ranks.device)
    # An older checkpoint has none of it.
    memory = save_memory(model, config, shape, precision, saved[1].get("memory") if saved else None)
    average = make_average(model, config.ema) if config.ema else None
    lr = config.lr * (ranks.world * config.accumulate if config.scale_lr else 1)
    optimizer = make_optimizer(model, config.optimizer, lr, config.weight_decay, config.engine)
    model, optimizer = precision.prepare(model, optimizer)
    scheduler = make_scheduler(
        optimizer, config.epochs * steps_per_epoch, config.warmup_epochs * steps_per_epoch
    )
    train_state = TrainState(
        model, model, optimizer, scheduler, precision, average, memory, ranks.device, config
    )
    if saved is not None:
        train_state.load(*saved)
    if config.compile:
        model.compile()
    train_state.parallel = data_parallel(model, config, ranks)
    return train_state


def data_parallel(model: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    """The model in DistributedDataParallel; the model itself when there is one rank."""
    if ranks.world < 2:
        return model
    if config.engine == "apex":
        return engine_part("apex", "parallel").DistributedDataParallel(model)
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    # BatchNorm keeps the buffers: synchronised layers agree on them, the others are averaged once per epoch.
    # torch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {option: False}
    # A kernel with one input channel has two equally right strides; DDP and the convolution differ on them.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=devices, **options)


def settle_buckets(train_state: TrainState, shape: tuple[int, int, int]) -> None:
    """Take a step whose gradients are thrown away, after which DDP's buckets keep their order.

    DDP re-orders its buckets once, after the first step of a start. A ring adds the gradients of three or
    more ranks in an order that depends on the place in the bucket, so the step that follows a start would
    round differently from the same step in the middle of a run, and a resumed run would not be the same run.

    Args:
        shape: C, H, W of the images.
    """
    model, count = train_state.parallel, train_state.config.batch_size
    images, _ = train_state.to_device(torch.zeros(count, *shape), torch.zeros(count))
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    with train_state.precision.forward():
        logits = model(images)
    logits.sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
