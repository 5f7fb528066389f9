"""Parts of bench_gpu.py that compare with torch, eager and compiled, one contender a task."""

import functools
from collections.abc import Callable

import contenders
import torch
import torch.nn.functional as F
from bench_ops import Layer
from gpu_kernels import Tasks, timed
from harness import percentiles
from shapes import MLP, NORMS, RESNET, Case, images, quick_cases, tokens

from fastvit import ops

aten = torch.ops.aten
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
            makers["torch.compile"] = functools.partial(_compiled, case)
        for name in installed if case.layout != "tokens" else ():
            makers[name] = functools.partial(contenders.PEERS[name], case.channels)
        for name, make in makers.items():
            yield f"{name} {case}", functools.partial(_layer, part, case, name, make)


def _compiled(case: Case) -> torch.nn.Module:
    return torch.compile(contenders.BatchNormAct(case), dynamic=False)


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


def row_ops(part) -> Tasks:
    """LayerNorm, activations and gates: fastvit's ops beside torch's, and torch's compiled."""
    for norms, case in [*((True, case) for case in NORMS), *((False, case) for case in MLP)]:
        if part.quick:
            case = Case((2, 5, 32), "tokens", case.dtype)
        make = functools.cache(functools.partial(_norm if norms else _mlp, case, part.device))
        for op in NORM_OPS if norms else MLP_OPS:
            for name in ("fastvit", "torch", *(() if part.quick else ("compiled",))):
                yield f"{op} {name} {case}", functools.partial(_row_op, part, case, make, op, name)


NORM_OPS = {"layer_norm_forward": 2, "layer_norm_backward": 3}  # passes over an activation
MLP_OPS = {"act_forward": 2, "act_backward": 3, "glu_forward": 3, "glu_backward": 5}


def _norm(case: Case, device: str) -> dict[str, tuple[Callable, Callable]]:
    x, dy, columns = case.randn(device), case.randn(device), case.shape[-1:]
    weight, bias = (torch.rand(columns, device=device).to(x.dtype) for _ in range(2))
    _, saved = ops.layer_norm_forward(x, weight, bias)
    _, mean, invstd = aten.native_layer_norm(x, columns, weight, bias, 1e-5)
    return {
        "layer_norm_forward": (
            lambda: ops.layer_norm_forward(x, weight, bias),
            lambda: F.layer_norm(x, columns, weight, bias),
        ),
        "layer_norm_backward": (
            lambda: ops.layer_norm_backward(x, dy, saved, weight),
            lambda: aten.native_layer_norm_backward(dy, x, columns, mean, invstd, weight, bias, [True] * 3),
        ),
    }


def _mlp(case: Case, device: str) -> dict[str, tuple[Callable, Callable]]:
    a, b, dy = (case.randn(device) for _ in range(3))
    return {
        "act_forward": (lambda: ops.act_forward(a, "gelu"), lambda: F.gelu(a)),
        "act_backward": (lambda: ops.act_backward(a, dy, "gelu"), lambda: aten.gelu_backward(dy, a)),
        "glu_forward": (lambda: ops.glu_forward(a, b, "silu"), lambda: F.silu(a) * b),
        "glu_backward": (
            lambda: ops.glu_backward(a, b, dy, "silu"),
            lambda: (aten.silu_backward(dy * b, a), dy * F.silu(a)),
        ),
    }


def _row_op(part, case: Case, make: Callable, op: str, name: str) -> None:
    ours, torchs = make()[op]
    call = {"fastvit": ours, "torch": torchs, "compiled": torch.compile(torchs, dynamic=False)}[name]
    passes = (NORM_OPS | MLP_OPS)[op]
    contender = f"fastvit.ops.{op}" if name == "fastvit" else name
    activation = {"act": "gelu", "glu": "silu"}.get(op.partition("_")[0], "")
    timed(part, case, op, passes * case.nbytes, call, contender=contender, activation=activation)
