"""A training step of a stack of conv + BatchNorm + activation: BatchNormAct against torch's layers.

    python benchmarks/bench_stacks.py [--threads 2] [--repeats 9] [--device cpu|cuda]

Contenders take turns within a repeat; `ratio` is the median over repeats of the step's time against torch's
in the same repeat. `live_MB` is the memory that a forward leaves allocated, by the allocator.
"""

import argparse
from statistics import median

import torch
from harness import Timer, percentiles, provenance, reuse_memory, write_csv
from torch import nn

import fastvit
from fastvit.memory import live_bytes

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "hardswish": nn.Hardswish}
SHAPES = {  # input, kernel of the convolutions, memory format
    "8x64x56x56 1x1": ((8, 64, 56, 56), 1, torch.contiguous_format),
    "8x64x56x56 3x3": ((8, 64, 56, 56), 3, torch.contiguous_format),
    "8x128x28x28 1x1 channels_last": ((8, 128, 28, 28), 1, torch.channels_last),
}
DEPTH = 4
CONTENDERS = ("torch", "keep", "recompute")


def stack(contender: str, activation: str, channels: int, kernel: int) -> nn.Sequential:
    torch.manual_seed(0)

    def norm() -> nn.Module:
        if contender != "torch":
            return fastvit.BatchNormAct(channels, activation=activation, memory=contender)
        in_place = {} if activation == "gelu" else {"inplace": True}  # as models write it
        return nn.Sequential(nn.BatchNorm2d(channels), ACTIVATIONS[activation](**in_place))

    convs = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*(layer for conv in convs for layer in (conv, norm())), nn.Conv2d(channels, 4, 1))


def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with fastvit.recompute_scope():
        return net(x).sum()


def bench(shape_name: str, activation: str, threads: int | str, repeats: int, timer: Timer) -> list[dict]:
    shape, kernel, memory_format = SHAPES[shape_name]
    x = torch.randn(shape, device=timer.device).contiguous(memory_format=memory_format)
    nets = {
        name: stack(name, activation, shape[1], kernel).to(timer.device, memory_format=memory_format)
        for name in CONTENDERS
    }
    times: dict[str, list[float]] = {name: [] for name in nets}
    for repeat in range(repeats + 2):
        for name, net in nets.items():
            milliseconds = timer(lambda net=net: forward(net, x).backward())
            if repeat >= 2:
                times[name].append(milliseconds)
    return [
        {
            "shape": shape_name,
            "activation": activation,
            "threads": threads,
            "layer": name,
            **percentiles(times[name]),
            "ratio": median(ours / theirs for ours, theirs in zip(times[name], times["torch"], strict=True)),
            "live_MB": live_bytes(lambda net=net: forward(net, x), timer.device)[0] / 1e6,
        }
        for name, net in nets.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps per contender")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    reuse_memory()
    torch.set_num_threads(options.threads)
    timer, rows = Timer(options.device), []
    for shape in SHAPES:
        for activation in ACTIVATIONS:
            threads = options.threads if options.device == "cpu" else ""
            for row in bench(shape, activation, threads, options.repeats, timer):
                rows.append(row | provenance(options.device))
                print(
                    f"{shape:30} {activation:10} {row['layer']:10} {row['p50_ms']:8.2f} ms  "
                    f"{row['ratio']:5.2f} of torch's time  {row['live_MB']:7.1f} MB",
                    flush=True,
                )
    print(write_csv(f"stacks_{options.device}", rows))


if __name__ == "__main__":
    main()
