"""Proofs from a trace: that an activation can move into its BatchNorm, and that x may be overwritten.

Each function returns a reason against it, or None. The report prints the reasons as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

from .._arguments import IN_PLACE_ACTIVATIONS, recovery_error
from . import activations
from .activations import Activation
from .tracing import Trace, is_part, is_permutation, is_reshape, overwrites
from .watch import runs_as

# Ops whose result is a new tensor that their own backward does not need.
_FRESH_MODULES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.AvgPool2d, nn.MaxPool2d,
)  # fmt: skip
_FRESH_FUNCTIONS = frozenset(
    {
        torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, F.linear, F.conv_transpose2d,
        torch.matmul, torch.bmm, torch.cat, F.avg_pool2d, F.max_pool2d,
    }
)  # fmt: skip
# The error of the recovered x is about u * sqrt(1 + (bias / weight)^2), with u a quarter of the dtype's eps.
_LARGEST_ERROR = 0.01
_SMALLEST_WEIGHT = 1e-3  # well above the floor of |weight| that the in-place ops apply in half precision


def describe(trace: Trace, node: fx.Node) -> str:
    """The name of a node in the report."""
    module = trace.module(node)
    if node.op == "placeholder":
        return "the caller"
    if node.op == "output":
        return "the model's output"
    if module is not None:
        return f"{node.target} ({type(module).__name__})"
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def against_hooks(modules: list[nn.Module], name_of) -> str | None:
    for module in modules:
        if hooked(module):
            return f"{name_of(module)} has a hook or a replaced forward, which would see another tensor"
    return None


def hooked(module: nn.Module) -> bool:
    """Whether other code sees the inputs or outputs of `module`, in forward or backward.

    A hook does, and so does a forward that was set on the instance (a timing wrapper, for example). A
    module that was compiled by itself counts too: its code does not depend on the layers around it.
    """
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or getattr(module, "_compiled_call_impl", None)
    )


def all_readers(trace: Trace, node: fx.Node, parts: bool = False) -> list[tuple[fx.Node, fx.Node]]:
    """Readers of a value and of its views, each with the node that it reads; `parts` adds partial views."""
    found = []
    for reader in trace.readers(node):
        module = trace.module(reader)
        found.append((reader, node))
        if shares_memory(reader, module) and (parts or not is_part(reader)):
            found += all_readers(trace, reader, parts)
    return found


def shares_memory(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether `node` returns its input, or a view of it."""
    return passes_on(module) or is_permutation(node) or is_reshape(node, module) or is_part(node)


def passes_on(module: nn.Module | None) -> bool:
    """Whether `module` returns its input itself."""
    kind = runs_as(module)
    return kind is nn.Identity or (issubclass(kind, nn.modules.dropout._DropoutNd) and module.p == 0)


def saved_by(trace: Trace, output: fx.Node) -> str | None:
    """The op that saves the value of `output` for backward, so that rebuilding it frees memory.

    Readers of partial views are excluded, since they often copy (queries, keys and values, for example).
    """
    for reader, _ in all_readers(trace, output):
        if activations.saves_input(reader, trace.module(reader)):
            return describe(trace, reader)
    return None


def against_overwriting(trace: Trace, call: fx.Node, output: fx.Node) -> str | None:
    """Why x, the input of `call`, must not be overwritten with `output`."""
    x = call.args[0]
    if not isinstance(x, fx.Node):
        return "its input is not a tensor of the trace"
    if x.op == "placeholder":
        return "its input belongs to the caller"
    producer = trace.module(x)
    fresh = is_fresh(producer) if producer is not None else calls_fresh(x)
    if not fresh:
        return f"its input comes from {describe(trace, x)}, which is a view or may need its own result"
    others = [describe(trace, reader) for reader in trace.readers(x) if reader is not call]
    if others:
        return f"its input is also read by {', '.join(sorted(set(others)))}"
    for reader, read in all_readers(trace, output, parts=True):
        if reader.args[:1] == (read,) and overwrites(reader, trace.module(reader)):
            return f"{describe(trace, reader)} overwrites its output, from which x is recovered"
    return None


def is_fresh(module: nn.Module) -> bool:
    """Whether `module` returns a new tensor that its own backward does not need."""
    return runs_as(module) in _FRESH_MODULES


def calls_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _FRESH_FUNCTIONS and "out" not in node.kwargs


def against_inverting(
    activation: Activation, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> str | None:
    """Why x cannot be recovered from y accurately: the activation, or |beta| / |gamma| in this dtype."""
    if activation.name not in IN_PLACE_ACTIVATIONS or (
        activation.name != "identity" and activation.param <= 0
    ):
        return f"{activation} cannot be inverted"
    if weight is None:
        return None
    if weight.is_meta:
        return "its weight is on the meta device, so its size is unknown"
    gamma = weight.detach().double().abs()
    if not bool((gamma >= _SMALLEST_WEIGHT).all()):
        return f"|weight| is as small as {gamma.min().item():.3g}"
    ratio = 0.0 if bias is None else (bias.detach().double().abs() / gamma).max().item()
    if recovery_error(ratio, dtype) > _LARGEST_ERROR:
        return f"|bias| / |weight| is up to {ratio:.3g}, too much for {dtype}"
    return None
