"""The host's share of a step: Python and dispatch, on tensors so small that little else remains.

    python benchmarks/bench_host.py [--device cpu|cuda] [--rounds 200] [--out FOLDER]

Contenders in turn, the mean of all rounds after a warm-up, one thread. On a CPU it is processor time, which
other programs hardly lengthen. A converted model makes objects for each saved tensor, and Python's garbage
collector runs for them once in many rounds. The least and the median hide its time, which the mean has.

    vit_tiny of 12 blocks, 8 images of 32 pixels, in fp32 and under bf16 autocast: torch's, `fastvit.convert`,
    and with matmuls=True. A step makes gradients and drops them.
    a layer of (4, 8, 4, 4): torch's two layers, and fastvit's one. A multiplication before it makes the input
    an activation; its time is subtracted.

A GPU's work goes on behind the host's, whose time is by the clock. Models need timm (`pip install
'.[models]'`).
Writes results/host_DEVICE.csv and .md.
"""

import copy
import functools
import time
from collections.abc import Callable

import torch
from harness import WARM_UP, command_line, provenance, write_csv
from real_models import import_torchvision
from report import write_table
from torch import nn

import fastvit

LAYER_CALLS = 30  # one call is as short as the clock's resolution
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
Times = dict[str, float]  # seconds by direction
read_clock = time.process_time


def average(contenders: dict[str, Callable[[], Times]], rounds: int, device: str) -> dict[str, Times]:
    """Returns the mean of each direction, of each contender."""
    total: dict[str, Times] = {}
    for turn in range(-WARM_UP, rounds):
        for name, step in contenders.items():
            if device == "cuda":
                torch.cuda.synchronize()  # a full stream would make a launch wait
            taken = step()
            before = total.get(name, dict.fromkeys(taken, 0.0))
            total[name] = {way: before[way] + (turn >= 0) * seconds for way, seconds in taken.items()}
    return {name: {way: of / rounds for way, of in taken.items()} for name, taken in total.items()}


def rows_of(what: str, mean: dict[str, Times]) -> list[dict]:
    return [
        {
            "what": what,
            "contender": name,
            "direction": way,
            "mean_us": 1e6 * seconds,
            "times": mean["torch"][way] / seconds,
        }
        for name, taken in mean.items()
        for way, seconds in taken.items()
    ]


def timed(forward: Callable[[], torch.Tensor]) -> Times:
    begin = read_clock()
    result = forward()
    middle = read_clock()
    result.backward(torch.ones_like(result))
    end = read_clock()
    return {"forward": middle - begin, "backward": end - middle, "both": end - begin}


def models(rounds: int, device: str) -> list[dict]:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    eager = timm.create_model("vit_tiny_patch16_224", img_size=32).train().to(device)
    contenders = {
        "torch": eager,
        "convert": fastvit.convert(copy.deepcopy(eager)),
        "products": fastvit.convert(copy.deepcopy(eager), matmuls=True),
    }
    x = torch.randn(8, 3, 32, 32, device=device)

    def step(model: nn.Module, autocast: bool) -> Times:
        def forward() -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                return model(x).sum()

        taken = timed(forward)
        model.zero_grad()
        return taken

    rows = []
    for dtype in ("fp32", "bf16"):
        steps = {k: functools.partial(step, model, dtype == "bf16") for k, model in contenders.items()}
        rows += rows_of(f"vit_tiny, 32 pixels, {dtype}", average(steps, rounds, device))
    return rows


def layers(rounds: int, device: str) -> list[dict]:
    x = torch.randn(4, CHANNELS, 4, 4, device=device, requires_grad=True)

    def step(layer: Callable) -> Times:
        calls = [timed(lambda: layer(x * 1)) for _ in range(LAYER_CALLS)]
        return {way: sum(taken[way] for taken in calls) / LAYER_CALLS for way in calls[0]}

    rows = []
    for what, pair in LAYERS.items():
        made = {name: make().to(device) for name, make in zip(("torch", "fastvit"), pair, strict=True)}
        steps = {name: functools.partial(step, layer) for name, layer in made.items()}
        mean = average(steps | {"": functools.partial(step, nn.Identity())}, rounds, device)
        alone = mean.pop("")
        net = {name: {way: taken[way] - alone[way] for way in taken} for name, taken in mean.items()}
        rows += rows_of(what, net)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="timed turns per contender")
    options = parser.parse_args()
    if options.device == "cuda":  # threads of the driver take processor time too
        global read_clock
        read_clock = time.perf_counter
    torch.set_num_threads(1)
    found = [row for part in (models, layers) for row in part(options.rounds, options.device)]
    where = {"threads": 1, **provenance(options.device)}
    path = write_table(write_csv(f"host_{options.device}", [row | where for row in found], options.out))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
