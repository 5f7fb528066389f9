"""The layers that bench_ops.py compares, by task, and those of other libraries.

A contender that is not available has a reason. apex is imported by `fastvit.training.engine.import_apex`.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist
from loopback import Loopback
from shapes import Case
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import ops, sync
from fastvit.sync.protocol import Tag
from fastvit.training.engine import import_apex


class BatchNormAct(nn.Module):
    """torch's BatchNorm and leaky_relu in place. Tokens go in as rows (N * L, C), its fastest layout."""

    def __init__(self, case: Case):
        super().__init__()
        self.rows = case.layout == "tokens"
        self.norm = (nn.BatchNorm1d if self.rows else nn.BatchNorm2d)(case.channels)

    def forward(self, x):
        y = self.norm(x.flatten(0, 1) if self.rows else x)
        y = F.leaky_relu(y, 0.01, inplace=True)
        return y.view_as(x) if self.rows else y


class TorchExchange(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that exchanges its statistics also with one rank."""

    def forward(self, x):
        function = torch.nn.modules._functions.SyncBatchNorm
        y = function.apply(
            x.flatten(0, 1) if x.dim() == 3 else x, self.weight, self.bias,
            self.running_mean, self.running_var, self.eps, self.momentum, dist.group.WORLD, 1,
        )  # fmt: skip
        return y.view_as(x)


class Exchange(fastvit.SyncBatchNorm):
    """fastvit's SyncBatchNorm that exchanges its statistics also with one rank."""

    def forward(self, x):
        original, sync.transport_for = (
            sync.transport_for,
            lambda _, layer: sync.Shared(dist.group.WORLD, layer),
        )
        try:
            return super().forward(x)
        finally:
            sync.transport_for = original


def process_group(device: str) -> None:
    """A group of this process alone, over NCCL on a GPU."""
    if not dist.is_initialized():
        os.environ["FASTVIT_STATISTICS"] = "collective"  # what is measured; one process has no peers
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _exchange(layer: type[nn.Module], case: Case, device: str, **options) -> nn.Module:
    process_group(device)
    return layer(case.channels, **options)


PEERS: dict[str, Callable[[int], nn.Module]] = {
    "apex SyncBatchNorm": lambda channels: import_apex("parallel").SyncBatchNorm(channels),
    "inplace_abn": lambda channels: import_module("inplace_abn").InPlaceABN(channels),
}
"""Layers of other libraries, over (N, C, *): how to make one; raises ImportError where it is not there."""


def _peer(name: str, case: Case) -> nn.Module:
    if case.layout == "tokens":
        raise RuntimeError("takes (N, C, *)")
    return PEERS[name](case.channels)


def peer_layers(channels: int, names: Iterable[str] = PEERS) -> dict[str, nn.Module]:
    """The available ones of PEERS; prints the others with the reason."""
    found = {}
    for name in names:
        try:
            found[name] = PEERS[name](channels)
        except ImportError as error:
            print(f"not measured: {name}: {error}")
    return found


def layers(task: str, case: Case, device: str) -> dict[str, Callable[[], nn.Module]]:
    """How to make each layer of a task; making it may raise, which leaves it out."""
    last = case.layout == "tokens"
    return {
        "layers": {
            "torch": lambda: BatchNormAct(case),
            "InPlaceABN": lambda: fastvit.InPlaceABN(case.channels, channel_last=last),
            "SyncBatchNorm": lambda: fastvit.SyncBatchNorm(case.channels, channel_last=last, fuse_relu=True),
        },
        "compiled": {
            "torch.compile": lambda: torch.compile(BatchNormAct(case), dynamic=False),
        },
        "exchange": {
            "torch SyncBatchNorm, exchange": lambda: _exchange(TorchExchange, case, device),
            "SyncBatchNorm, exchange": lambda: _exchange(Exchange, case, device, channel_last=last),
        },
        "peers": {name: lambda name=name: _peer(name, case) for name in PEERS},
    }[task]


@dataclass(frozen=True)
class Op:
    passes: int  # over an activation
    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    send: Callable[[], object] = lambda: None  # what other ranks do; caches need not be cold for it


class Exchanges:
    """Forward and backward of one rank of eight on one GPU, and the same two kernels without an exchange.

    The other ranks' packets have arrived before the timer starts: the time is that of sending and reading.
    """

    WORLD = 8

    def __init__(self, case: Case, x: torch.Tensor, dy: torch.Tensor):
        self.x, self.dy, self.d = x, dy, case.channel_dim
        self.loop, self.tag = Loopback(self.WORLD, device=x.device), Tag(0, 0)
        self.moments = ops.bn_stats(x, self.d)
        _, self.saved = ops.bn_forward(x, self.moments, channel_dim=self.d)
        self.own = ops.bn_reduce(x, dy, None, self.saved, channel_dim=self.d)

    def forward(self, way) -> None:
        moments = way(lambda e: ops.bn_stats(self.x, self.d, e))
        ops.bn_forward(self.x, moments, channel_dim=self.d)

    def backward(self, way) -> None:
        rest = {"channel_dim": self.d}
        sums = way(lambda e: ops.bn_reduce(self.x, self.dy, None, self.saved, **rest, exchange=e))
        ops.bn_backward(self.x, self.dy, None, self.saved, sums[-1], **rest)

    def ops(self) -> dict[str, "Op"]:
        def alone(op):
            return op(None)

        def shared(op):
            return self.loop.ranks[0].sums(op, self.tag)

        def others_send(numbers):
            self.loop.send(0, [numbers] * self.WORLD, self.tag)

        return {
            "forward": Op(3, lambda: self.forward(alone)),
            "forward, exchange": Op(3, lambda: self.forward(shared), send=lambda: others_send(self.moments)),
            "backward": Op(5, lambda: self.backward(alone)),
            "backward, exchange": Op(5, lambda: self.backward(shared), send=lambda: others_send(self.own)),
        }


EXCHANGES = ("forward", "forward, exchange", "backward", "backward, exchange")


def exchanges(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Op]:
    return Exchanges(case, x, dy).ops()


RAW_OPS = (
    "bn_stats", "bn_forward", "abn_forward_", "bn_reduce", "abn_reduce", "bn_backward", "abn_backward"
)  # fmt: skip


def raw_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Op]:
    """Each op alone, with inputs as from the ops before it."""
    c, d = case.channels, case.channel_dim
    weight = 1 + torch.rand(c, device=x.device)
    bias = torch.rand(c, device=x.device) / 2
    running = torch.zeros(c, device=x.device), torch.ones(c, device=x.device)
    moments = ops.bn_stats(x, d)
    y, overwritten = x.clone(), x.clone()
    saved = ops.abn_forward_(y, moments, weight, bias, channel_dim=d)
    (sums,) = ops.abn_reduce(y, dy, saved, weight, bias, channel_dim=d)
    parameters = (weight, bias)
    plain = {"activation": "leaky_relu", "channel_dim": d}
    return {
        "bn_stats": Op(1, lambda: ops.bn_stats(x, d)),
        "bn_forward": Op(2, lambda: ops.bn_forward(x, moments, *parameters, None, *running, **plain)),
        "abn_forward_": Op(
            2,
            lambda: ops.abn_forward_(overwritten, moments, *parameters, *running, channel_dim=d),
            prepare=lambda: overwritten.copy_(x),
        ),
        "bn_reduce": Op(2, lambda: ops.bn_reduce(x, dy, None, saved, *parameters, **plain)),
        "abn_reduce": Op(2, lambda: ops.abn_reduce(y, dy, saved, *parameters, channel_dim=d)),
        "bn_backward": Op(3, lambda: ops.bn_backward(x, dy, None, saved, sums, *parameters, **plain)),
        "abn_backward": Op(3, lambda: ops.abn_backward(y, dy, saved, sums, *parameters, channel_dim=d)),
    }


def torch_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Op]:
    """torch's functions for the same work, with names as those of `raw_ops`; its backward is one function."""
    if case.layout == "tokens":
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, var = torch.ones(2, case.channels, dtype=wide)
    bias, mean = torch.zeros(2, case.channels, dtype=wide)

    def forward():
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias), 0.01, inplace=True)

    def backward():
        dz = torch.ops.aten.leaky_relu_backward(dy, y, 0.01, True)
        return torch.ops.aten.native_batch_norm_backward(
            dz, x, weight, mean, var, mean, var, True, 1e-5, [True, True, True]
        )

    y = forward()
    return {
        "bn_stats": Op(1, lambda: torch.batch_norm_update_stats(x, mean.clone(), var.clone(), 0.1)),
        "bn_forward": Op(2, forward),
        "bn_reduce, bn_backward": Op(5, backward),
    }
