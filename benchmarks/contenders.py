"""The layers and ops that are compared, and the layers of other libraries.

A contender that is not available has a reason. apex is imported by `fastvit.training.nvidia_apex`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from shapes import Case
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit import ops
from fastvit.training.nvidia_apex import import_apex


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


PEERS: dict[str, Callable[[int], nn.Module]] = {
    "apex SyncBatchNorm": lambda channels: import_apex("parallel").SyncBatchNorm(channels),
    "inplace_abn": lambda channels: import_module("inplace_abn").InPlaceABN(channels),
}
"""Layers of other libraries, over (N, C, *): how to make one; raises ImportError where it is not there."""


def peer_layers(channels: int, names: Iterable[str] = PEERS) -> dict[str, nn.Module]:
    """The available ones of PEERS; prints the others with the reason."""
    found = {}
    for name in names:
        try:
            found[name] = PEERS[name](channels)
        except ImportError as error:
            print(f"not measured: {name}: {error}")
    return found


def layers(case: Case) -> dict[str, Callable[[], nn.Module]]:
    """How to make each layer: torch's, and fastvit's."""
    last = case.layout == "tokens"
    return {
        "torch": lambda: BatchNormAct(case),
        "InPlaceABN": lambda: fastvit.InPlaceABN(case.channels, channel_last=last),
        "SyncBatchNorm": lambda: fastvit.SyncBatchNorm(case.channels, channel_last=last, fuse_relu=True),
    }


@dataclass(frozen=True)
class Op:
    passes: int  # over an activation
    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def raw_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Op]:
    """Each op alone, with inputs as from the ops before it."""
    c, d = case.channels, case.channel_dim
    weight = 1 + torch.rand(c, device=x.device)
    bias = torch.rand(c, device=x.device) / 2
    running = torch.zeros(c, device=x.device), torch.ones(c, device=x.device)
    parameters, act = (weight, bias), {"activation": "leaky_relu", "channel_dim": d}
    moments = ops.bn_stats(x, d)
    _, saved = ops.bn_forward(x, moments, *parameters, **act)
    (sums,) = ops.bn_reduce(x, dy, None, saved, *parameters, **act)
    y, overwritten = x.clone(), x.clone()
    ops.abn_forward_(y, moments, *parameters, **act)
    return {
        "bn_stats": Op(1, lambda: ops.bn_stats(x, d)),
        "bn_forward": Op(2, lambda: ops.bn_forward(x, moments, *parameters, None, *running, **act)),
        "abn_forward_": Op(
            2,
            lambda: ops.abn_forward_(overwritten, moments, *parameters, *running, **act),
            prepare=lambda: overwritten.copy_(x),
        ),
        "bn_reduce": Op(2, lambda: ops.bn_reduce(x, dy, None, saved, *parameters, **act)),
        "abn_reduce": Op(2, lambda: ops.abn_reduce(y, dy, saved, *parameters, **act)),
        "bn_backward": Op(3, lambda: ops.bn_backward(x, dy, None, saved, sums, *parameters, **act)),
        "abn_backward": Op(3, lambda: ops.abn_backward(y, dy, saved, sums, *parameters, **act)),
    }


def torch_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Op]:
    """torch's functions for the same work, with names as those of `raw_ops`; its backward is one function."""
    if case.layout == "tokens":
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, var = torch.ones(2, case.channels, dtype=wide, device=x.device)
    bias, mean = torch.zeros(2, case.channels, dtype=wide, device=x.device)

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
