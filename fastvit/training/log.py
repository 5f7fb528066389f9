"""Logs of a run: TensorBoard events, one JSON line per epoch. Written by rank 0."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB: allocated by torch on the GPU, or the resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class RunLog:
    """Writes `metrics.jsonl` and TensorBoard events into the directory of a run.

    Every rank may have one; only the rank that calls `open` writes.

    A row is a dict of numbers with `epoch`, `time` (seconds since 1970) and keys of `TAGS`.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.file: TextIO
        self.writer: SummaryWriter

    def open(self, history: list[dict[str, Any]]) -> None:
        """Open the files and write the rows of the epochs before a resume.

        The curve is then complete in any directory. Later rows of the directory are dropped.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.file = (self.run / "metrics.jsonl").open("w")
        # With purge_step 0 TensorBoard drops the events of earlier starts in the same directory.
        self.writer = SummaryWriter(str(self.run), purge_step=0 if history else None)
        for row in history:
            self.epoch(row)

    def epoch(self, row: dict[str, Any]) -> None:
        """Write the row of one epoch, and flush the files."""
        self.file.write(json.dumps(row) + "\n")
        for name in TAGS.keys() & row.keys():
            self.writer.add_scalar(TAGS[name], row[name], row["epoch"], walltime=row["time"])
        self.file.flush()
        self.writer.flush()

    def close(self) -> None:
        self.file.close()
        self.writer.close()
