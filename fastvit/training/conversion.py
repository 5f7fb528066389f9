"""Applies `--memory` to the model, by `fastvit.convert`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import fastvit

from ..conversion import Report
from .config import Config
from .precision import Precision

__all__ = ["SavedMemory", "save_memory"]


@dataclass(frozen=True)
class SavedMemory:
    """A conversion: its report, and the values on which it depends."""

    report: Report
    decided_by: dict[str, Tensor]  # weights and biases of the BatchNorm layers at the conversion

    def summary(self, config: Config) -> str:
        """One line for the user."""
        counts = f"{len(self.report.converted)} of {len(self.report)} BatchNorm layers converted"
        return f"--memory {config.memory}: {counts} ({self.report.summary()})"

    def write(self, run: Path, config: Config) -> None:
        """Write `memory.txt`: the report of the conversion."""
        title = f"--memory {config.memory}, a batch of {config.batch_size} images on one rank"
        (run / "memory.txt").write_text(f"{title}\n\n{self.report}\n", encoding="utf-8")


def save_memory(
    model: nn.Module,
    config: Config,
    shape: tuple[int, int, int],
    precision: Precision,
    decided_by: Mapping[str, Tensor] | None = None,
) -> SavedMemory | None:
    """Convert `model`, in place, by `--memory`.

    The model must be on its device and have its initial weights, before amp casts them, because the choice of
    in-place layers depends on the weights. A model that will be compiled is not converted: its layers would
    be plain ops, and torch.compile chooses what is kept for backward.

    Args:
        shape: C, H, W of the images.
        precision: of the run; it sets the dtype of activations, whose bytes are reported.
        decided_by: values of the first conversion, for a resumed run. With them the same layers are chosen
            again, and the same layers give the same bits. They remain in the model until the checkpoint's
            weights replace them.

    Returns:
        The conversion; None with `--memory off` or `--compile`.
    """
    if config.memory == "off" or config.compile:
        return None
    if decided_by:
        model.load_state_dict(decided_by, strict=False)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    device = next(model.parameters()).device
    images = torch.zeros(config.batch_size, *shape, device=device).to(memory_format=layout)
    with precision.half():
        _, report = fastvit.convert(model, example_inputs=images, **config.convert_options())
    norms = {layer.name: model.get_submodule(layer.name) for layer in report}
    values = {
        f"{name}.{parameter}": value.detach().to("cpu", copy=True)
        for name, norm in norms.items()
        for parameter, value in norm.named_parameters(recurse=False)
    }
    return SavedMemory(report, values)
