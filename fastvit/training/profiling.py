"""A Chrome trace of some steps, for `--profile`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

__all__ = ["StepProfiler"]

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
