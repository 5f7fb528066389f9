"""One run from start to end: set up, train and evaluate every epoch, write checkpoints and logs."""

from __future__ import annotations

import os
import time
import zlib
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import __version__, _library
from . import checkpoint
from .command_line import OF_A_HOST, merge_saved
from .config import Config, ConfigError, TrainingError, flag, some
from .datasets import DataSets, load
from .distributed import (
    agree,
    average_running_statistics,
    gather_objects,
    get_rank,
    get_world_size,
    on_every,
    on_main,
    own_cores,
    say,
)
from .loaders import TrainBatches, make_loader, test_batches
from .log import RunLog, peak_memory
from .loop import Progress, evaluate, stop_requests, train_one_epoch
from .model import build_model, freeze, load_pretrained
from .train_state import TrainState


def train(config: Config, given: dict[str, Any], device: torch.device) -> None:
    """Train, or evaluate a checkpoint, by `config`; rank 0 prints `test accuracy 0.xxx` at the end.

    Every rank calls it. Values that were not `given` explicitly come from the checkpoint, if there is one.

    Raises:
        TrainingError: on every rank, with a message for the user.
    """
    agree(_options(config) | {"fastvit": __version__, "torch": torch.__version__})
    if config.evaluate:
        _evaluate(config, given, device)
        return
    with ExitStack() as stack:
        _train(config, given, device, stack)


def _evaluate(config: Config, given: dict[str, Any], device: torch.device) -> None:
    path = on_main(checkpoint.find_checkpoint, Path(config.evaluate), "--evaluate")
    state = on_main(checkpoint.load_checkpoint, path, "--evaluate")
    config = on_every(merge_saved, given, state["config"], Path(config.out))
    config = replace(config, memory="off", compile=False)  # both are of a backward
    on_every(_check_device, config, device)
    cores = _set_up_torch(config)
    data = _load_data(config, state)
    test = _test_loader(data, config, device, cores)
    model = _make_model(config, data, pretrained=False)
    train_state = on_every(TrainState, model, config, device, data.shape, 1, state)
    for name, net in (("test", train_state.model), ("averaged weights: test", train_state.average)):
        if net is not None:
            loss, accuracy = evaluate(train_state, net, test)
            say(f"{name} loss {loss:.4f}, test accuracy {accuracy:.3f}")


def _train(config: Config, given: dict[str, Any], device: torch.device, stack: ExitStack) -> None:
    world, state = get_world_size(), None
    if config.resume:
        run, state = _resume(config, given, world, stack)
        if state is not None:
            config = on_every(merge_saved, given, state["config"], run)
    else:
        on_main(checkpoint.lock, Path(config.out), stack)
    on_every(_check_device, config, device)
    cores = _set_up_torch(config)
    run = Path(config.out)
    on_main(_prepare_directory, run, config)
    say(f"{world} x {device.type}, {torch.get_num_threads()} CPU thread(s) per rank, run in {run}")

    data = _load_data(config, state)
    sampler = on_every(
        TrainBatches, len(data.train.labels), config.batch_size, get_rank(), world, config.seed
    )
    batches = make_loader(data.train, sampler, config, device, cores)
    test = _test_loader(data, config, device, cores)

    model = _make_model(config, data, pretrained=state is None)
    steps = -(-len(batches) // config.accumulate)
    train_state = on_every(TrainState, model, config, device, data.shape, steps, state)
    if train_state.memory is not None:
        say(f"--memory {config.memory}: {train_state.memory.summary()}")
        title = f"--memory {config.memory}, a batch of {config.batch_size} images on one rank"
        on_main((run / "memory.txt").write_text, f"{title}\n\n{train_state.memory}\n", "utf-8")
    done, history, progress = 0, [], Progress()
    if state is not None:
        done, history, progress = state["epoch"], state["history"], Progress(**state["progress"])
        within = f" and {progress.step} steps" if progress.step else ""
        changed = f": by {world} rank(s) what {state['world']} wrote, with the learning rate and schedule of "
        changed = f"{changed}{world}" if state["world"] != world else ""
        say(f"resumed after epoch {done}{within} of {config.epochs}{changed}")

    log: list[RunLog] = []  # one, on rank 0
    on_main(lambda: log.append(RunLog(run, history, stack)))
    end = min(config.epochs, done + config.stop_after) if config.stop_after else config.epochs
    stop = stop_requests(stack)
    for epoch in range(done + 1, end + 1):
        sampler.set_epoch(epoch, progress.step * config.accumulate)
        speed, stopped = train_one_epoch(train_state, batches, data.shape, epoch, progress, stop)
        for model in filter(None, (train_state.model, train_state.average)):
            average_running_statistics(model)
        step, best = progress.step, False
        if complete := step == steps:
            row = _evaluated(train_state, test, progress, epoch) | speed
            best = all(_score(row) > _score(other) for other in history)
            history.append(row)
            done, progress = epoch, Progress()
        now = train_state.state_dict() | {
            "epoch": done,
            "progress": asdict(progress),
            "config": asdict(config),
            "classes": list(data.classes),
            "world": world,
            "history": history,  # completes the log after a crash between the two
        }
        on_main(checkpoint.save_checkpoint, run, now, config.keep, best)
        if complete:
            on_main(lambda row=row: log[0].write(row))
            say(_summary(row))
        if stopped and done < end:
            say(f"stopped by {Signals(stopped).name} in epoch {epoch}, after step {step}")
            break
    if done < config.epochs:
        say(f"stopped after epoch {done} of {config.epochs}; continue it with --resume {run}")
    if history:
        say(f"test accuracy {history[-1]['test_accuracy']:.3f}")


def _load_data(config: Config, state: dict[str, Any] | None) -> DataSets:
    """The data, equal on all ranks, and with the classes of the checkpoint."""
    data = on_every(load, config)
    agree(_options(config) | _summary_of(data))
    if state is not None and tuple(state["classes"]) != data.classes:
        raise TrainingError(
            f"{config.continued}: the checkpoint was trained on {len(state['classes'])} classes "
            f"({some(state['classes'])}), the data has {len(data.classes)} ({some(data.classes)})"
        )
    left_out = f"; left out: {some(data.left_out)}" if data.left_out else ""
    counts = f"{len(data.train.labels)} training and {len(data.test.labels)} test images"
    say(f"{counts} of {len(data.classes)} classes{left_out}")
    return data


def _test_loader(data: DataSets, config: Config, device: torch.device, cores: int) -> DataLoader:
    # Evaluation keeps no activations, so its batches are larger.
    shares = test_batches(len(data.test.labels), 2 * config.batch_size, get_rank(), get_world_size())
    return make_loader(data.test, shares, config, device, cores)


def _options(config: Config) -> dict[str, Any]:
    """The options that must be equal on all ranks."""
    return {flag(name): value for name, value in asdict(config).items() if name not in OF_A_HOST}


def _summary_of(data: DataSets) -> dict[str, Any]:
    """What is compared of the data that each host reads."""
    names = f"{len(data.classes)} ({some(data.classes)}), checksum {zlib.crc32(repr(data.classes).encode())}"
    summary = {"the classes of the data": names, "the shape of its images": data.shape}
    for name, part in (("training", data.train), ("test", data.test)):
        checksum = zlib.crc32(part.labels.numpy().tobytes())
        summary[f"the {name} set"] = f"{len(part.labels)} images, checksum of their labels {checksum}"
    return summary


def _resume(
    config: Config, given: dict[str, Any], world: int, stack: ExitStack
) -> tuple[Path, dict[str, Any] | None]:
    """The directory in which the run goes on, locked, and the newest checkpoint; `auto` may find none."""
    auto = config.resume == "auto"
    resumed = Path(config.out if auto else config.resume)
    run = Path(config.out) if auto or "out" in given else on_main(checkpoint.run_of, resumed)
    on_main(checkpoint.lock, run, stack)
    # After the lock, before which another run may have written one.
    seen = gather_objects([checkpoint.epoch_and_step(path) for path in checkpoint.checkpoints(resumed)[-1:]])
    if max(seen) > seen[0]:  # a new run, or an older checkpoint, would replace it
        raise TrainingError(
            f"--resume: rank {seen.index(max(seen))} sees a newer checkpoint in {resumed} than rank 0, which "
            "reads and writes them; the disk must be shared by the hosts"
        )
    if auto and not seen[0]:
        say(f"no checkpoint in {resumed}: a new run")
        return run, None
    return run, on_main(_load, resumed, world)


def _load(resumed: Path, world: int) -> dict[str, Any]:
    state = checkpoint.load_checkpoint(path := checkpoint.find_checkpoint(resumed))
    if state["progress"]["step"] and state["world"] != world:  # another number of ranks has other steps
        whole = [(epoch, 0) for epoch in range(state["epoch"] + 1)]
        run = checkpoint.run_of(resumed)
        older = [one for one in checkpoint.checkpoints(run) if checkpoint.epoch_and_step(one) in whole]
        if not older:
            raise TrainingError(
                f"--resume: {path} is within an epoch, so the {state['world']} rank(s) that wrote it must "
                f"continue it, got {world}; there is no checkpoint of a whole epoch"
            )
        state = checkpoint.load_checkpoint(older[-1])
    return state


def _check_device(config: Config, device: torch.device) -> None:
    if config.norm == "torch-sync" and device.type != "cuda":
        raise ConfigError(
            "--norm torch-sync trains on CUDA only and this run is on the CPU; fastvit-sync and "
            "inplace-abn-sync synchronise on the CPU too"
        )
    if config.norm.startswith(("fastvit", "inplace")):
        on_gpu = _library.gpu_problem(device) if device.type == "cuda" else ""
        if problem := _library.NOT_BUILT_REASON or on_gpu:
            raise ConfigError(f"--norm {config.norm} needs kernels: {problem}; --norm torch trains without")


def _prepare_directory(run: Path, config: Config) -> None:
    # Only a resumed run may write to a directory that has a run.
    resumed = Path(config.resume).resolve() if config.resume else None
    own = config.resume == "auto" or resumed and run.resolve() in (resumed, *resumed.parents)
    if not own and ((run / "metrics.jsonl").exists() or (run / "checkpoints").exists()):
        raise TrainingError(
            f"--out {run} already holds a run; give another directory, or continue it with --resume {run}"
        )
    config.save(run / "config.toml")


def _set_up_torch(config: Config) -> int:
    """Set options of torch; returns the number of this rank's cores."""
    cores = own_cores()  # every rank asks: --threads may differ
    torch.set_num_threads(config.threads or cores)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return cores


def _make_model(config: Config, data: DataSets, pretrained: bool) -> nn.Module:
    """The model on the CPU, equal on every rank except for pretrained weights, which only rank 0 reads."""
    torch.manual_seed(config.seed)
    model = on_every(build_model, config, data.shape, len(data.classes))
    if pretrained and config.pretrained not in ("", "timm"):
        say(on_main(load_pretrained, model, Path(config.pretrained)))
    if config.freeze:
        say(f"frozen: {on_every(freeze, model, config.freeze)} parameters")
    return model


def _evaluated(train_state: TrainState, test: DataLoader, progress: Progress, epoch: int) -> dict[str, Any]:
    """The row of an epoch, for the log and the history."""
    test_loss, accuracy = evaluate(train_state, train_state.model, test)
    row = {
        "epoch": epoch,
        "train_loss": progress.mean_loss,
        "test_loss": test_loss,
        "test_accuracy": accuracy,
        "lr": train_state.optimizer.param_groups[0]["lr"],
        "gradient_norm": progress.gradient_norm / max(1, progress.gradient_norms),
        "loss_scale": train_state.loss_scale,
        "memory": peak_memory(train_state.device),
        "time": time.time(),
    }
    if train_state.average is not None:
        _, row["average_accuracy"] = evaluate(train_state, train_state.average.module, test)
    return row


def _score(row: dict[str, Any]) -> float:
    """The accuracy by which checkpoints are compared."""
    return row.get("average_accuracy", row["test_accuracy"])


def _summary(row: dict[str, Any]) -> str:
    averaged = f", averaged {row['average_accuracy']:.3f}" if "average_accuracy" in row else ""
    return (
        f"[epoch {row['epoch']}] mean loss {row['train_loss']:.4f}, test loss {row['test_loss']:.4f}, "
        f"test accuracy {row['test_accuracy']:.3f}{averaged}, {row['images_per_second']:.0f} images/s"
    )
