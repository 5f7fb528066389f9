"""A table of calls of every op, for tests of what all ops have in common."""

import torch
from sync.one_process import make_exchange_of_one_rank
from torch import Tensor

from fastvit import ops
from fastvit.sync.protocol import Exchange, Tag
from ops.inputs import LayerInputs, clone_with_strides

Call = tuple[str, tuple]  # the name of an op, and its arguments in the order of its schema
CAPACITY = 34  # packets of an exchange
# The ops that take no tensor of numbers.
OTHER_OPS = {"arena_bytes", "cpu_capability", "cuda_build", "ipc_allocate", "ipc_open"}
_retained_arenas: list[Tensor] = []  # exchanges have the addresses of arenas


def find_op(name: str):
    return getattr(torch.ops.fastvit, name).default


def call_op(name: str, arguments) -> tuple[Tensor, ...]:
    """Returns the results of an op as a tuple."""
    results = find_op(name)(*arguments)
    return results if isinstance(results, tuple) else (results,)


def select_tensors(values) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def make_layer_calls(case: LayerInputs) -> list[Call]:
    """Returns calls of the ops of layers, with every tensor that they can take, and with few."""
    d, w, b, x, dy, residual = case.channel_dim, case.weight, case.bias, case.x, case.dy, case.residual
    moments = ops.bn_stats(x, d)
    y, saved = ops.bn_forward(x, w, b, channel_dim=d, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved, w, b, channel_dim=d)
    _, rows = ops.layer_norm_forward(x)
    columns = torch.ones(x.shape[-1], device=x.device)
    mean, var, tracked = case.copy_buffers().values()
    identity, relu = (None, None, None, "identity", 0.0, d), (w, b, residual, "relu", 0.0, d)
    leaky = w, b, None, "leaky_relu", 0.1, d
    return [
        ("bn_stats", (x, d)),
        ("bn_forward", (x, *relu, moments, mean, var, tracked, None, 1e-5)),
        ("bn_forward", (x, *identity, None, mean, var, None, 0.1, 1e-5, False)),
        ("bn_forward", (x, *leaky, moments, mean, var, tracked, 0.1, 1e-5, True, True)),
        ("bn_forward", (x, *relu, None, mean, var, tracked, None, 1e-5)),
        ("bn_forward", (x, *identity)),
        ("bn_forward_inplace", (clone_with_strides(x), *leaky, moments, mean, var, tracked, 0.1, 1e-5)),
        ("bn_forward_inplace", (clone_with_strides(x), *leaky, None, mean, var, tracked, 0.1, 1e-5)),
        ("bn_forward_inplace", (clone_with_strides(x), *identity, None, mean, var, None, 0.1, 1e-5, False)),
        ("bn_apply", (x, saved, w, b, residual, "gelu", 0.0, d)),
        ("bn_reduce", (x, dy, saved, *relu)),
        ("bn_reduce", (y, dy, saved, w, b, None, "elu", 1.0, d, True)),
        ("bn_backward", (x, dy, saved, *relu, False, sums)),
        ("bn_backward", (x, dy, saved, *identity, False, None, False)),
        ("bn_backward", (y, dy, saved, *leaky, True, sums)),
        ("bn_backward", (x, dy, saved, *relu)),
        ("bn_backward", (x, dy, saved, w, b, None, "relu", 0.0, d)),
        ("bn_backward", (y, dy, saved, *leaky, True)),
        ("layer_norm_forward", (x, columns, columns.half(), 1e-5, torch.bfloat16)),
        ("layer_norm_forward", (x,)),
        ("layer_norm_backward", (x, dy, rows, columns, True)),
        ("layer_norm_backward", (x, dy.bfloat16(), rows, None, False)),
        ("act_forward", (x, None, "gelu_tanh", 0.0)),
        ("act_forward", (x, residual, "silu", 0.0)),
        ("act_backward", (x, dy, None, "elu", 1.0)),
        ("act_backward", (x, dy, residual, "gelu", 0.0)),
    ]


def make_exchange(device: str) -> Tensor:
    """Returns the exchange of a group of one rank, which has an arena."""
    exchange, arena = make_exchange_of_one_rank(device)
    _retained_arenas.append(arena)
    return exchange.with_tag(Tag(0, 1))


def make_collective_exchange(device: str) -> Tensor:
    """Returns the exchange of rank 0 of two ranks, which use a collective."""
    exchange = Exchange(0, 2, device == "cuda")
    exchange.descriptor.capacity = CAPACITY
    return exchange.with_tag(Tag(0, 1))


def make_layer_calls_with_exchange(case: LayerInputs) -> list[Call]:
    d, x, dy = case.channel_dim, case.x, case.dy
    _, saved = ops.bn_forward(x, channel_dim=d)
    leaky, exchange = (case.weight, case.bias, None, "leaky_relu", 0.1, d), make_exchange(x.device.type)
    return [
        ("bn_stats", (x, d, exchange)),
        ("bn_reduce", (x, dy, saved, *leaky, False, exchange)),
        ("bn_reduce", (x, dy, saved, *leaky, True, exchange)),
    ]


def make_exchange_calls(device: str, registered_ops: set[str]) -> list[Call]:
    """Returns calls of the ops of exchanges that the device has. They have no fakes."""
    moments, sums = torch.arange(6.0, device=device), torch.ones(1, 4, device=device)
    exchange, collective = make_exchange(device), make_collective_exchange(device)
    gathered = torch.empty(0)
    if "pack_message" in registered_ops:
        gathered = call_op("pack_message", (moments, collective))[0].repeat(2)
    calls = [
        ("exchange_merge", (moments, exchange)),
        ("exchange_merge", (sums, exchange)),
        ("exchange_wait", (moments.clone(), make_exchange(device))),
        ("exchange_abandon", (make_exchange(device),)),
        ("merge_received", (torch.zeros(1, 10, dtype=torch.int32), moments.cpu(), collective)),
        ("pack_message", (moments, collective)),
        ("pack_message", (sums, collective)),
        ("merge_messages", (gathered, moments, collective)),
    ]
    return [(op, arguments) for op, arguments in calls if op in registered_ops]
