"""Logs of a run: TensorBoard events, one JSON line per epoch. Written by rank 0."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

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
    """Writes `metrics.jsonl` and TensorBoard events into the directory of a run; one that exists is replaced.

    A row is a dict of numbers with `epoch`, `time` (seconds since 1970) and keys of `TAGS`. `history` has
    those of the epochs before a resume, so that the curve is complete in any directory.
    """

    def __init__(self, run: Path, history: list[dict[str, Any]], until: ExitStack) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.file = until.enter_context((run / "metrics.jsonl").open("w"))
        # With purge_step 0 TensorBoard drops the events of earlier starts in the same directory.
        self.writer = SummaryWriter(str(run), purge_step=0 if history else None)
        until.callback(self.writer.close)
        for row in history:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Write the row of one epoch, and flush the files."""
        self.file.write(json.dumps(row) + "\n")
        for name in TAGS.keys() & row.keys():
            self.writer.add_scalar(TAGS[name], row[name], row["epoch"], walltime=row["time"])
        self.file.flush()
        self.writer.flush()
