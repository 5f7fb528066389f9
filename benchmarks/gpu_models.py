"""The part of bench_gpu.py that trains whole models, before and after `fastvit.convert`."""

import functools
import itertools
import time
from collections.abc import Callable

import torch
from gpu_kernels import Tasks
from harness import percentiles
from torch import nn

import fastvit
from fastvit.memory import peak_bytes

MODELS = ("vit_small_patch16_224", "resnet50")
BATCHES = (64, 256)
REPEATS = 7
ROOM = 0.97  # of the free memory, which the largest batch may take


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "convert": fastvit.convert,
    "compiled": lambda model: torch.compile(model, dynamic=False),
    "convert, compiled": lambda model: torch.compile(fastvit.convert(model), dynamic=False),
}


class Tiny(nn.Module):
    """No Sequential: like the real models, it has no items."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x))


class Step:
    """A training step under autocast to bf16."""

    def __init__(self, name: str, contender: str, device: str, quick: bool):
        torch.manual_seed(0)
        self.device, self.size = device, 8 if quick else 224
        model = Tiny() if quick else self._real(name)
        self.model = CONTENDERS[contender](model.to(device).train())

    @staticmethod
    def _real(name: str) -> nn.Module:
        from real_models import create

        return create(name)[0]

    def __call__(self, x: torch.Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            y = self.model(x)
        y.float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)

    def images(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, self.size, self.size, device=self.device)

    def peak(self, batch: int) -> int:
        """Bytes at the peak of a step and its images, above what is allocated before."""
        return peak_bytes(lambda: self(self.images(batch)), self.device)


def models(part) -> Tasks:
    eager = tuple(CONTENDERS)[:2]
    for batch, name, contender in itertools.product((2,) if part.quick else BATCHES, MODELS, eager):
        yield f"{name} {contender} {batch}", functools.partial(_times, part, name, contender, batch)
    for name, contender in itertools.product(MODELS, eager):
        yield f"{name} {contender} largest batch", functools.partial(_largest, part, name, contender)
    for name, contender in itertools.product(MODELS, tuple(CONTENDERS)[2:]):
        if not part.quick:
            yield f"{name} {contender}", functools.partial(_times, part, name, contender, BATCHES[0])


def _times(part, name: str, contender: str, batch: int) -> None:
    step = Step(name, contender, part.device, part.quick)
    x = step.images(batch)
    for _ in range(3):
        step(x)
    device, host = [], []
    for _ in range(2 if part.quick else REPEATS):
        part.synchronize()
        begin = time.perf_counter()
        step(x)
        host.append((time.perf_counter() - begin) * 1e3)
        part.synchronize()
        device.append((time.perf_counter() - begin) * 1e3)
    times, host_ms = percentiles(device), percentiles(host)["p50_ms"]
    part.row(
        model=name, contender=contender, batch=batch, dtype="bf16", **times,
        host_ms=host_ms if host_ms < 0.8 * times["p50_ms"] else "",  # else one waited for the other
        peak_MiB=step.peak(batch) / 2**20,
    )  # fmt: skip


def _largest(part, name: str, contender: str) -> None:
    """The largest batch that fits: by the peaks of two batches, then tried."""
    small, large = (1, 2) if part.quick else BATCHES
    step = Step(name, contender, part.device, part.quick)
    step.peak(small)  # allocates what is allocated once
    first, second = step.peak(small), step.peak(large)
    if part.device == "cuda":
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] if part.device == "cuda" else 16 * second
    batch = int((ROOM * free - first) / ((second - first) / (large - small))) + small
    while True:
        if part.device == "cuda":
            torch.cuda.empty_cache()
        try:
            peak = step.peak(batch)
            break
        except torch.OutOfMemoryError:
            if batch <= small:
                raise
        step.model.zero_grad(set_to_none=True)
        batch = max(small, int(0.95 * batch))
    part.row(model=name, contender=contender, batch=batch, dtype="bf16", largest=True, peak_MiB=peak / 2**20)
