"""A training step of one layer, by torch and by fastvit: batch norm with activation, and a ViT's layers.

    python benchmarks/bench_layers.py [--only layers|vit_ops] [--device cpu|cuda] [--threads 1 2] [--turns 15]

Forward and backward are timed separately and added, contenders in turn, each on a new input that is in no
cache. Bandwidths count the bytes that a step must read and write: a batch norm's 3 passes forward and 5
backward, and an operation's operands and results. `kept` is what a forward leaves allocated, its result
included, in tensors as large as an input. apex's SyncBatchNorm (FASTVIT_APEX=folder of its sources) and
mapillary's compiled InPlaceABN take part where they can be imported, and on a GPU torch's two under
torch.compile.

Writes layers_DEVICE.csv, of batch norms, and vit_ops_DEVICE.csv, of layer norms, activations and gates at the
sizes of a ViT-S/16 with 32 images, and their tables.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from bench_ops import few_of
from harness import (
    DTYPES,
    Timer,
    command_line,
    measure,
    provenance,
    reuse_memory,
    third_party_layers,
    write_csv,
)
from report import write_table
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import functional
from fastvit.memory import live_bytes

APEX = "apex SyncBatchNorm"
ROWS, DIM, HIDDEN = 32 * 197, 384, 1536
CAST = "fp32 to bf16"  # what autocast makes of a norm
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
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


def batch_norms(quick: bool, device: str) -> Iterator[Case]:
    """InPlaceABN and SyncBatchNorm against torch's BatchNorm and leaky_relu in place."""
    shapes = [(4, 8, 6, 6)] if quick else [(32, 64, 56, 56), (32, 256, 14, 14), (128, 384, 14, 14)]
    cases = [(shape, "", torch.contiguous_format) for shape in [*shapes, (64 if quick else 12608, 384)]]
    for shape, name, memory_format in [*cases, (shapes[0], " channels_last", torch.channels_last)]:
        x = torch.randn(shape, device=device).contiguous(memory_format=memory_format)
        channels, rows = shape[1], len(shape) == 2

        def followed(norm: nn.Module) -> nn.Module:
            return nn.Sequential(norm, nn.LeakyReLU(0.01, inplace=True))

        eager = followed((nn.BatchNorm1d if rows else nn.BatchNorm2d)(channels))
        others = third_party_layers(channels)
        if APEX in others:
            others[APEX] = followed(others[APEX])
        if device == "cuda":
            torch.compiler.reset()  # a function is compiled for a few shapes only, and runs eagerly then
            others["torch.compile"] = torch.compile(copy.deepcopy(eager), dynamic=False)
        contenders = {
            "torch": eager,
            "InPlaceABN": fastvit.InPlaceABN(channels),
            "SyncBatchNorm": followed(fastvit.SyncBatchNorm(channels)),
            **others,
        }
        named = f"{'x'.join(map(str, shape))}{' tokens' if rows else name}"
        contenders = {name: layer.to(device) for name, layer in contenders.items()}
        yield Case("batch norm", named, "fp32", [x], contenders, _moved(3 * x.nbytes, 5 * x.nbytes))


def vit_ops(quick: bool, device: str) -> Iterator[Case]:
    """LayerNorm, activations and gates of fastvit.functional, against torch's."""
    rows = 64 if quick else ROWS
    for dtype in ("fp32", "bf16", "fp16", CAST):
        kind = torch.float32 if dtype == CAST else DTYPES[dtype]
        result = torch.bfloat16 if dtype == CAST else kind
        x = torch.randn(rows, DIM, device=device).to(kind)
        weight, bias = (torch.randn(DIM, device=device).to(kind).requires_grad_() for _ in range(2))
        layer_norms = {
            "torch": lambda x, w=weight, b=bias, to=result: F.layer_norm(x, w.shape, w, b).to(to),
            "fastvit": lambda x, w=weight, b=bias, to=result: functional.layer_norm(
                x, w.shape, w, b, output_dtype=to
            ),
        }
        moved, shape = x.numel() * result.itemsize, f"{rows}x{DIM}"
        both_ways = _moved(x.nbytes + moved, 2 * x.nbytes + moved)
        yield Case("layer_norm", shape, dtype, [x], layer_norms, both_ways, [weight, bias])
        if dtype == CAST:
            return
        a, b = (torch.randn(rows, HIDDEN, device=device).to(kind) for _ in range(2))
        shape = f"{rows}x{HIDDEN}"
        for name, act in ACTIVATIONS.items():
            contenders = {"torch": act, "fastvit": lambda x, name=name: functional.act(x, name)}
            yield Case(name, shape, dtype, [a], contenders, _moved(2 * a.nbytes, 3 * a.nbytes))
        for gate, name in GATES.items():
            contenders = {
                "torch": lambda a, b, act=ACTIVATIONS[name]: act(a) * b,
                "fastvit": lambda a, b, name=name: functional.glu(a, b, name),
            }
            yield Case(gate, shape, dtype, [a, b], contenders, _moved(3 * a.nbytes, 5 * a.nbytes))


def _moved(forward: int, backward: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "both": forward + backward}


class Step:
    """Forward and backward of one contender."""

    def __init__(self, call: Callable, case: Case, timer: Timer):
        self.call, self.timer = call, timer
        self.leaves = [x.requires_grad_() for x in case.inputs]
        self.few = [few_of(x).requires_grad_() for x in self.leaves]
        self.trained = [*(call.parameters() if isinstance(call, nn.Module) else case.trained)]
        self.dy = torch.randn_like(self.forward(self.fresh()))

    def fresh(self) -> list[torch.Tensor]:
        return [leaf.clone() for leaf in self.leaves]  # like a convolution's output: no leaf, and not shared

    def forward(self, held: list[torch.Tensor]) -> torch.Tensor:
        """Empties `held`, so that nothing but autograd keeps a tensor."""
        return self.call(*(held.pop(0) for _ in range(len(held))))

    def cold(self) -> None:
        self.timer.cold()
        if self.timer.device.type == "cpu":
            y = self.call(*(x.clone() for x in self.few))
            torch.autograd.grad(y, [*self.few, *self.trained], torch.ones_like(y))

    def __call__(self) -> dict[str, float]:
        """Milliseconds by direction."""
        held = self.fresh()
        self.cold()
        forward = self.timer(lambda: held.append(self.forward(held)))
        self.cold()
        wanted = [*self.leaves, *self.trained]
        backward = self.timer(lambda: torch.autograd.grad(held.pop(), wanted, self.dy))
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def kept(self) -> float:
        leaves = live_bytes(lambda: self.forward(self.fresh()), self.timer.device.type)[0]
        return leaves / self.leaves[0].nbytes


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    steps = {name: Step(call, case, timer) for name, call in case.contenders.items()}
    rows = measure(steps, timer, turns, case.inputs[0].nbytes, case.moved)
    kept = {name: step.kept() for name, step in steps.items()}
    of = {"what": case.what, "shape": case.shape, "dtype": case.dtype, "threads": torch.get_num_threads()}
    return [of | row | {"kept": kept[row["contender"]]} for row in rows]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", default=["layers", "vit_ops"], choices=["layers", "vit_ops"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="CPU threads, each in turn")
    parser.add_argument("--turns", type=int, default=15, help="timed steps of a contender")
    parser.add_argument("--quick", action="store_true", help="small inputs: is the program in order?")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        reuse_memory()
    timer, where = Timer(device, 1 << 20 if options.quick else None), provenance(device)
    for name in options.only:
        rows: list[dict] = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            for case in {"layers": batch_norms, "vit_ops": vit_ops}[name](options.quick, device):
                rows += [row | where for row in bench(case, timer, options.turns)]
                print(f"{case.what} {case.shape} {case.dtype}, {threads} thread(s)", flush=True)
                write_table(write_csv(f"{name}_{device}", rows, options.out))


if __name__ == "__main__":
    main()
