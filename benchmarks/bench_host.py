"""The host's share of a step: Python and dispatch, on tensors so small that little else remains.

    python benchmarks/bench_host.py [--device cpu|cuda] [--rounds 200] [--out FOLDER]

Contenders in turn, the best of all rounds, one thread:

    vit_tiny of 12 blocks, 8 images of 32 pixels, in fp32 and under bf16 autocast: eager, `fastvit.convert`,
    and with products=True. A step makes gradients and drops them.
    a layer of (4, 8, 4, 4): torch's two layers, and fastvit's one. A multiplication before it makes the input
    an activation; its time is subtracted.

A GPU's work goes on behind the host's. Models need timm (`pip install '.[models]'`). Writes
results/host_DEVICE.csv and .md.
"""

import copy
import functools
import time
from collections.abc import Callable

import torch
from harness import command_line, markdown, place, provenance, write_csv
from torch import nn

import fastvit

LAYER_CALLS = 30  # in a row: one call is as short as the clock's resolution
CHANNELS = 8
LAYERS = {  # what it replaces -> torch's layers, fastvit's
    "BatchNorm2d, ReLU": (
        lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU()),
        lambda: fastvit.BatchNormAct(CHANNELS, activation="relu"),
    ),
    "BatchNorm2d, LeakyReLU": (
        lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.LeakyReLU(0.01)),
        lambda: fastvit.InPlaceABN(CHANNELS),
    ),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(CHANNELS), lambda: fastvit.SyncBatchNorm(CHANNELS)),
}


def best_of(
    contenders: dict[str, Callable[[], list[float]]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Of each contender, which returns seconds of its parts, the least of each part."""
    best: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, work in contenders.items():
            if device == "cuda":
                torch.cuda.synchronize()  # else a launch might wait for room in the stream
            taken = work()
            best[name] = [min(pair) for pair in zip(taken, best.get(name, taken), strict=True)]
    return best


def models(rounds: int, device: str) -> list[dict]:
    from real_models import import_torchvision

    import_torchvision()
    import timm

    torch.manual_seed(0)
    eager = timm.create_model("vit_tiny_patch16_224", img_size=32).train().to(device)
    contenders = {
        "eager": eager,
        "convert": fastvit.convert(copy.deepcopy(eager)),
        "products": fastvit.convert(copy.deepcopy(eager), products=True),
    }
    x = torch.randn(8, 3, 32, 32, device=device)

    def step(model: nn.Module, autocast: bool) -> list[float]:
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        model.zero_grad()
        return [middle - begin, end - middle, end - begin]

    rows = []
    for dtype in ("fp32", "bf16"):
        steps = {k: functools.partial(step, model, dtype == "bf16") for k, model in contenders.items()}
        best = best_of(steps, rounds, device)
        what = f"vit_tiny, 32 pixels, {dtype}"
        rows += [row_of(what, name, taken, best["eager"]) for name, taken in best.items()]
    return rows


def row_of(what: str, contender: str, taken: list[float], of_torch: list[float]) -> dict:
    """Microseconds of forward, backward and both, from seconds."""
    times = dict(zip(("forward_us", "backward_us", "step_us"), (1e6 * t for t in taken), strict=True))
    return {"what": what, "contender": contender, **times, "times": taken[2] / of_torch[2]}


def layers(rounds: int, device: str) -> list[dict]:
    x = torch.randn(4, CHANNELS, 4, 4, device=device, requires_grad=True)
    dy = torch.ones_like(x)

    def step(layer: Callable) -> list[float]:
        forward = backward = 0.0
        for _ in range(LAYER_CALLS):
            begin = time.perf_counter()
            y = layer(x * 1)
            middle = time.perf_counter()
            y.backward(dy)
            backward += time.perf_counter() - middle
            forward += middle - begin
        return [forward / LAYER_CALLS, backward / LAYER_CALLS, (forward + backward) / LAYER_CALLS]

    made = {
        (what, name): make().to(device)
        for what, pair in LAYERS.items()
        for name, make in zip(("torch", "fastvit"), pair, strict=True)
    }
    alone = ("", "multiplication")
    contenders = {key: functools.partial(step, layer) for key, layer in made.items()}
    best = best_of(contenders | {alone: functools.partial(step, lambda x: x)}, rounds, device)
    net = {key: [taken - rest for taken, rest in zip(best[key], best[alone], strict=True)] for key in made}
    return [row_of(what, name, taken, net[what, "torch"]) for (what, name), taken in net.items()]


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        times = [f"{row[f'{part}_us']:.0f} us" for part in ("forward", "backward", "step")]
        cells.append((row["what"], row["contender"], *times, f"{row['times']:.2f}x"))
    lines = markdown(("what", "contender", "forward", "backward", "step", "times"), cells)
    below = f"{place(rows[0])}. `python benchmarks/bench_host.py`"
    return "\n".join(["# The host's share of a step", "", *lines, "", below, ""])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="timed turns per contender")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [row for part in (models, layers) for row in part(options.rounds, options.device)]
    rows = [row | provenance(options.device) for row in found]
    path = write_csv(f"host_{options.device}", rows, options.out)
    path.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
