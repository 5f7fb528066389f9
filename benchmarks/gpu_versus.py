"""Parts of bench_gpu.py that compare with torch, eager and compiled, one contender a task."""

import functools
import itertools
from collections.abc import Callable

import bench_vit_ops
import contenders
import torch
from bench_ops import Layer
from gpu_kernels import Tasks, timed
from harness import percentiles
from shapes import MLP, NORMS, RESNET, Case, images, quick_cases, tokens

LAYERS = [  # in order of importance
    *images(128, [RESNET[1]], ("channels_last", "nchw"), ("bf16",)),
    *tokens([(128, 768)], ("bf16",)),
    *images(32, [RESNET[3]], ("channels_last",), ("bf16",)),
    *images(128, [RESNET[1]], ("channels_last",), ("fp32",)),
    *images(8, [RESNET[4]], ("nchw",), ("bf16",)),
]
REPEATS = 15


def versus(part) -> Tasks:
    """Forward and backward of each layer: fastvit's, torch's, torch's compiled, and those of other libraries
    that are installed, which take no tokens.
    """
    installed = contenders.peer_layers(8)
    for case in quick_cases() if part.quick else LAYERS:
        makers = contenders.layers(case)
        if not part.quick:
            makers["torch.compile"] = lambda case=case: _compiled(contenders.BatchNormAct(case))
        for name in installed if case.layout != "tokens" else ():
            makers[name] = functools.partial(contenders.PEERS[name], case.channels)
        for name, make in makers.items():
            yield f"{name} {case}", functools.partial(_layer, part, case, name, make)


def _compiled(work: Callable) -> Callable:
    torch.compiler.reset()  # one function is compiled a few times only, and runs eagerly then
    return torch.compile(work, dynamic=False)


def _layer(part, case: Case, name: str, make: Callable) -> None:
    x, dy = case.randn(part.device).requires_grad_(), case.randn(part.device)
    layer = Layer(make(), x, dy)
    steps = [layer.step(part.timer) for _ in range(3 + (2 if part.quick else REPEATS))][3:]
    copy = part.timer.copy_bandwidth()
    for direction in ("forward", "backward"):
        times = percentiles([step[direction][0] * 1e3 for step in steps], "us")
        bandwidth = Layer.passes[direction] * case.nbytes / times["p50_us"] / 1e3
        part.row(
            contender=name, op=direction, shape=case.size, layout=case.layout, dtype=case.dtype,
            MB=case.nbytes / 1e6, **times,
            host_us=percentiles([step[direction][1] * 1e3 for step in steps], "us")["p50_us"],
            GB_s=bandwidth, copy_GB_s=copy, share_of_copy=bandwidth / copy,
        )  # fmt: skip


ROW_OPS = {  # of bench_vit_ops.py: its op, passes over an activation forward and backward, the activation
    "layer_norm": ("layer_norm", 2, 3, ""),
    "gelu": ("act", 2, 3, "gelu"),
    "swiglu": ("glu", 3, 5, "silu"),
}


def row_ops(part):
    """LayerNorm, activations and gates: fastvit's ops beside torch's, and torch's compiled."""
    rows = [*itertools.product(("layer_norm",), NORMS), *itertools.product(("gelu", "swiglu"), MLP)]
    for dtype, (op, case) in itertools.product(("bf16", "fp32", "fp16"), rows):
        if case.dtype != dtype:
            continue
        if part.quick:
            case = Case((2, 5, 32), "tokens", dtype)
        for name in ("fastvit", "torch", *(("compiled",) if dtype == "bf16" and not part.quick else ())):
            yield f"{op} {name} {case}", functools.partial(_row_op, part, case, op, name)


def _row_op(part, case: Case, what: str, name: str) -> None:
    calls, _, affine = bench_vit_ops.operations(case.dtype)[what]
    call = calls["fastvit" if name == "fastvit" else "torch"]
    if name == "compiled":
        call = _compiled(call)
    leaves = [case.randn(part.device) for _ in range(2 if what in bench_vit_ops.GATES else 1)]
    leaves += [torch.rand(case.shape[-1:], device=part.device).to(leaves[0].dtype) for _ in range(2 * affine)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    kernel, *passes, activation = ROW_OPS[what]
    dy, held = case.randn(part.device), []

    def forward() -> None:
        held.append(call(*leaves))

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(held.pop(), leaves, dy)

    steps = {"forward": (forward, held.clear), "backward": (backward, forward)}  # and what precedes each
    for (direction, work), count in zip(steps.items(), passes, strict=True):
        op = f"{kernel}_{direction}"
        contender = f"fastvit.ops.{op}" if name == "fastvit" else name
        timed(part, case, op, count * case.nbytes, *work, contender=contender, activation=activation)
