"""A training step of one layer: InPlaceABN and SyncBatchNorm against torch's BatchNorm + activation.

    python benchmarks/bench_layers.py [--device cpu|cuda] [--threads 1 2] [--repeats 15]

Forward and backward are timed separately and added, contenders in turn, each on a new input that is in no
cache. `floor` is the time the 8 passes of a step (2R + 1W forward, 4R + 1W backward) take at the bandwidth of
a large copy in turn with the layers; ratios are medians over turns. `saved_activations` are the tensors that
a forward leaves allocated. apex's SyncBatchNorm (FASTVIT_APEX=folder of its sources) and mapillary's compiled
InPlaceABN take part where they can be imported, and on a GPU torch's two compiled.
"""

import copy
from statistics import median

import torch
from bench_ops import Layer
from contenders import peer_layers
from harness import Timer, command_line, percentiles, provenance, reuse_memory, write_csv
from torch import nn

import fastvit
from fastvit.memory import live_bytes

SHAPES = {
    "32x64x56x56": ((32, 64, 56, 56), torch.contiguous_format),
    "32x256x14x14": ((32, 256, 14, 14), torch.contiguous_format),
    "128x384x14x14": ((128, 384, 14, 14), torch.contiguous_format),
    "12608x384 tokens": ((12608, 384), torch.contiguous_format),
    "32x64x56x56 channels_last": ((32, 64, 56, 56), torch.channels_last),
}
PASSES = 8
APEX = "apex SyncBatchNorm"


def contenders(channels: int, dims: int, device: str) -> dict[str, nn.Module]:
    batch_norm = (nn.BatchNorm1d if dims == 2 else nn.BatchNorm2d)(channels)
    eager = nn.Sequential(batch_norm, nn.LeakyReLU(0.01, inplace=True))
    peers = peer_layers(channels)
    if APEX in peers:
        peers[APEX] = nn.Sequential(peers[APEX], nn.LeakyReLU(0.01, inplace=True))
    if device == "cuda":
        torch.compiler.reset()  # a function is compiled for a few shapes only, and runs eagerly then
        peers["torch.compile"] = torch.compile(copy.deepcopy(eager), dynamic=False)
    return {
        "torch": eager,
        "InPlaceABN": fastvit.InPlaceABN(channels),
        "SyncBatchNorm": nn.Sequential(fastvit.SyncBatchNorm(channels), nn.LeakyReLU(0.01, inplace=True)),
        **peers,
    }


def kept(layer: nn.Module, leaf: torch.Tensor) -> int:
    """Bytes that one forward leaves allocated, its result included."""
    return live_bytes(lambda: layer(leaf.clone()), leaf.device.type)[0]


def bench(shape_name: str, threads: int, repeats: int, timer: Timer) -> list[dict]:
    (shape, memory_format), device = SHAPES[shape_name], timer.device.type
    leaf, dy = (torch.randn(shape, device=device).contiguous(memory_format=memory_format) for _ in range(2))
    leaf.requires_grad_()
    layers = contenders(shape[1], len(shape), device)
    steps = {name: Layer(layer, leaf, dy) for name, layer in layers.items()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in layers}
    copies = []  # of the same memory every time, in turn with the layers: a shared machine's speed drifts
    for repeat in range(repeats + 2):
        speed = timer.copy_bandwidth()
        measured = {name: layer.step(timer) for name, layer in steps.items()}
        if repeat >= 2:
            copies.append(speed)
            for name in layers:
                times[name].append(measured[name])
    baseline = [t["both"] for t in times["torch"]]
    rows = []
    for name, measured in times.items():
        both = [t["both"] for t in measured]
        rows.append(
            {
                "shape": shape_name,
                "threads": threads,
                "layer": name,
                **percentiles(both),
                **{f"{way}_p50_ms": median(t[way] for t in measured) for way in ("forward", "backward")},
                "speedup": median(b / t for b, t in zip(baseline, both, strict=True)),
                "share_of_floor": median(
                    PASSES * leaf.nbytes / speed / 1e6 / t for speed, t in zip(copies, both, strict=True)
                ),
                "copy_GB_s": median(copies),
                "saved_activations": kept(layers[name], leaf) / leaf.nbytes,
            }
        )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", help="CPU threads, each in turn (default: 1 2)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps per layer")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        reuse_memory()
    timer, rows = Timer(device), []
    for threads in options.threads or ([1, 2] if device == "cpu" else [1]):
        torch.set_num_threads(threads)
        print(f"{threads} thread(s)")
        for shape in SHAPES:
            for row in bench(shape, threads, options.repeats, timer):
                rows.append(row | provenance(device))
                print(
                    f"{row['shape']:28} {row['layer']:14} {row['p50_ms']:8.2f} ms "
                    f"(forward {row['forward_p50_ms']:6.2f}, backward {row['backward_p50_ms']:6.2f})  "
                    f"{row['speedup']:5.2f}x torch  {row['share_of_floor']:5.2f} of floor  "
                    f"saved {row['saved_activations']:.2f}",
                    flush=True,
                )
    print(write_csv(f"layers_{device}", rows, options.out))


if __name__ == "__main__":
    main()
