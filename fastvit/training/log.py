"""What a run leaves to look at: TensorBoard events, one JSON line per epoch, a Chrome trace. Rank 0 only."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["RunLog", "StepProfiler", "peak_memory"]

# TensorBoard tag of each column; the tags of one chart share a prefix.
TAGS = {
    "train_loss": "loss/train",
    "test_loss": "loss/validation",
    "test_accuracy": "accuracy/validation",
    "average_accuracy": "accuracy/validation of averaged weights",
    "lr": "learning rate",
    "gradient_norm": "gradients/norm",
    "loss_scale": "gradients/loss scale",
    "images_per_second": "speed/images per second",
    "data_wait": "speed/share of time waiting for data",
    "memory": "speed/peak memory in GiB",
}
LAYOUT = {
    "training": {
        "train and validation loss": ["Multiline", ["^loss/train$", "^loss/validation$"]],
        "accuracy": ["Multiline", ["^accuracy/"]],
        "learning rate": ["Multiline", ["^learning rate$"]],
    },
    "health": {
        "gradient norm": ["Multiline", ["^gradients/norm$"]],
        "loss scale": ["Multiline", ["^gradients/loss scale$"]],
        "images per second": ["Multiline", ["^speed/images per second$"]],
        "waiting for data": ["Multiline", ["^speed/share"]],
    },
}
GRID_IMAGES = 64


def peak_memory(device: torch.device) -> float:
    """GiB: what torch has allocated on the GPU at most, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class RunLog:
    """Writes `metrics.jsonl` and TensorBoard events into the directory of a run.

    Every rank may hold one; only the rank that calls `open` writes.

    A row is a dict of numbers with `epoch`, `time` (seconds since 1970) and keys of `TAGS`.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "metrics.jsonl"
        self.writer: SummaryWriter

    def open(self, history: list[dict[str, Any]]) -> None:
        """Begin, with the rows of the epochs that a resumed run has behind it.

        They are written again, so that the curve is whole wherever the run goes on; what the directory holds
        beyond them is dropped.
        """
        from torch.utils.tensorboard import SummaryWriter

        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in history))
        os.replace(temporary, self.path)
        # purge_step 0 makes TensorBoard forget what earlier starts wrote into the same directory.
        self.writer = SummaryWriter(str(self.run), purge_step=0 if history else None)
        self.writer.add_custom_scalars(LAYOUT)
        for row in history:
            self._scalars(row)

    def images(self, images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Show a batch as the model gets it, augmentation included, as one grid."""
        images = images[:GRID_IMAGES].float().cpu()
        pixels = images * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
        self.writer.add_images("training images", pixels.clamp(0, 1), 0)

    def _scalars(self, row: dict[str, Any]) -> None:
        for name, tag in TAGS.items():
            if name in row:
                self.writer.add_scalar(tag, row[name], row["epoch"], walltime=row["time"])

    def epoch(self, row: dict[str, Any]) -> None:
        """Add one epoch; it is in the files when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._scalars(row)
        self.writer.flush()

    def close(self, options: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Finish the events file, with the options and the last results for TensorBoard's table of runs."""
        from torch.utils.tensorboard.summary import hparams

        values = {name: value if isinstance(value, bool | int | float) else str(value)
                  for name, value in options.items()}  # fmt: skip
        if history:
            # The table reads the results from the curves of these tags.
            results = {TAGS[name]: history[-1][name] for name in ("test_loss", "test_accuracy")}
            for summary in hparams(values, results):
                self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        self.writer.close()


WARMUP = 2  # steps with the profiler on whose records are thrown away; the first ones cost extra


class StepProfiler:
    """Records `steps` steps of one rank, after two of warm-up, and writes `trace.json`.

    Open the file in chrome://tracing or https://ui.perfetto.dev.
    """

    def __init__(self, run: Path, steps: int) -> None:
        self.path, self.profile = run / "trace.json", None
        if steps:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
                on_trace_ready=self._write,
                profile_memory=True,
            )

    def _write(self, recorded: profile) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        recorded.export_chrome_trace(str(temporary))
        temporary.replace(self.path)

    def __enter__(self) -> StepProfiler:
        if self.profile is not None:
            self.profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.profile is not None:
            self.profile.stop()  # a run shorter than the schedule still leaves its trace

    def step(self) -> None:
        """Say that a step has ended."""
        if self.profile is not None:
            self.profile.step()
