"""`run_training` makes a run from start to end: data, model, epochs, checkpoints and logs."""

from __future__ import annotations

import os
import time
import zlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import __version__, _library
from . import checkpoint
from .command_line import PER_HOST_OPTIONS, merge_saved
from .config import Config, ConfigError, TrainingError, abbreviate, option_flag
from .datasets import TrainTestData, load_datasets
from .distributed import (
    average_running_statistics,
    cores_per_rank,
    get_rank,
    get_world_size,
    print_on_main,
    require_equal_on_ranks,
    run_on_all_ranks,
    run_on_main,
)
from .loaders import TrainBatchSampler, list_test_batches, make_loader
from .loop import Progress, evaluate, record_stop_signals, train_one_epoch
from .model import build_model, freeze_parameters
from .pretrained import load_pretrained
from .resume import open_run, prepare_run_dir
from .run_log import RunLog, peak_memory
from .train_state import TrainState


def run_training(config: Config, explicit: dict[str, Any], device: torch.device) -> None:
    """Trains, or evaluates a checkpoint, by `config`. Rank 0 prints `test accuracy 0.xxx` at the end.

    Every rank calls it. Options that are not `explicit` come from the checkpoint, if there is one.

    Raises:
        TrainingError: on every rank, with a message for the user.
    """
    versions = {"fastvit": __version__, "torch": torch.__version__}
    require_equal_on_ranks(_options_equal_on_ranks(config) | versions)
    if config.evaluate:
        _evaluate(config, explicit, device)
        return
    with ExitStack() as exit_stack:
        _train(config, explicit, device, exit_stack)


def _evaluate(config: Config, explicit: dict[str, Any], device: torch.device) -> None:
    path = run_on_main(checkpoint.find_checkpoint, Path(config.evaluate), "--evaluate")
    state = run_on_main(checkpoint.load_checkpoint, path, "--evaluate")
    config = run_on_all_ranks(merge_saved, explicit, state["config"], Path(config.out))
    config = replace(config, memory="off", compile=False)  # Without a backward neither has an effect.
    run_on_all_ranks(_check_norm_runs_on, config, device)
    cores = _set_up_torch(config)
    data = _load_data(config, state)
    test_loader = _make_test_loader(data, config, device, cores)
    model = _make_model(config, data, pretrained=False)
    train_state = run_on_all_ranks(TrainState, model, config, device, data.shape, 1, state)
    for name, net in (("test", train_state.model), ("averaged weights: test", train_state.ema_model)):
        if net is not None:
            loss, accuracy = evaluate(train_state, net, test_loader)
            print_on_main(f"{name} loss {loss:.4f}, test accuracy {accuracy:.3f}")


def _train(config: Config, explicit: dict[str, Any], device: torch.device, exit_stack: ExitStack) -> None:
    config, state = open_run(config, explicit, exit_stack)
    run_on_all_ranks(_check_norm_runs_on, config, device)
    cores, run_dir, world_size = _set_up_torch(config), Path(config.out), get_world_size()
    run_on_main(prepare_run_dir, run_dir, config)
    threads = torch.get_num_threads()
    print_on_main(f"{world_size} x {device.type}, {threads} CPU thread(s) per rank, run in {run_dir}")

    data, rank = _load_data(config, state), get_rank()
    sampler = run_on_all_ranks(
        TrainBatchSampler, len(data.train.labels), config.batch_size, rank, world_size, config.seed
    )
    loader = make_loader(data.train, sampler, config, device, cores)
    test_loader = _make_test_loader(data, config, device, cores)

    model = _make_model(config, data, pretrained=state is None)
    steps = -(-len(loader) // config.accumulate)
    train_state = run_on_all_ranks(TrainState, model, config, device, data.shape, steps, state)
    _save_memory_report(train_state, run_dir)
    run = Run(config, train_state, data, sampler, loader, test_loader, steps)
    if state is not None:
        run.restore(state)
    run.train_epochs(exit_stack)


@dataclass
class Run:
    """The objects of a run, and its progress."""

    config: Config
    train_state: TrainState
    data: TrainTestData
    sampler: TrainBatchSampler
    loader: DataLoader
    test_loader: DataLoader
    steps_per_epoch: int
    finished_epochs: int = 0
    progress: Progress = field(default_factory=Progress)  # The progress of the next epoch.
    history: list[dict[str, Any]] = field(default_factory=list)  # The rows of the finished epochs.

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the progress and the history to those of a checkpoint."""
        self.finished_epochs, self.history = state["epoch"], state["history"]
        self.progress = Progress(**state["progress"])
        step_note = f" and {self.progress.step} steps" if self.progress.step else ""
        message = f"resumed after epoch {self.finished_epochs}{step_note} of {self.config.epochs}"
        if state["world"] != (world_size := get_world_size()):
            message += (
                f"; {state['world']} rank(s) wrote the checkpoint, learning rate and schedule are those of "
                f"{world_size}"
            )
        print_on_main(message)

    def train_epochs(self, exit_stack: ExitStack) -> None:
        """Trains until the last epoch, `--stop-after` or a stop signal. Saves a checkpoint for each epoch."""
        config, run_dir = self.config, Path(self.config.out)
        logs: list[RunLog] = []  # One log on rank 0, none on other ranks.
        run_on_main(lambda: logs.append(RunLog(run_dir, self.history, exit_stack)))
        last_epoch = config.epochs
        if config.stop_after:
            last_epoch = min(config.epochs, self.finished_epochs + config.stop_after)
        received_signals = record_stop_signals(exit_stack)
        for epoch in range(self.finished_epochs + 1, last_epoch + 1):
            step, stop_signal = self._train_epoch(epoch, received_signals, logs)
            if stop_signal and self.finished_epochs < last_epoch:
                print_on_main(f"stopped by {Signals(stop_signal).name} in epoch {epoch}, after step {step}")
                break
        if self.finished_epochs < config.epochs:
            print_on_main(
                f"stopped after epoch {self.finished_epochs} of {config.epochs}; continue it with "
                f"--resume {run_dir}"
            )
        if self.history:
            print_on_main(f"test accuracy {self.history[-1]['test_accuracy']:.3f}")

    def _train_epoch(self, epoch: int, received_signals: list[int], logs: list[RunLog]) -> tuple[int, int]:
        """Trains an epoch to its end or to a stop signal. Returns the last step, and the signal or 0."""
        train_state, progress, is_best = self.train_state, self.progress, False
        self.sampler.set_epoch(epoch, progress.step * self.config.accumulate)
        speed, stop_signal = train_one_epoch(
            train_state, self.loader, self.data.shape, epoch, progress, received_signals
        )
        for model in filter(None, (train_state.model, train_state.ema_model)):
            average_running_statistics(model)
        is_complete = progress.step == self.steps_per_epoch
        if is_complete:
            row = _evaluate_epoch(train_state, self.test_loader, progress, epoch) | speed
            is_best = all(_epoch_accuracy(row) > _epoch_accuracy(other) for other in self.history)
            self.history.append(row)
            self.finished_epochs, self.progress = epoch, Progress()
        run_dir = Path(self.config.out)
        run_on_main(checkpoint.save_checkpoint, run_dir, self._state_dict(), self.config.keep, is_best)
        if is_complete:
            run_on_main(lambda: logs[0].write(row))
            print_on_main(_format_epoch(row))
        return progress.step, stop_signal

    def _state_dict(self) -> dict[str, Any]:
        return self.train_state.state_dict() | {
            "epoch": self.finished_epochs,
            "progress": asdict(self.progress),
            "config": asdict(self.config),
            "classes": list(self.data.classes),
            "world": get_world_size(),
            # The log lacks the last row after a crash between checkpoint and log; a resume writes the row.
            "history": self.history,
        }


def _save_memory_report(train_state: TrainState, run_dir: Path) -> None:
    if train_state.memory_report is not None:
        config = train_state.config
        print_on_main(f"--memory {config.memory}: {train_state.memory_report.summary()}")
        title = f"--memory {config.memory}, a batch of {config.batch_size} images on one rank"
        text = f"{title}\n\n{train_state.memory_report}\n"
        run_on_main((run_dir / "memory.txt").write_text, text, "utf-8")


def _load_data(config: Config, state: dict[str, Any] | None) -> TrainTestData:
    """Returns the data, which must be equal on all ranks and have the classes of the checkpoint."""
    data = run_on_all_ranks(load_datasets, config)
    require_equal_on_ranks(_options_equal_on_ranks(config) | _data_fingerprint(data))
    if state is not None and tuple(state["classes"]) != data.classes:
        raise TrainingError(
            f"{config.checkpoint_option}: the checkpoint was trained on {len(state['classes'])} classes "
            f"({abbreviate(state['classes'])}), the data has {len(data.classes)} ({abbreviate(data.classes)})"
        )
    ignored = f"; left out: {abbreviate(data.ignored)}" if data.ignored else ""
    counts = f"{len(data.train.labels)} training and {len(data.test.labels)} test images"
    print_on_main(f"{counts} of {len(data.classes)} classes{ignored}")
    return data


def _make_test_loader(data: TrainTestData, config: Config, device: torch.device, cores: int) -> DataLoader:
    # Evaluation keeps no activations for backward, so its batches can be larger.
    batches = list_test_batches(len(data.test.labels), 2 * config.batch_size, get_rank(), get_world_size())
    return make_loader(data.test, batches, config, device, cores)


def _options_equal_on_ranks(config: Config) -> dict[str, Any]:
    """Returns the options that must be equal on all ranks, by their flags."""
    return {
        option_flag(name): value for name, value in asdict(config).items() if name not in PER_HOST_OPTIONS
    }


def _data_fingerprint(data: TrainTestData) -> dict[str, Any]:
    """Returns what the ranks compare of the data, which each host reads from its own disk."""
    checksum = zlib.crc32(repr(data.classes).encode())
    names = f"{len(data.classes)} ({abbreviate(data.classes)}), checksum {checksum}"
    fingerprint = {"the classes of the data": names, "the shape of its images": data.shape}
    for name, images in (("training", data.train), ("test", data.test)):
        checksum = zlib.crc32(images.labels.numpy().tobytes())
        fingerprint[f"the {name} set"] = f"{len(images.labels)} images, checksum of their labels {checksum}"
    return fingerprint


def _check_norm_runs_on(config: Config, device: torch.device) -> None:
    """Raises ConfigError if `--norm` has no implementation for the device."""
    if config.norm == "torch-sync" and device.type != "cuda":
        raise ConfigError(
            "--norm torch-sync trains on CUDA only, but this run is on the CPU; use fastvit-sync or "
            "inplace-abn-sync, which synchronise on the CPU too"
        )
    if config.norm.startswith(("fastvit", "inplace")):
        gpu_problem = _library.gpu_problem(device) if device.type == "cuda" else ""
        if problem := _library.NOT_BUILT_REASON or gpu_problem:
            raise ConfigError(
                f"--norm {config.norm} needs fastvit's kernels: {problem}; --norm torch needs none"
            )


def _set_up_torch(config: Config) -> int:
    """Sets options of torch. Returns the number of this rank's cores."""
    cores = cores_per_rank()  # Every rank calls this collective, even if --threads is set on some.
    torch.set_num_threads(config.threads or cores)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return cores


def _make_model(config: Config, data: TrainTestData, pretrained: bool) -> nn.Module:
    """Returns the model on the CPU. It is equal on all ranks but for pretrained weights, read on rank 0."""
    torch.manual_seed(config.seed)
    model = run_on_all_ranks(build_model, config, data.shape, len(data.classes))
    if pretrained and config.pretrained not in ("", "timm"):
        print_on_main(run_on_main(load_pretrained, model, Path(config.pretrained)))
    if config.freeze:
        print_on_main(f"frozen: {run_on_all_ranks(freeze_parameters, model, config.freeze)} parameters")
    return model


def _evaluate_epoch(
    train_state: TrainState, test: DataLoader, progress: Progress, epoch: int
) -> dict[str, Any]:
    """Returns the row of an epoch, for the log and the history."""
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
    if train_state.ema_model is not None:
        _, row["average_accuracy"] = evaluate(train_state, train_state.ema_model.module, test)
    return row


def _epoch_accuracy(row: dict[str, Any]) -> float:
    """Returns the accuracy that chooses the best checkpoint."""
    return row.get("average_accuracy", row["test_accuracy"])


def _format_epoch(row: dict[str, Any]) -> str:
    averaged = f", averaged {row['average_accuracy']:.3f}" if "average_accuracy" in row else ""
    return (
        f"[epoch {row['epoch']}] mean loss {row['train_loss']:.4f}, test loss {row['test_loss']:.4f}, "
        f"test accuracy {row['test_accuracy']:.3f}{averaged}, {row['images_per_second']:.0f} images/s"
    )
