"""One run from start to end: set up, train and evaluate every epoch, keep its checkpoint and its log."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..models import SYNCHRONISED, vit_digits
from . import checkpoint, distributed
from .config import Config, merge_saved
from .data import load_digits, test_loader, train_loader
from .distributed import Ranks, is_main_process, on_main
from .errors import TrainingError
from .log import RunLog
from .loop import evaluate, make_optimizer, make_scheduler, train_one_epoch

__all__ = ["train"]


def train(config: Config, given: dict[str, Any], ranks: Ranks) -> None:
    """Train as ``config`` says; every rank calls it, and rank 0 prints ``test accuracy 0.xxx`` at the end.

    Args:
        config: the configuration of this start.
        given: the flags that were given explicitly; a resumed run takes the others from its checkpoint.
        ranks: what `distributed.init` returned.

    Raises:
        TrainingError: on every rank alike, with a message for the user.
    """
    weights, state = None, None
    if config.resume:
        config, weights, state = on_main(_load, config, given, ranks.world)
    if config.norm == "torch-sync" and ranks.device.type != "cuda":
        raise TrainingError(
            "--norm torch-sync trains on CUDA only and this run is on the CPU; "
            "fastvit-sync and inplace-abn-sync synchronise on the CPU too"
        )
    _set_up_torch(config, ranks)
    run = Path(config.out)
    on_main(_prepare_directory, run, config)
    _say(
        f"{ranks.world} x {ranks.device.type}, {torch.get_num_threads()} CPU thread(s) per rank, run in {run}"
    )

    pin_memory = ranks.device.type == "cuda"
    split = load_digits(config.data_seed)
    try:
        batches, sampler = train_loader(
            split, config.batch_size, ranks.rank, ranks.world, config.seed, pin_memory
        )
    except ValueError as error:  # the shares of all ranks have the same size
        raise TrainingError(str(error)) from error
    test = test_loader(split, ranks.rank, ranks.world, pin_memory)

    torch.manual_seed(config.seed)
    model = vit_digits(config.norm, config.mlp_norm)
    if weights is not None:
        _load_weights(model, weights)
    model.to(ranks.device)
    optimizer = make_optimizer(model, config.optimizer, config.lr, config.weight_decay)
    scheduler = make_scheduler(optimizer, config.epochs * len(batches), config.warmup_epochs * len(batches))
    parallel = _data_parallel(model, config, ranks)
    if ranks.world > 2:
        _settle_buckets(parallel, split.train_images[: config.batch_size].to(ranks.device))
    torch.manual_seed(
        config.seed + 1_000_003 * (ranks.rank + 1)
    )  # each rank shifts its images in its own way
    done, history = 0, []
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        checkpoint.set_rng_state(state["rng"][ranks.rank], ranks.device)
        done, history = state["epoch"], state["history"]
        _say(f"resumed after epoch {done} of {config.epochs}")

    log = RunLog(run)
    on_main(log.open, history)
    last = min(config.epochs, done + config.stop_after) if config.stop_after else config.epochs
    for epoch in range(done + 1, last + 1):
        sampler.set_epoch(epoch)
        result = train_one_epoch(parallel, batches, optimizer, scheduler, ranks.device, epoch)
        if config.norm not in SYNCHRONISED:
            distributed.average_running_statistics(model)
        test_loss, accuracy = evaluate(model, test, ranks.device)
        row = {
            "epoch": epoch,
            "train_loss": result.loss,
            "test_loss": test_loss,
            "test_accuracy": accuracy,
            "lr": scheduler.get_last_lr()[0],
            "images_per_second": result.images / result.seconds,
            "time": time.time(),
        }
        history.append(row)
        saved = {
            "epoch": epoch,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": distributed.gather_objects(checkpoint.get_rng_state(ranks.device)),
            "config": asdict(config),
            "world": ranks.world,
            "history": history,
        }
        on_main(_keep, run, model, saved, log, row)
        _say(
            f"[epoch {epoch}] mean loss {result.loss:.4f}, test loss {test_loss:.4f}, "
            f"test accuracy {accuracy:.3f}, {row['images_per_second']:.0f} images/s"
        )
    log.close()
    if last < config.epochs:
        _say(f"stopped after epoch {last} of {config.epochs}; go on with --resume {run}")
    _say(f"test accuracy {history[-1]['test_accuracy']:.3f}")


def _say(text: str) -> None:
    if is_main_process():
        print(text, flush=True)


def _load(config: Config, given: dict[str, Any], world: int) -> tuple[Config, dict, dict]:
    path = checkpoint.find_checkpoint(Path(config.resume))
    weights, state = checkpoint.load_checkpoint(path)
    if state["world"] != world:
        raise TrainingError(
            f"--resume: {path} must go on with the {state['world']} rank(s) that wrote it, got {world}; "
            f"each rank has a random state of its own"
        )
    # <run>/checkpoints/epoch-0012; a checkpoint that was moved elsewhere goes on where it lies.
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return merge_saved(given, state["config"], run), weights, state


def _load_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TrainingError(f"--resume: the weights do not fit the model: {error}") from error


def _prepare_directory(run: Path, config: Config) -> None:
    run.mkdir(parents=True, exist_ok=True)
    used = (run / "metrics.jsonl").exists() or (run / "checkpoints").exists()
    # Only the run that is being resumed may go on in a directory that holds one.
    source = Path(config.resume).resolve() if config.resume else None
    if used and (source is None or run.resolve() not in (source, *source.parents)):
        raise TrainingError(
            f"--out {run} already holds a run; give another directory, or go on with --resume {run}"
        )
    config.save(run / "config.json")


def _keep(run: Path, model: nn.Module, saved: dict[str, Any], log: RunLog, row: dict[str, Any]) -> None:
    # The checkpoint holds the history, so the log may lag behind it and is mended by a resumed run.
    checkpoint.save_checkpoint(run, saved["epoch"], model, saved)
    log.epoch(row)


def _set_up_torch(config: Config, ranks: Ranks) -> None:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(config.threads or max(1, cores // ranks.local_world))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _data_parallel(model: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    if ranks.world < 2:
        return model
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    # BatchNorm keeps the buffers: synchronised layers agree on them, the others are averaged once per epoch.
    # torch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    # A kernel with one input channel has two equally right strides; DDP and the convolution differ on them.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=devices, **{option: False})


def _settle_buckets(model: nn.Module, images: torch.Tensor) -> None:
    """Take a step whose gradients are thrown away, after which DDP's buckets keep their order.

    DDP re-orders its buckets once, after the first step of a start. A ring adds the gradients of three or
    more ranks in an order that depends on the place in the bucket, so the step that follows a start would
    round differently from the same step in the middle of a run, and a resumed run would not be the same run.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    model(images).sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
