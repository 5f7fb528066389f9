"""The ops that are repeated to rebuild a tensor: a table by the names of autograd's nodes.

A rule reads a node and returns a function and its arguments: the same op on the same memory layout, for the
same bits. A rule raises `Unknown` where the node lacks an argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from ctypes import c_float
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import Parameter

from . import norm_rules
from .packed_tensor import Record
from .planner import LEAF, RULES, Node, Rebuild, Rule, Unknown, rule_of
from .policy import RecomputeLevel
from .views import itself

_aten = torch.ops.aten


def _unary(function: Callable[..., Tensor], *options: str, saves_input: bool = True) -> Rule:
    """An op of one tensor, and of options that its node has under these names."""

    def rule(read: Node) -> Rebuild:
        operand = read.input("self", 0) if saves_input else read.edge(0)
        return _bound(function, *[read.number(name) for name in options]), (operand,)

    return rule


def _bound(function: Callable[..., Tensor], *options: object) -> Callable[[Tensor], Tensor]:
    return (lambda t: function(t, *options)) if options else function


def _product(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    return lambda read: (function, (read.input("self", 0), read.input("other", 1)))


def _sum(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    def rule(read: Node) -> Rebuild:
        if read.policy.level == RecomputeLevel.MATMULS and read.is_residual():
            raise Unknown("the sum is kept instead of repeating the product that is its term")
        alpha = read.number("alpha")
        if read.edges[1][0] is None and (number := read.noted()[0]) is not None:
            return lambda t: function(t, number, alpha=alpha), (read.edge(0),)
        arguments = read.edge(0), read.edge(1)
        return function if alpha == 1 else partial(function, alpha=alpha), arguments

    return rule


def _scaled(read: Node) -> Rebuild:
    return _bound(torch.mul, read.number("other")), (read.edge(0),)


def _padded(read: Node) -> Rebuild:
    if any(read.number("pad")):
        raise Unknown  # the padding value
    return torch.clone, (read.edge(0),)


def _native_dropout(read: Node) -> Rebuild:
    """`input * mask * scale`."""
    read.noted()  # that the call was one of training: the node looks the same in evaluation
    mask, output = read.saved("result1"), read.metadata()
    on_gpu = output.device.type == "cuda"
    if not on_gpu and output.dtype.itemsize == 2:  # where some versions round the scale
        raise Unknown
    keep = 1 - read.number("p")
    if on_gpu and output.dtype is not torch.float64:
        keep = c_float(keep).value  # the kernel divides by it in float32
    return lambda t, mask: t.mul(mask).mul_(1 / keep), (read.edge(0), mask)


def _addcmul(read: Node) -> Rebuild:
    value = read.number("value")
    arguments = (read.edge(0), read.input("tensor1", 1), read.input("tensor2", 2))
    return lambda a, b, c: torch.addcmul(a, b, c, value=value), arguments


def _joined(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    def rule(read: Node) -> Rebuild:
        dim = read.number("dim")
        arguments = tuple(read.edge(i) for i in range(len(read.edges)))
        return lambda *tensors: function(tensors, dim), arguments

    return rule


def _clone(read: Node) -> Rebuild:
    if read.value is None or read.value.geometry is None:
        raise Unknown  # the memory format
    return itself, (read.edge(0),)  # which is laid out in memory as the result was


def _to_copy(read: Node) -> Rebuild:
    output, producer = read.metadata(), read.edges[0][0]
    if producer is None or producer._input_metadata[0].device != output.device:
        raise Unknown
    if producer.name() != LEAF:
        return _cast_to(output.dtype), (read.edge(0),)
    weight = producer.variable
    if read.distance and weight.dim() <= 1 and type(weight) is Parameter:  # the bias of a product
        return _cast_to(output.dtype), (Record.of(weight.detach().clone()),)
    if not read.policy.weight_casts or type(weight) is not Parameter:
        raise Unknown("the cast of a weight, which is not cast again without weight_casts=True")
    return _cast_to(output.dtype), (Record.of(weight),)


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype, copy=True)


def _reshaped(read: Node) -> Rebuild:
    """The view after a clone, in a reshape that copies, or after a product of more than two dimensions."""
    producer = read.edges[0][0]
    if producer is None:
        raise Unknown
    shape = tuple(read.metadata().shape)
    if producer.name() == "CloneBackward0":
        return lambda t: t.contiguous().view(shape), (read.behind(producer).edge(0),)
    rule = rule_of(producer.name(), read.policy)
    if rule is not None and RULES[producer.name()][0] > RecomputeLevel.CHEAP:
        inner = read.behind(producer)
        product, arguments = rule(inner)
        read.flops = inner.flops
        return lambda *tensors: product(*tensors).view(shape), arguments
    raise Unknown


def _addmm(read: Node) -> Rebuild:
    alpha, beta = read.number("alpha"), read.number("beta")
    x, weight = read.input("mat1", 1), read.input("mat2", 2)
    _widens(read, "mat2")
    bias = read.bias(0)
    if bias is None:
        raise Unknown
    return lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), (bias, x, weight)


def _mm(read: Node) -> Rebuild:
    x, weight = read.input("self", 0), read.input("mat2", 1)
    _widens(read, "mat2")
    return torch.mm, (x, weight)


def _widens(read: Node, weight: str) -> None:
    """Raises Unknown for a product whose result is narrower than its input: it takes too much arithmetic.

    A budget may ask for it.
    """
    shape = read.size_of(weight)
    if shape[0] > shape[1] and read.policy.level < RecomputeLevel.EVERY_OP:
        raise Unknown
    read.flops = 2 * shape[0]


def _bmm(read: Node) -> Rebuild:
    arguments = read.input("self", 0), read.input("mat2", 1)
    read.flops = 2 * read.size_of("mat2")[1]
    return torch.bmm, arguments


def _softmax(read: Node) -> Rebuild:
    producer, dim = read.edges[0][0], read.number("dim")
    if producer is None or producer._input_metadata[0].dtype is not read.metadata().dtype:
        raise Unknown
    return lambda t: torch.softmax(t, dim), (read.edge(0),)


def _attention(op: Callable[..., tuple], *masks: str, **options: bool) -> Rule:
    """The same op once more, but with dropout, whose mask it does not return."""
    names = "query", "key", "value", *masks

    def rule(read: Node) -> Rebuild:
        if read.number("dropout_p"):
            raise Unknown
        read.flops = 4 * read.size_of("key")[-2]
        given = options | {name: read.number(name) for name in ("is_causal", "scale")}
        arguments = *map(read.input, names[:3], range(3)), *map(read.saved, masks)
        return lambda *tensors: op(**dict(zip(names, tensors, strict=True)), **given)[0], arguments

    return rule


def _convolution(read: Node) -> Rebuild:
    """The same kernel, as far as torch chooses it by the operands alone: not where cuDNN tries several."""
    if read.metadata().device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise Unknown("cuDNN may choose another kernel, in its benchmark mode")
    x, weight = read.input("input", 0), read.input("weight", 1)
    has_bias = len(read.edges) > 2 and read.edges[2][0] is not None
    if not has_bias and any(read.number("bias_sym_sizes_opt") or ()):
        raise Unknown  # it has no gradient
    names = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    options = [read.number(name) for name in names]
    read.flops = 2 * math.prod(read.size_of("weight")[1:])
    return lambda x, w, b: torch.convolution(x, w, b, *options), (
        x,
        weight,
        read.edge(2) if has_bias else None,
    )


def _layer(read: Node) -> Rebuild:
    """fastvit's own layers: the function of a node says how its result is made from what it has saved."""
    node = read.node
    rebuild, unsaved = node._forward_cls.rebuilding(node), getattr(node, "fastvit_unsaved", {})
    if rebuild is None:
        raise Unknown("the layer keeps its output")
    return rebuild, tuple(
        read.edge(unsaved[i]) if i in unsaved else read.packed(one.data)
        for i, one in enumerate(node._raw_saved_tensors)
    )


_CHEAP: dict[str, Rule] = {
    "NativeLayerNormBackward0": norm_rules.layer_norm,
    "FusedRmsNormBackward0": norm_rules.rms_norm,
    "NativeGroupNormBackward0": norm_rules.group_norm,
    "NativeBatchNormBackward0": norm_rules.batch_norm,
    "CudnnBatchNormBackward0": norm_rules.cudnn_batch_norm,
    "SyncBatchNormBackward": norm_rules.sync_batch_norm,
    "MaxPool2DWithIndicesBackward0": _unary(
        lambda *arguments: _aten.max_pool2d_with_indices(*arguments)[0],
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "ceil_mode",
    ),
    "AvgPool2DBackward0": _unary(
        F.avg_pool2d, "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
    ),
    "GeluBackward0": _unary(lambda t, approximate: F.gelu(t, approximate=approximate), "approximate"),
    "SiluBackward0": _unary(F.silu),
    "MishBackward0": _unary(F.mish),
    "HardswishBackward0": _unary(F.hardswish),
    "HardsigmoidBackward0": _unary(F.hardsigmoid),
    "HardtanhBackward0": _unary(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _unary(F.leaky_relu, "negative_slope"),
    "LeakyReluBackward1": _unary(F.leaky_relu, "negative_slope", saves_input=False),
    "EluBackward0": _unary(_aten.elu, "alpha", "scale", "input_scale"),
    "EluBackward1": _unary(_aten.elu, "alpha", "scale", "input_scale", saves_input=False),
    "ClampBackward1": _unary(torch.clamp, "min", "max"),
    "GluBackward0": _unary(F.glu, "dim"),
    "ReluBackward0": _unary(torch.relu, saves_input=False),
    "SigmoidBackward0": _unary(torch.sigmoid, saves_input=False),
    "TanhBackward0": _unary(torch.tanh, saves_input=False),
    "NativeDropoutBackward0": _native_dropout,
    "NegBackward0": _unary(torch.neg, saves_input=False),
    "PowBackward0": _unary(torch.pow, "exponent"),
    "MulBackward0": _product(torch.mul),
    "MulBackward1": _scaled,
    "DivBackward0": _product(torch.div),
    "AddBackward0": _sum(torch.add),
    "SubBackward0": _sum(torch.sub),
    "AddcmulBackward0": _addcmul,
    "CatBackward0": _joined(torch.cat),
    "StackBackward0": _joined(torch.stack),
    "RollBackward0": _unary(torch.roll, "shifts", "dims", saves_input=False),
    "RepeatBackward0": _unary(Tensor.repeat, "repeats", saves_input=False),
    "ConstantPadNdBackward0": _padded,
    "CloneBackward0": _clone,
    "UnsafeViewBackward0": _reshaped,
    "ToCopyBackward0": _to_copy,
    **dict.fromkeys((f"{name}FunctionBackward" for name in ("BatchNorm", "LayerNorm", "Act")), _layer),
}


def cheap_ops() -> set[OpOverloadPacket]:
    """The ops that the cheap rules repeat: `FusedRmsNormBackward0` is the node of `aten._fused_rms_norm`."""
    words = (re.sub("(?<=[a-zD])(?=[A-Z])", "_", name.partition("Backward")[0]).lower() for name in _CHEAP)
    ops = (getattr(_aten, name, None) or getattr(_aten, f"_{name}", None) for name in words)
    return {op for op in ops if op is not None}  # layers in Python are no ops


_PRODUCTS: dict[str, Rule] = {"AddmmBackward0": _addmm, "MmBackward0": _mm}

_DEEP: dict[str, Rule] = {
    "ConvolutionBackward0": _convolution,
    "BmmBackward0": _bmm,
    "SoftmaxBackward0": _softmax,
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention(
        _aten._scaled_dot_product_flash_attention_for_cpu, "attn_mask"
    ),
    "ScaledDotProductFlashAttentionBackward0": _attention(_aten._scaled_dot_product_flash_attention),
    "ScaledDotProductEfficientAttentionBackward0": _attention(
        _aten._scaled_dot_product_efficient_attention, "attn_bias", compute_log_sumexp=True
    ),
    "ScaledDotProductCudnnAttentionBackward0": _attention(
        _aten._scaled_dot_product_cudnn_attention, "attn_bias", compute_log_sumexp=True
    ),
}

for _level, _rules in (
    (RecomputeLevel.CHEAP, _CHEAP),
    (RecomputeLevel.MATMULS, _PRODUCTS),
    (RecomputeLevel.EVERY_OP, _DEEP),
):
    RULES.update((name, (_level, rule)) for name, rule in _rules.items())
