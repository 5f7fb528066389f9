"""Times each op of a batch norm, beside torch's function for the same work and a copy of the same size.

    python benchmarks/bench_ops.py [--device cpu|cuda] [--threads 1] [--turns N] [--out benchmarks/results]
    python benchmarks/bench_ops.py --quick --out /tmp/smoke     # tests the program

A row with two names, such as "bn_stats, bn_forward", is a call of the second op that does the work of both.
The rows `inplace` and `from_output` are ops of a layer in place, whose backward recovers x from y. Bandwidths
count the passes that fastvit's ops make over the activation (PASSES), for torch's functions too. On a CPU
torch's functions are those of its BatchNorm with leaky_relu. On a GPU they are those of its SyncBatchNorm,
which apply no activation. The program writes ops_DEVICE.csv after every case, and its table. With
ATEN_CPU_CAPABILITY=avx2, which lowers the instruction set, the file is ops_cpu_avx2.csv.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from conditions import provenance
from harness import (
    DTYPES,
    Timer,
    Timing,
    make_parser,
    make_timer,
    measure_in_turns,
    restart_with_reused_memory,
    write_csv,
)
from result_tables import write_table
from torch.nn import functional as F

from fastvit import ops

FORWARD, BACKWARD = "bn_stats, bn_forward", "bn_reduce, bn_backward"
REDUCE_OUTPUT, BACKWARD_OUTPUT = "bn_reduce from_output", "bn_backward from_output"
BOTH_OUTPUT = f"{BACKWARD} from_output"
# The number of passes over the activation that each op makes.
PASSES = {"bn_stats": 1, "bn_forward": 2, FORWARD: 3, "bn_reduce": 2, "bn_backward": 3, BACKWARD: 5}
PASSES |= {"bn_forward_inplace": 2, REDUCE_OUTPUT: 2, BACKWARD_OUTPUT: 3, BOTH_OUTPUT: 5, "act": 2}
OpCalls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """The shape and dtype of an activation: (N, C, H, W) in a memory format of torch, or tokens (N, L, C)."""

    shape: tuple[int, ...]
    layout: str  # nchw, channels_last or tokens
    dtype: str

    @property
    def channel_dim(self) -> int:
        return 2 if self.layout == "tokens" else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.layout}"

    def randn(self, device: str) -> torch.Tensor:
        x = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        return x.contiguous(memory_format=torch.channels_last) if self.layout == "channels_last" else x


def image_cases(
    n: int, channels: int, side: int, dtype: str, layouts=("channels_last", "nchw")
) -> list[Case]:
    """Returns a case of n square images for each layout."""
    return [Case((n, channels, side, side), layout, dtype) for layout in layouts]


def tokens_case(n: int, channels: int, dtype: str) -> Case:
    """Returns the tokens of n images in a ViT: 14 * 14 patches and a class token, 197 per image."""
    return Case((n, 197, channels), "tokens", dtype)


def cuda_cases() -> list[Case]:
    """Returns batches of 128 and 256 images, which exceed the L2 cache, and smaller batches."""
    cases = [*image_cases(128, 256, 56, "bf16"), *image_cases(128, 1024, 14, "bf16")]
    cases += [tokens_case(n, 768, "bf16") for n in (128, 256, 32)]
    return [
        *cases,
        *image_cases(16, 256, 28, "bf16", ["channels_last"]),
        image_cases(128, 256, 56, "fp32")[0],
    ]


def cpu_cases() -> list[Case]:
    """Returns tokens, channels_last and planes of 4 to 13 MB, and of 39 to 103 MB, beyond the caches."""
    cases = []
    for dtype in ("fp32", "bf16"):
        cases += [
            tokens_case(32, 384, dtype),
            *image_cases(64, 320, 10, dtype),
            *image_cases(32, 2048, 7, dtype),
        ]
        cases += [*image_cases(24, 192, 20, dtype, ["nchw"]), *image_cases(16, 96, 40, dtype)]
        cases += [tokens_case(128, 768, dtype), *image_cases(64, 128, 56, dtype, ["nchw"])]
    for dtype in ("fp16", "fp64"):
        cases += [tokens_case(32, 384, dtype), *image_cases(16, 96, 40, dtype, ["nchw"])]
    return cases


QUICK_CASES = [*image_cases(4, 8, 6, "fp32"), Case((4, 9, 16), "tokens", "bf16")]


def fastvit_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> OpCalls:
    """Returns a call of each op; its inputs are results of the ops that precede it in a layer."""
    channels, dim = case.channels, case.channel_dim
    # With these weights in 0.5 to 1, `overwritten` stays finite, which each call normalises again.
    weight = 1 - torch.rand(channels, device=x.device) / 2
    bias = torch.rand(channels, device=x.device) / 2
    running = torch.zeros(channels, device=x.device), torch.ones(channels, device=x.device)  # mean and var
    options, moments = (weight, bias, None, "leaky_relu", 0.01, dim), ops.bn_stats(x, dim)  # without residual
    _, saved = ops.bn_forward(x, *options, moments)
    (sums,) = ops.bn_reduce(x, dy, saved, *options)
    y, overwritten = x.clone(), x.clone()
    ops.bn_forward_inplace(y, *options, moments)
    return {
        "bn_stats": lambda: ops.bn_stats(x, dim),
        "bn_forward": lambda: ops.bn_forward(x, *options, moments, *running),
        FORWARD: lambda: ops.bn_forward(x, *options, None, *running),
        "bn_reduce": lambda: ops.bn_reduce(x, dy, saved, *options),
        "bn_backward": lambda: ops.bn_backward(x, dy, saved, *options, False, sums),
        BACKWARD: lambda: ops.bn_backward(x, dy, saved, *options),
        "bn_forward_inplace": lambda: ops.bn_forward_inplace(overwritten, *options, moments, *running),
        REDUCE_OUTPUT: lambda: ops.bn_reduce(y, dy, saved, *options, True),
        BACKWARD_OUTPUT: lambda: ops.bn_backward(y, dy, saved, *options, True, sums),
        BOTH_OUTPUT: lambda: ops.bn_backward(y, dy, saved, *options, True),
        "act": lambda: ops.act_forward(x, None, "leaky_relu", 0.01),
    }


def torch_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> OpCalls:
    """Returns calls of torch's functions for the same work, by the names that `fastvit_ops` uses."""
    if case.layout == "tokens":
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    parameter_dtype = torch.promote_types(x.dtype, torch.float32)
    weight, var = torch.ones(2, case.channels, dtype=parameter_dtype, device=x.device)
    bias, mean = torch.zeros(2, case.channels, dtype=parameter_dtype, device=x.device)
    act = {"act": lambda: F.leaky_relu(x, 0.01)}
    if x.is_cuda:
        return sync_batch_norm_ops(x, dy, weight, bias) | act

    def forward(training: bool = False):
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias, training), 0.01, inplace=True)

    def backward():
        dv = torch.ops.aten.leaky_relu_backward(dy, y, 0.01, True)
        return torch.ops.aten.native_batch_norm_backward(
            dv, x, weight, mean, var, mean, var, True, 1e-5, [True, True, True]
        )

    y = forward()
    return act | {
        "bn_stats": lambda: torch.batch_norm_update_stats(x, mean.clone(), var.clone(), 0.1),
        "bn_forward": forward,
        FORWARD: lambda: forward(training=True),
        BACKWARD: backward,
    }


def sync_batch_norm_ops(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> OpCalls:
    """Returns calls of the functions of torch.nn.SyncBatchNorm, without its collectives."""
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // weight.numel()], dtype=torch.int32, device=x.device)

    def normalize(mean, invstd):
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)

    def reduce():
        return torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)

    def backward(sum_dy, sum_dy_xmu):
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)

    sums = reduce()[:2]
    return {
        "bn_stats": lambda: torch.batch_norm_stats(x, 1e-5),
        "bn_forward": lambda: normalize(mean, invstd),
        FORWARD: lambda: normalize(*torch.batch_norm_stats(x, 1e-5)),
        "bn_reduce": reduce,
        "bn_backward": lambda: backward(*sums),
        BACKWARD: lambda: backward(*reduce()[:2]),
    }


def warmup_slice(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a few values of `x` in its memory format, for the call that warms up a timing."""
    return (x[:2, :, :4, :4] if x.dim() == 4 else x[:2]).detach().clone()


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    """Returns the rows of each op on one case."""
    device = timer.device.type
    x, dy = (case.randn(device) for _ in range(2))
    num_sets, _ = timer.plan_rotation(x.nbytes, x.nbytes)
    input_sets = [(x, dy), *((case.randn(device), case.randn(device)) for _ in range(num_sets - 1))]
    factories = {"fastvit": fastvit_ops, "torch": torch_ops}
    # Timed calls rotate over the sets of inputs. A warm-up calls the same op on a few values.
    timed = {name: [make(case, *inputs) for inputs in input_sets] for name, make in factories.items()}
    warm_up = {name: make(case, warmup_slice(x), warmup_slice(dy)) for name, make in factories.items()}

    def time_op(name: str, op: str) -> dict[str, Timing]:
        _, num_calls = timer.plan_rotation(x.nbytes, PASSES[op] * x.nbytes)
        calls = [op_calls[op] for op_calls in islice(cycle(timed[name]), num_calls)]
        return {"": timer(calls, (name, op, case), warm_up[name][op])}

    rows = []
    for op, passes in PASSES.items():
        contenders = {name: partial(time_op, name, op) for name in warm_up if op in warm_up[name]}
        op_rows = measure_in_turns(contenders, timer, turns, x.nbytes, {"": passes * x.nbytes})
        rows += [{"what": op, "shape": str(case), "dtype": case.dtype} | row for row in op_rows]
    return rows


def instruction_set(device: torch.device) -> str:
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.ops.fastvit.cpu_capability()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to test the program")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="CPU threads, each number in turn (default: torch's)"
    )
    parser.add_argument("--turns", type=int, help="timings of each op (default: 15 on a CPU, 7 on a GPU)")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    if not is_gpu:
        restart_with_reused_memory()
    timer = make_timer(options.device, options.quick)
    capability = "" if is_gpu else os.environ.get("ATEN_CPU_CAPABILITY")
    name = f"ops_{options.device}" + (f"_{capability}" if capability else "")
    rows: list[dict] = []
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        conditions = {"threads": threads, "instructions": instruction_set(timer.device)}
        conditions |= provenance(options.device)
        for case in QUICK_CASES if options.quick else cuda_cases() if is_gpu else cpu_cases():
            rows += [row | conditions for row in bench(case, timer, options.turns or timer.default_turns)]
            write_table(write_csv(name, rows, options.out))
            print(f"{case} {case.dtype}, {threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
