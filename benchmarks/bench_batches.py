"""Measures the largest batch whose training steps fit into some memory, and what `fastvit.report` says of it.

    python benchmarks/bench_batches.py [--models resnet50] [--memory "1 GiB"] [--threads 1] [--out FOLDER]

Each contender of CONTENDERS trains a copy of the model: a forward under bf16 autocast, the backward and
AdamW, twice, since the first step allocates the optimizer's state. The peak is that of both steps with the
copy itself, its gradients and the batch, by torch's allocator. A batch is the largest if one image more does
not fit. The program writes batches_cpu.csv and its table. It needs timm (`pip install '.[models]'`).
"""

import copy
import sys
from collections.abc import Callable

import torch
from conditions import provenance
from convert_contenders import MIB, make_contender, select_autocast
from harness import make_parser, restart_with_reused_memory, write_csv
from real_models import create_model, random_inputs
from result_tables import write_table
from torch import nn

import fastvit
from fastvit.conversion.largest_batch import parse_memory
from fastvit.memory import peak_bytes

MODELS = ("vit_small_patch16_224", "resnet50", "mobilevit_s")
# A contender -> the line of a report that says its batch, if there is one.
CONTENDERS = {"torch": "as it was", "convert": "as converted", "least": "least", "checkpoint": ""}
REPORT_BATCH = 8
MAX_PEAKS = 9  # A search measures at most so many batches.


def measure_training_peak(contender: str, eager: nn.Module, images: torch.Tensor, autocast: Callable) -> int:
    """Returns the peak bytes of two training steps with AdamW, with the model's copy and the batch."""

    def train() -> None:
        x = images.clone()
        with autocast():  # A budget plans in the first training step, since it has no example inputs.
            model = make_contender("eager" if contender == "torch" else contender, eager, None)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with autocast():
                y = model(x)
            y.float().square().mean().backward()
            optimizer.step()

    return peak_bytes(train)


def find_largest_batch(measure_peak: Callable[[int], int], memory: int, guess: int) -> tuple[int, int]:
    """Returns the largest batch whose peak is at most `memory`, and its peak.

    Peaks are about affine in the batch, so each guess lies on the line through the two peaks that are nearest
    to `memory`. Raises RuntimeError if MAX_PEAKS peaks do not enclose the batch.
    """
    peaks: dict[int, int] = {}
    guess = max(1, guess)
    for _ in range(MAX_PEAKS):
        peaks[guess] = measure_peak(guess)
        fits = max((batch for batch, peak in peaks.items() if peak <= memory), default=0)
        exceeds = min((batch for batch, peak in peaks.items() if peak > memory), default=sys.maxsize)
        if exceeds == fits + 1:
            return fits, peaks.get(fits, 0)
        near, *further = sorted(peaks, key=lambda batch: abs(peaks[batch] - memory))
        slope = (peaks[near] - peaks[further[0]]) / (near - further[0]) if further else peaks[near] / near
        guess = near + round((memory - peaks[near]) / max(slope, 1) - 0.5)
        guess = max(fits + 1, min(guess, exceeds - 1))
    raise RuntimeError(f"bench_batches: no largest batch for {memory} bytes in {MAX_PEAKS} steps: {peaks}")


def report_batches(model: nn.Module, name: str, size: int, memory: str, autocast: Callable) -> dict[str, int]:
    """Returns what `fastvit.report` says of the largest batches, from a batch of REPORT_BATCH."""
    with autocast():
        return fastvit.report(model, random_inputs(name, REPORT_BATCH, size), memory=memory).batches


def bench_model(name: str, options) -> list[dict]:
    """Returns a row for each contender."""
    torch.manual_seed(0)
    eager, size = create_model(name)
    eager_cast, least_cast = (select_autocast(k, "bf16", options) for k in ("torch", "least"))
    reported = report_batches(eager, name, size, options.memory, eager_cast)
    converted = fastvit.convert(copy.deepcopy(eager), recompute_weight_casts=True)
    reported["least"] = report_batches(converted, name, size, options.memory, least_cast)["least"]
    memory, rows = parse_memory(options.memory), []
    for contender, line in CONTENDERS.items():
        autocast = select_autocast(contender, "bf16", options)

        def measure_peak(batch: int, contender=contender, autocast=autocast) -> int:
            images = random_inputs(name, batch, size)
            peak = measure_training_peak(contender, eager, images, autocast)
            print(f"{name}: {contender}: {batch} images, {peak / MIB:.0f} MiB", flush=True)
            return peak

        batch, peak = find_largest_batch(measure_peak, memory, reported[line or "least"])
        row = {"what": name, "shape": f"3x{size}x{size}", "dtype": "bf16", "threads": options.threads}
        row |= {"memory_MiB": memory // MIB, "contender": contender, "batch": batch}
        rows.append(row | {"reported": reported.get(line, ""), "peak_MiB": peak / MIB})
    return rows


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of real_models.py")
    parser.add_argument("--memory", default="1 GiB", help="for a model and its training")
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu", curve=True)  # select_autocast casts as for the curve.
    options = parser.parse_args()
    restart_with_reused_memory()
    torch.set_num_threads(options.threads)
    rows: list[dict] = []
    for name in options.models:
        rows += [row | provenance("cpu") for row in bench_model(name, options)]
        path = write_table(write_csv("batches_cpu", rows, options.out))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
