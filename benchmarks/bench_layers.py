"""A training step of one layer, by torch and by fastvit: batch norm with activation, and a ViT's layers.

    python benchmarks/bench_layers.py [--device cpu|cuda] [--threads 1 2] [--turns N] [--out FOLDER]
    python benchmarks/bench_layers.py --quick --out /tmp/smoke      # tests the program

Forward and backward are timed separately and added, contenders in turn, each on a new input that is in no
cache. Bandwidths count the bytes that a step must read and write: a batch norm's 3 passes forward and 5
backward, and an operation's operands and results. `kept` is what a forward leaves allocated, its result
included, in tensors as large as an input. torch.compile compiles torch's layers for each shape
(dynamic=False); the layers of a ViT on a GPU only. apex's SyncBatchNorm (FASTVIT_APEX=folder of its sources)
and mapillary's compiled InPlaceABN take part where they can be imported.

Writes layers_DEVICE.csv after every case, and its table. A CPU computes batch norms in fp32 and the layers of
a ViT-S/16 with 32 images in three dtypes; a GPU computes in bf16, with 128 and 256 images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
from bench_ops import few_of
from harness import (
    COMPILED,
    DTYPES,
    Taken,
    Timer,
    command_line,
    measure,
    provenance,
    reuse_memory,
    third_party_layers,
    timer_for,
    write_csv,
)
from report import write_table
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import functional
from fastvit.memory import live_bytes

APEX = "apex SyncBatchNorm"
CAST = "fp32 to bf16"  # what autocast makes of a norm
POINTWISE = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "swiglu": lambda a, b: F.silu(a) * b,
    "geglu": lambda a, b: F.gelu(a) * b,
}
GATES = {"swiglu": "silu", "geglu": "gelu"}


@dataclass
class Case:
    """Contenders over the same inputs, and the bytes that each direction has to move."""

    what: str
    shape: str
    dtype: str
    inputs: list[torch.Tensor]
    contenders: dict[str, Callable]
    moved: dict[str, int]
    trained: Sequence[torch.Tensor] = field(default_factory=list)  # beside a module's parameters


def compiled(work: Callable, quick: bool) -> Callable:
    """`work` under torch.compile; --quick traces it, and leaves out Inductor, which takes seconds."""
    torch.compiler.reset()  # a function is compiled for a few shapes only, and runs eagerly then
    return torch.compile(work, dynamic=False, backend="aot_eager" if quick else "inductor")


def batch_norms(quick: bool, device: str) -> Iterator[Case]:
    """fastvit's layers against torch's BatchNorm and leaky_relu, in place where it is not compiled."""
    last, planes, dtype = torch.channels_last, torch.contiguous_format, "fp32"
    if quick:
        cases = [((4, 8, 6, 6), planes), ((64, 384), planes), ((4, 8, 6, 6), last)]
    elif device == "cuda":
        shapes, dtype = [(128, 256, 56, 56), (128, 1024, 14, 14)], "bf16"
        cases = [(shape, layout) for shape in shapes for layout in (last, planes)]
        cases += [((128 * 197, 768), planes), ((16, 256, 28, 28), last)]
    else:
        shapes = [(32, 64, 56, 56), (32, 256, 14, 14), (128, 384, 14, 14), (12608, 384)]
        cases = [*((shape, planes) for shape in shapes), (shapes[0], last)]
    for shape, memory_format in cases:
        x = torch.randn(shape, device=device).to(DTYPES[dtype]).contiguous(memory_format=memory_format)
        channels, rows = shape[1], len(shape) == 2

        def followed(norm: nn.Module, inplace: bool = True) -> nn.Module:
            return nn.Sequential(norm, nn.LeakyReLU(0.01, inplace))

        norm = nn.BatchNorm1d if rows else nn.BatchNorm2d
        others = third_party_layers(channels)
        if APEX in others:
            others[APEX] = followed(others[APEX])
        contenders = {
            "torch": followed(norm(channels)),
            # Inductor makes scalar code of leaky_relu in place on a CPU, which is ten times slower.
            COMPILED: followed(norm(channels), inplace=False),
            "BatchNormAct": fastvit.BatchNormAct(channels, activation="leaky_relu"),
            "InPlaceABN": fastvit.InPlaceABN(channels),
            "SyncBatchNorm": followed(fastvit.SyncBatchNorm(channels)),
            **others,
        }
        layers = {name: layer.to(device) for name, layer in contenders.items()}
        layers[COMPILED] = compiled(layers[COMPILED], quick)
        named = _name(shape) + (" tokens" if rows else " channels_last" if memory_format is last else "")
        yield Case("batch norm", named, dtype, [x], layers, _moved(3 * x.nbytes, 5 * x.nbytes))


def vit_layers(quick: bool, device: str) -> Iterator[Case]:
    """LayerNorm, activations and gates of fastvit.functional, against torch's."""
    rows, dtypes, dims, hidden, names = 32 * 197, ["fp32", "bf16", "fp16"], [384], [1536], list(POINTWISE)
    if device == "cuda":
        rows, dtypes, dims, hidden = 256 * 197, ["bf16"], [768, 384], [768, 384]
        names = ["gelu", "silu", "swiglu"]
    rows = 64 if quick else rows
    for dtype in dtypes:
        for dim in dims:
            yield _layer_norm((rows, dim), dtype, quick, device)
        for dim in hidden:
            a, b = (torch.randn(rows, dim, device=device).to(DTYPES[dtype]) for _ in range(2))
            for name in names:
                yield _pointwise(name, [a, b] if name in GATES else [a], dtype, quick)
    if device == "cpu":
        yield _layer_norm((rows, dims[0]), CAST, quick, device)


def _layer_norm(shape: tuple[int, int], dtype: str, quick: bool, device: str) -> Case:
    kind, result = (torch.float32, torch.bfloat16) if dtype == CAST else (DTYPES[dtype], DTYPES[dtype])
    x = torch.randn(shape, device=device).to(kind)
    weight, bias = (torch.randn(shape[1], device=device).to(kind).requires_grad_() for _ in range(2))

    def layer_norm(x):
        return F.layer_norm(x, weight.shape, weight, bias).to(result)

    def own(x):
        return functional.layer_norm(x, weight.shape, weight, bias, output_dtype=result)

    moved = x.numel() * result.itemsize
    both_ways = _moved(x.nbytes + moved, 2 * x.nbytes + moved)
    contenders = _beside(layer_norm, own, quick, device)
    return Case("layer_norm", _name(shape), dtype, [x], contenders, both_ways, [weight, bias])


def _pointwise(name: str, operands: list[torch.Tensor], dtype: str, quick: bool) -> Case:
    x, n = operands[0], len(operands)

    def own(*operands):
        return functional.gated_act(*operands, GATES[name]) if n == 2 else functional.act(*operands, name)

    contenders = _beside(POINTWISE[name], own, quick, x.device.type)
    return Case(
        name, _name(x.shape), dtype, operands, contenders, _moved((n + 1) * x.nbytes, (2 * n + 1) * x.nbytes)
    )


def _beside(torchs: Callable, own: Callable, quick: bool, device: str) -> dict[str, Callable]:
    others = {COMPILED: compiled(torchs, quick)} if device == "cuda" else {}
    return {"torch": torchs, **others, "fastvit": own}


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _moved(forward: int, backward: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "both": forward + backward}


class Step:
    """Forward and backward of one contender."""

    def __init__(self, name: str, case: Case, timer: Timer, dys: list[torch.Tensor]):
        self.call, self.timer, self.dys = case.contenders[name], timer, dys
        self.work = name, case.what, case.shape, case.dtype
        self.leaves = [x.requires_grad_() for x in case.inputs]
        self.few = [few_of(x).requires_grad_() for x in self.leaves]
        self.trained = [*(self.call.parameters() if isinstance(self.call, nn.Module) else case.trained)]
        _, self.reps = timer.rotation(self.leaves[0].nbytes, case.moved["both"])

    def fresh(self) -> list[torch.Tensor]:
        return [leaf.clone() for leaf in self.leaves]  # like a convolution's output: no leaf, and not shared

    def forward(self, operands: list[torch.Tensor]) -> torch.Tensor:
        """Pops the operands from the list, so that only autograd refers to them during the forward."""
        return self.call(*(operands.pop(0) for _ in range(len(operands))))

    def backward(self, y: torch.Tensor, dy: torch.Tensor) -> object:
        return torch.autograd.grad(y, [*self.leaves, *self.trained], dy)

    def warm(self) -> None:
        y = self.call(*(x.clone() for x in self.few))
        torch.autograd.grad(y, [*self.few, *self.trained], torch.ones_like(y))

    def __call__(self) -> dict[str, Taken]:
        """What a call takes, by direction."""
        inputs, ys = [self.fresh() for _ in range(self.reps)], []
        calls = [lambda own=own: ys.append(self.forward(own)) for own in inputs]
        forward = self.timer(calls, ("forward", *self.work), self.warm)
        dys = islice(cycle(self.dys), self.reps)
        backward = self.timer(
            [lambda dy=dy: self.backward(ys.pop(0), dy) for dy in dys], ("backward", *self.work), self.warm
        )
        both = Taken(*map(sum, zip(forward, backward, strict=True)))
        return {"forward": forward, "backward": backward, "both": both}

    def kept(self) -> float:
        leaves = live_bytes(lambda: self.forward(self.fresh()), self.timer.device.type)[0]
        return leaves / self.leaves[0].nbytes


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    nbytes = case.inputs[0].nbytes
    y = case.contenders["torch"](*(x.clone() for x in case.inputs)).detach()
    dys = [torch.randn_like(y) for _ in range(timer.rotation(nbytes, nbytes)[0])]
    steps = {name: Step(name, case, timer, dys) for name in case.contenders}
    rows = measure(steps, timer, turns, nbytes, case.moved)
    kept = {name: steps[name].kept() for name in dict.fromkeys(row["contender"] for row in rows)}
    of = {"what": case.what, "shape": case.shape, "dtype": case.dtype, "threads": torch.get_num_threads()}
    return [of | row | {"kept": kept[row["contender"]]} for row in rows]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="CPU threads, each in turn")
    parser.add_argument("--turns", type=int, help="timings of a contender (default: 15, on a GPU 7)")
    parser.add_argument("--quick", action="store_true", help="small inputs: is the program in order?")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        reuse_memory()
    timer, where = timer_for(device, options.quick), provenance(device)
    rows: list[dict] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for cases in (batch_norms, vit_layers):
            for case in cases(options.quick, device):
                rows += [row | where for row in bench(case, timer, options.turns or timer.turns)]
                write_table(write_csv(f"layers_{device}", rows, options.out))
                print(f"{case.what} {case.shape} {case.dtype}, {threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
