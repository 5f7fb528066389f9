"""Times the host's share of a step, Python and dispatch, on tensors so small that kernels take little time.

    python benchmarks/bench_host.py [--device cpu|cuda] [--rounds 200] [--out FOLDER]

Contenders take turns on one thread. A result is the mean of all rounds after a warm-up. On a CPU the time is
processor time, which other programs hardly lengthen. A converted model makes objects for each saved tensor,
and Python's garbage collector runs for them once in many rounds. The mean includes the collector's time,
which the least and the median would hide. The column `times` is a ratio: torch's time over the contender's.

    vit_tiny    A ViT of 12 blocks takes 8 images of 32 pixels, in fp32 and under bf16 autocast. Contenders
                are torch's model, `fastvit.convert` of the model (convert), and the same with matmuls=True
                (matmuls). A step makes gradients and drops them.
    BatchNorm   torch's norm and activation, or one layer of fastvit, take an input of (4, 8, 4, 4). A
                multiplication makes the input an activation; the time of the multiplication is subtracted.

With a GPU the host's time is wall time, and the host does not wait for the GPU. Models need timm
(`pip install '.[models]'`). The program writes results/host_DEVICE.csv and .md.
"""

import copy
import functools
import time
from collections.abc import Callable

import torch
from conditions import provenance
from harness import WARM_UP_TURNS, make_parser, write_csv
from real_models import import_torchvision
from result_tables import write_table
from torch import nn

import fastvit

LAYER_CALLS = 30  # calls in one timing: one call is as short as the clock's resolution
CHANNELS = 8
LAYERS = {  # a row's name -> functions that make torch's layers, and fastvit's layer for the same work
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
SecondsByDirection = dict[str, float]
read_clock = time.process_time  # `main` replaces this clock for a GPU.


def mean_by_contender(
    contenders: dict[str, Callable[[], SecondsByDirection]], rounds: int, device: str
) -> dict[str, SecondsByDirection]:
    """Runs the contenders in turn. Returns the mean time of each contender in each direction."""
    means: dict[str, SecondsByDirection] = {}
    for turn in range(-WARM_UP_TURNS, rounds):
        for name, run_step in contenders.items():
            if device == "cuda":
                torch.cuda.synchronize()  # The queue is empty, so that no launch has to wait for a place.
            for direction, seconds in run_step().items():
                if turn >= 0:  # Negative turns are the warm-up.
                    mean = means.setdefault(name, {})
                    mean[direction] = mean.get(direction, 0.0) + seconds / rounds
    return means


def make_rows(what: str, means: dict[str, SecondsByDirection]) -> list[dict]:
    """Returns a row for each contender and direction, with torch's time over the contender's."""
    return [
        {
            "what": what,
            "contender": name,
            "direction": direction,
            "mean_us": 1e6 * seconds,
            "times": means["torch"][direction] / seconds,
        }
        for name, mean in means.items()
        for direction, seconds in mean.items()
    ]


def time_step(forward: Callable[[], torch.Tensor]) -> SecondsByDirection:
    """Returns the host's seconds for a forward, for its backward, and for both."""
    begin = read_clock()
    result = forward()
    middle = read_clock()
    result.backward(torch.ones_like(result))
    end = read_clock()
    return {"forward": middle - begin, "backward": end - middle, "both": end - begin}


def bench_models(rounds: int, device: str) -> list[dict]:
    """Returns the rows of a ViT, eager and converted."""
    import_torchvision()
    import timm

    torch.manual_seed(0)
    eager = timm.create_model("vit_tiny_patch16_224", img_size=32).train().to(device)
    contenders = {
        "torch": eager,
        "convert": fastvit.convert(copy.deepcopy(eager)),
        "matmuls": fastvit.convert(copy.deepcopy(eager), matmuls=True),
    }
    x = torch.randn(8, 3, 32, 32, device=device)

    def run_step(model: nn.Module, uses_autocast: bool) -> SecondsByDirection:
        def forward() -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=uses_autocast):
                return model(x).sum()

        seconds = time_step(forward)
        model.zero_grad()
        return seconds

    rows = []
    for dtype in ("fp32", "bf16"):
        steps = {k: functools.partial(run_step, model, dtype == "bf16") for k, model in contenders.items()}
        rows += make_rows(f"vit_tiny, 32 pixels, {dtype}", mean_by_contender(steps, rounds, device))
    return rows


def bench_layers(rounds: int, device: str) -> list[dict]:
    """Returns the rows of LAYERS, without the time of the multiplication before each layer."""
    x = torch.randn(4, CHANNELS, 4, 4, device=device, requires_grad=True)

    def run_step(layer: Callable) -> SecondsByDirection:
        calls = [time_step(lambda: layer(x * 1)) for _ in range(LAYER_CALLS)]
        return {direction: sum(call[direction] for call in calls) / LAYER_CALLS for direction in calls[0]}

    rows = []
    for what, factories in LAYERS.items():
        layers = {k: make().to(device) for k, make in zip(("torch", "fastvit"), factories, strict=True)}
        layers["identity"] = nn.Identity()
        steps = {name: functools.partial(run_step, layer) for name, layer in layers.items()}
        means = mean_by_contender(steps, rounds, device)
        identity_mean = means.pop("identity")
        for mean in means.values():
            mean |= {direction: mean[direction] - identity_mean[direction] for direction in mean}
        rows += make_rows(what, means)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of each contender")
    options = parser.parse_args()
    if options.device == "cuda":  # Processor time would include that of the driver's threads.
        global read_clock
        read_clock = time.perf_counter
    torch.set_num_threads(1)
    rows = bench_models(options.rounds, options.device) + bench_layers(options.rounds, options.device)
    conditions = {"threads": 1, **provenance(options.device)}
    path = write_table(write_csv(f"host_{options.device}", [row | conditions for row in rows], options.out))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
