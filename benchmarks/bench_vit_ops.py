"""LayerNorm, activations and gates, forward and backward, against torch's and against the copy bandwidth.

    python benchmarks/bench_vit_ops.py [--device cpu|cuda] [--threads 1] [--repeats 15] [--out FOLDER]
    python benchmarks/bench_vit_ops.py --quick --out /tmp/smoke     # is the program in order?

Contenders in turn, on data that no cache holds, of the sizes that a ViT-S/16 has at batch 32: what a norm
and what an MLP sees. Times on a CPU are the process's, which other programs hardly lengthen. GB/s
counts what the operation has to read and write at least, whoever is measured. `times` is the median over
turns of torch's time by fastvit's in the same turn. Writes vit_ops_DEVICE.csv; `python benchmarks/report.py
--name vit_ops_cpu` makes the table.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from harness import Timer, command_line, percentiles, provenance, reuse_memory, write_csv

from fastvit import functional

ROWS, DIM, HIDDEN = 32 * 197, 384, 1536
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CAST = "fp32 to bf16"  # what autocast makes of a norm


class ProcessTimer(Timer):
    """A Timer that counts processor time."""

    def __call__(self, work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) * 1e3


def layer_norms(dtype: str) -> dict[str, Callable]:
    def torchs(x, weight, bias):
        y = F.layer_norm(x, weight.shape, weight, bias)
        return y.bfloat16() if dtype == CAST else y

    def ours(x, weight, bias):
        output_dtype = torch.bfloat16 if dtype == CAST else None
        return functional.layer_norm(x, weight.shape, weight, bias, output_dtype=output_dtype)

    return {"torch": torchs, "fastvit": ours}


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
GATES = {"swiglu": "silu", "geglu": "gelu"}


def operations(dtype: str) -> dict[str, tuple[dict[str, Callable], int, bool]]:
    """Contenders, columns, and whether it takes weight and bias, or as many operands as it has arguments."""
    found = {"layer_norm": (layer_norms(dtype), DIM, True)}
    if dtype == CAST:
        return found
    for name, torchs in ACTIVATIONS.items():
        contenders = {"torch": torchs, "fastvit": lambda x, name=name: functional.act(x, name)}
        found[name] = (contenders, HIDDEN, False)
    for name, activation in GATES.items():
        act = ACTIVATIONS[activation]
        contenders = {
            "torch": lambda a, b, act=act: act(a) * b,
            "fastvit": lambda a, b, activation=activation: functional.glu(a, b, activation),
        }
        found[name] = (contenders, HIDDEN, False)
    return found


def bench(op: str, dtype: str, rows: int, repeats: int, timer: Timer) -> list[dict]:
    contenders, columns, affine = operations(dtype)[op]
    kind = torch.float32 if dtype == CAST else DTYPES[dtype]
    operands, device = 2 if op in GATES else 1, timer.device
    leaves = [torch.randn(rows, columns, device=device).to(kind) for _ in range(operands)]
    leaves += [torch.randn(columns, device=device).to(kind) for _ in range(2 if affine else 0)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = contenders["fastvit"](*leaves)
    dy, size = torch.randn(rows, columns, device=device).to(y.dtype), leaves[0].nbytes
    moved = {"forward": operands * size + y.nbytes, "backward": 2 * operands * size + y.nbytes}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    copies = []
    for repeat in range(repeats + 2):
        copy = timer.copy_bandwidth()
        for name, call in contenders.items():
            held = []
            timer.cold()
            step = {"forward": timer(lambda: held.append(call(*leaves)))}  # noqa: B023
            timer.cold()
            step["backward"] = timer(lambda: torch.autograd.grad(held.pop(), leaves, dy))  # noqa: B023
            if repeat >= 2:
                times[name].append(step)
        if repeat >= 2:
            copies.append(copy)
    rows_ = []
    for direction, nbytes in moved.items():
        torchs = [step[direction] for step in times["torch"]]
        for name, steps in times.items():
            own = [step[direction] for step in steps]
            rows_.append(
                {
                    "op": op,
                    "shape": f"{rows}x{columns}",
                    "dtype": dtype,
                    "direction": direction,
                    "contender": name,
                    **percentiles(own),
                    "GB_s": nbytes / median(own) / 1e6,
                    "copy_GB_s": median(copies),
                    "times": median(t / o for t, o in zip(torchs, own, strict=True)),
                }
            )
    return rows_


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15, help="timed steps per contender")
    parser.add_argument("--quick", action="store_true", help="few rows: is the program in order?")
    options = parser.parse_args()
    if options.device == "cpu":
        reuse_memory()
    torch.set_num_threads(options.threads)
    timer_of, rows = Timer if options.device == "cuda" else ProcessTimer, []
    timer = timer_of(options.device, 1 << 20 if options.quick else None)
    where = {"threads": options.threads, **provenance(options.device)}
    for dtype in (*DTYPES, CAST):
        for op in operations(dtype):
            for row in bench(op, dtype, 64 if options.quick else ROWS, options.repeats, timer):
                rows.append(row | where)
                print(
                    f"{op:10} {dtype:12} {row['direction']:8} {row['contender']:8} {row['p50_ms']:8.2f} ms "
                    f"{row['GB_s']:6.1f} GB/s of {row['copy_GB_s']:.0f}  {row['times']:5.2f} times torch",
                    flush=True,
                )
            write_csv(f"vit_ops_{options.device}", rows, options.out)


if __name__ == "__main__":
    main()
