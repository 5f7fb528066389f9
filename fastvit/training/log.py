"""What a run leaves for people to look at: TensorBoard events and one JSON line per epoch. Rank 0 only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["RunLog"]

# TensorBoard tag of each column; the tags of one chart share a prefix.
TAGS = {
    "train_loss": "loss/train",
    "test_loss": "loss/validation",
    "test_accuracy": "accuracy/validation",
    "lr": "learning rate",
    "images_per_second": "images per second",
}
LAYOUT = {
    "training": {
        "train and validation loss": ["Multiline", ["^loss/train$", "^loss/validation$"]],
        "accuracy": ["Multiline", ["^accuracy/validation$"]],
    }
}


class RunLog:
    """Writes ``metrics.jsonl`` and TensorBoard events into the directory of a run.

    Every rank may hold one; only the rank that calls `open` writes.

    A row is a dict of numbers with ``epoch``, ``time`` (seconds since 1970) and the keys of ``TAGS``.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "metrics.jsonl"
        self.writer: SummaryWriter | None = None

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

    def _scalars(self, row: dict[str, Any]) -> None:
        for name, tag in TAGS.items():
            self.writer.add_scalar(tag, row[name], row["epoch"], walltime=row["time"])

    def epoch(self, row: dict[str, Any]) -> None:
        """Add one epoch; it is in the files when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._scalars(row)
        self.writer.flush()

    def close(self) -> None:
        """Finish the events file."""
        if self.writer is not None:
            self.writer.close()
