"""`RunLog` writes the logs of a run on rank 0: TensorBoard events, and one JSON line for each epoch."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

# Maps each column to its TensorBoard tag. The tags of one chart share a prefix.
TENSORBOARD_TAGS = {
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
    """Returns the peak memory in GiB: torch's allocations on the GPU, or the resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB.


class RunLog:
    """Writes `metrics.jsonl`, which it replaces, and TensorBoard events into the directory of a run.

    A row is a dict of numbers with `epoch`, `time` (seconds since 1970) and keys of `TENSORBOARD_TAGS`.
    `history` has the rows of the epochs before a resume, so the curves are complete in a new directory too.
    """

    def __init__(self, run_dir: Path, history: list[dict[str, Any]], exit_stack: ExitStack) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.metrics_file = exit_stack.enter_context((run_dir / "metrics.jsonl").open("w"))
        # With purge_step 0 TensorBoard drops the events of earlier starts in the same directory.
        self.writer = SummaryWriter(str(run_dir), purge_step=0 if history else None)
        exit_stack.callback(self.writer.close)
        for row in history:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the row of one epoch, and flushes the files."""
        self.metrics_file.write(json.dumps(row) + "\n")
        for name in TENSORBOARD_TAGS.keys() & row.keys():
            self.writer.add_scalar(TENSORBOARD_TAGS[name], row[name], row["epoch"], walltime=row["time"])
        self.metrics_file.flush()
        self.writer.flush()
