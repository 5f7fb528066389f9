"""Times a training step of one layer, torch's and fastvit's: batch norm with activation, and a ViT's layers.

    python benchmarks/bench_layers.py [--device cpu|cuda] [--threads 1 2] [--turns N] [--out FOLDER]
    python benchmarks/bench_layers.py --quick --out /tmp/smoke      # tests the program

Contenders take turns, each on a new input that is in no cache. Forward and backward are timed separately and
added. Bandwidths count the bytes that a step must read and write. A batch norm makes 3 passes over the
activation forward and 5 backward; other layers read their operands and write their results once. `kept` is
the memory that a forward leaves allocated, its result included, as a multiple of the input. torch.compile
compiles torch's layers for each shape (dynamic=False). apex's SyncBatchNorm (FASTVIT_APEX=folder of its
sources) and mapillary's compiled InPlaceABN take part if they can be imported.

The program writes layers_DEVICE.csv after every case, and its table. A CPU computes batch norms in fp32 and
bf16, and the layers of a ViT-S/16 with 32 images in three dtypes; a GPU computes in bf16, with 128 and 256
images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, product

import torch
from bench_ops import warmup_slice
from conditions import provenance
from harness import (
    APEX,
    COMPILED,
    DTYPES,
    Timer,
    Timing,
    make_parser,
    make_timer,
    measure_in_turns,
    restart_with_reused_memory,
    third_party_layers,
    write_csv,
)
from result_tables import write_table
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import functional
from fastvit.memory import live_bytes

CAST = "fp32 to bf16"  # the dtype of a case in which a norm takes fp32 and returns bf16, as under autocast
POINTWISE = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "swiglu": lambda a, b: F.silu(a) * b,
    "geglu": lambda a, b: F.gelu(a) * b,
}
GATES = {"swiglu": "silu", "geglu": "gelu"}  # a gate -> its activation, as fastvit names it


@dataclass
class Case:
    """Contenders over the same inputs, and the bytes that each direction has to move."""

    what: str
    shape: str
    dtype: str
    inputs: list[torch.Tensor]
    contenders: dict[str, Callable]
    bytes_moved: dict[str, int]
    trained_tensors: Sequence[torch.Tensor] = field(default_factory=list)  # a function's weight and bias


def compile_layer(layer: Callable, quick: bool) -> Callable:
    """Returns `layer` under torch.compile. `quick` traces it without Inductor, which takes seconds."""
    torch.compiler.reset()  # torch compiles a function for a few shapes only, and runs it eagerly for more.
    return torch.compile(layer, dynamic=False, backend="aot_eager" if quick else "inductor")


def batch_norms(quick: bool, device: str) -> Iterator[Case]:
    """Yields fastvit's layers against torch's BatchNorm and leaky_relu, in place unless compiled."""
    nhwc, nchw, dtypes = torch.channels_last, torch.contiguous_format, ["fp32"]
    if quick:
        inputs = [((4, 8, 6, 6), nchw), ((64, 384), nchw), ((4, 8, 6, 6), nhwc)]
    elif device == "cuda":
        shapes, dtypes = [(128, 256, 56, 56), (128, 1024, 14, 14)], ["bf16"]
        inputs = [(shape, layout) for shape in shapes for layout in (nhwc, nchw)]
        inputs += [((128 * 197, 768), nchw), ((16, 256, 28, 28), nhwc)]  # A ViT has 197 tokens per image.
    else:
        shapes = [(32, 64, 56, 56), (32, 256, 14, 14), (128, 384, 14, 14), (12608, 384)]
        inputs, dtypes = [*((shape, nchw) for shape in shapes), (shapes[0], nhwc)], ["fp32", "bf16"]
    for dtype, (shape, memory_format) in product(dtypes, inputs):
        x = torch.randn(shape, device=device).to(DTYPES[dtype]).contiguous(memory_format=memory_format)
        channels, is_2d = shape[1], len(shape) == 2

        def with_leaky_relu(norm: nn.Module, inplace: bool = True) -> nn.Module:
            return nn.Sequential(norm, nn.LeakyReLU(0.01, inplace))

        norm_class = nn.BatchNorm1d if is_2d else nn.BatchNorm2d
        third_party = third_party_layers(channels)
        if APEX in third_party:
            third_party[APEX] = with_leaky_relu(third_party[APEX])
        contenders = {
            "torch": with_leaky_relu(norm_class(channels)),
            # Inductor makes scalar code of leaky_relu in place on a CPU, which is ten times slower.
            COMPILED: with_leaky_relu(norm_class(channels), inplace=False),
            "BatchNormAct": fastvit.BatchNormAct(channels, activation="leaky_relu"),
            "InPlaceABN": fastvit.InPlaceABN(channels),
            "SyncBatchNorm": with_leaky_relu(fastvit.SyncBatchNorm(channels)),
            **third_party,
        }
        layers = {name: layer.to(device) for name, layer in contenders.items()}
        layers[COMPILED] = compile_layer(layers[COMPILED], quick)
        shape_text = _format_shape(shape) + (
            " tokens" if is_2d else " channels_last" if memory_format is nhwc else ""
        )
        yield Case(
            "batch norm", shape_text, dtype, [x], layers, _bytes_by_direction(3 * x.nbytes, 5 * x.nbytes)
        )


def vit_layers(quick: bool, device: str) -> Iterator[Case]:
    """Yields LayerNorm, activations and gates of fastvit.functional against torch's, over (rows, dim)."""
    rows, dtypes, names = 32 * 197, ["fp32", "bf16", "fp16"], list(POINTWISE)  # 197 tokens per image
    dims, hidden_dims = [384], [1536]  # of a block, and of its MLP
    if device == "cuda":
        rows, dtypes, dims, hidden_dims = 256 * 197, ["bf16"], [768, 384], [768, 384]
        names = ["gelu", "silu", "swiglu"]
    rows = 64 if quick else rows
    for dtype in dtypes:
        for dim in dims:
            yield _layer_norm((rows, dim), dtype, quick, device)
        for dim in hidden_dims:
            a, b = (torch.randn(rows, dim, device=device).to(DTYPES[dtype]) for _ in range(2))
            for name in names:
                yield _pointwise(name, [a, b] if name in GATES else [a], dtype, quick)
    if device == "cpu":
        yield _layer_norm((rows, dims[0]), CAST, quick, device)


def _layer_norm(shape: tuple[int, int], dtype: str, quick: bool, device: str) -> Case:
    dtype_in, dtype_out = (torch.float32, torch.bfloat16) if dtype == CAST else (DTYPES[dtype], DTYPES[dtype])
    x = torch.randn(shape, device=device).to(dtype_in)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype_in).requires_grad_() for _ in range(2))

    def torch_layer_norm(x):
        return F.layer_norm(x, weight.shape, weight, bias).to(dtype_out)

    def fastvit_layer_norm(x):
        return functional.layer_norm(x, weight.shape, weight, bias, output_dtype=dtype_out)

    result_bytes = x.numel() * dtype_out.itemsize
    bytes_moved = _bytes_by_direction(x.nbytes + result_bytes, 2 * x.nbytes + result_bytes)
    contenders = _make_contenders(torch_layer_norm, fastvit_layer_norm, quick)
    return Case("layer_norm", _format_shape(shape), dtype, [x], contenders, bytes_moved, [weight, bias])


def _pointwise(name: str, operands: list[torch.Tensor], dtype: str, quick: bool) -> Case:
    x, num_operands = operands[0], len(operands)

    def fastvit_function(*operands):
        if name in GATES:
            return functional.gated_act(*operands, GATES[name])
        return functional.act(*operands, name)

    contenders = _make_contenders(POINTWISE[name], fastvit_function, quick)
    # The forward reads all operands and writes y. The backward reads dy too, and writes a gradient for each.
    bytes_moved = _bytes_by_direction((num_operands + 1) * x.nbytes, (2 * num_operands + 1) * x.nbytes)
    return Case(name, _format_shape(x.shape), dtype, operands, contenders, bytes_moved)


def _make_contenders(
    torch_function: Callable, fastvit_function: Callable, quick: bool
) -> dict[str, Callable]:
    compiled = compile_layer(torch_function, quick)
    return {"torch": torch_function, COMPILED: compiled, "fastvit": fastvit_function}


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _bytes_by_direction(forward: int, backward: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "both": forward + backward}


class Step:
    """Forward and backward of one contender of a case; a call times both."""

    def __init__(self, name: str, case: Case, timer: Timer, dys: list[torch.Tensor]):
        self.layer, self.timer, self.dys = case.contenders[name], timer, dys
        self.key = name, case.what, case.shape, case.dtype
        self.leaves = [x.requires_grad_() for x in case.inputs]
        self.warmup_inputs = [warmup_slice(x).requires_grad_() for x in self.leaves]
        is_module = isinstance(self.layer, nn.Module)
        self.trained_tensors = [*(self.layer.parameters() if is_module else case.trained_tensors)]
        _, self.num_calls = timer.plan_rotation(self.leaves[0].nbytes, case.bytes_moved["both"])

    def copy_inputs(self) -> list[torch.Tensor]:
        """Returns copies that, like the output of a convolution, are no leaves and have one user."""
        return [leaf.clone() for leaf in self.leaves]

    def forward(self, operands: list[torch.Tensor]) -> torch.Tensor:
        """Runs the layer. The operands leave the list, so that only autograd refers to them meanwhile."""
        return self.layer(*(operands.pop(0) for _ in range(len(operands))))

    def backward(self, y: torch.Tensor, dy: torch.Tensor) -> object:
        return torch.autograd.grad(y, [*self.leaves, *self.trained_tensors], dy)

    def warm_up(self) -> None:
        y = self.layer(*(x.clone() for x in self.warmup_inputs))
        torch.autograd.grad(y, [*self.warmup_inputs, *self.trained_tensors], torch.ones_like(y))

    def __call__(self) -> dict[str, Timing]:
        """Returns the timing of each direction."""
        inputs, ys = [self.copy_inputs() for _ in range(self.num_calls)], []
        calls = [lambda operands=operands: ys.append(self.forward(operands)) for operands in inputs]
        forward = self.timer(calls, ("forward", *self.key), self.warm_up)
        dys = islice(cycle(self.dys), self.num_calls)
        calls = [lambda dy=dy: self.backward(ys.pop(0), dy) for dy in dys]
        backward = self.timer(calls, ("backward", *self.key), self.warm_up)
        step = Timing(*map(sum, zip(forward, backward, strict=True)))
        return {"forward": forward, "backward": backward, "both": step}

    def measure_kept(self) -> float:
        """Returns the bytes that a forward leaves allocated, divided by the bytes of the input."""
        kept_bytes = live_bytes(lambda: self.forward(self.copy_inputs()), self.timer.device.type)[0]
        return kept_bytes / self.leaves[0].nbytes


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    """Returns the rows of the contenders of one case."""
    nbytes = case.inputs[0].nbytes
    y = case.contenders["torch"](*(x.clone() for x in case.inputs)).detach()
    dys = [torch.randn_like(y) for _ in range(timer.plan_rotation(nbytes, nbytes)[0])]
    steps = {name: Step(name, case, timer, dys) for name in case.contenders}
    rows = measure_in_turns(steps, timer, turns, nbytes, case.bytes_moved)
    kept = {name: steps[name].measure_kept() for name in dict.fromkeys(row["contender"] for row in rows)}
    case_columns = {"what": case.what, "shape": case.shape, "dtype": case.dtype}
    case_columns["threads"] = torch.get_num_threads()
    return [case_columns | row | {"kept": kept[row["contender"]]} for row in rows]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], help="CPU threads, each number in turn"
    )
    parser.add_argument("--turns", type=int, help="timings of a contender (default: 15 on a CPU, 7 on a GPU)")
    parser.add_argument("--quick", action="store_true", help="small inputs, to test the program")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        restart_with_reused_memory()
    timer, conditions = make_timer(device, options.quick), provenance(device)
    rows: list[dict] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for make_cases in (batch_norms, vit_layers):
            for case in make_cases(options.quick, device):
                rows += [row | conditions for row in bench(case, timer, options.turns or timer.default_turns)]
                write_table(write_csv(f"layers_{device}", rows, options.out))
                print(f"{case.what} {case.shape} {case.dtype}, {threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
