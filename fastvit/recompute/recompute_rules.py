"""`RECOMPUTE_RULES` has a rule for each kind of op that is recomputed, by the name of its node.

A rule reads a node and returns a function and its operands: the same op on the same memory layout, so the
bits are the same. A rule raises `NotRecomputable` if the node lacks an argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from ctypes import c_float
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import Parameter

from . import norm_rules
from .node_reader import LEAF_NODE, NodeReader, NotRecomputable
from .planner import OpCall, Rule, Rules
from .policy import RecomputeLevel
from .views import WRITE_TO_VIEW, as_strided_in, identity

_aten = torch.ops.aten


def _unary_rule(function: Callable[..., Tensor], *options: str, saves_input: bool = True) -> Rule:
    """Returns the rule of an op of one tensor. `options` are the names of its other arguments in the node."""

    def rule(reader: NodeReader) -> OpCall:
        operand = reader.operand("self", 0) if saves_input else reader.graph_operand(0)
        return _bind_options(function, *[reader.attribute(name) for name in options]), (operand,)

    return rule


def _bind_options(function: Callable[..., Tensor], *options: object) -> Callable[[Tensor], Tensor]:
    """Returns `function` as a function of a tensor alone."""
    return (lambda t: function(t, *options)) if options else function


def _binary_rule(function: Callable[..., Tensor]) -> Callable[[NodeReader], OpCall]:
    return lambda reader: (function, (reader.operand("self", 0), reader.operand("other", 1)))


def _sum_rule(function: Callable[..., Tensor]) -> Callable[[NodeReader], OpCall]:
    def rule(reader: NodeReader) -> OpCall:
        if reader.policy.level == RecomputeLevel.MATMULS and _is_residual(reader):
            raise NotRecomputable("the sum is kept, so that the matmul that is its term is not recomputed")
        reader.require_rules()
        alpha = reader.attribute("alpha")
        if reader.edges[1][0] is None and (number := reader.call_args().scalar) is not None:
            return lambda t: function(t, number, alpha=alpha), (reader.graph_operand(0),)
        operands = [
            reader.bias(i) if node is None else reader.graph_operand(i)
            for i, (node, _) in enumerate(reader.edges)
        ]
        if None in operands:
            raise NotRecomputable("a term of the sum that no op has made is not kept")
        return function if alpha == 1 else partial(function, alpha=alpha), tuple(operands)

    return rule


def _is_residual(reader: NodeReader) -> bool:
    """Returns whether this sum has two terms of its shape, one of them a matmul that is not kept."""
    shape = reader.metadata.shape
    terms = [node for node, _ in reader.edges]
    if any(node is None or node._input_metadata[0].shape != shape for node in terms):
        return False
    return any(map(reader.planner.is_unsaved_matmul, terms))


def _scale_rule(reader: NodeReader) -> OpCall:
    """Recomputes the product of a tensor and a number."""
    return _bind_options(torch.mul, reader.attribute("other")), (reader.graph_operand(0),)


def _index_rule(reader: NodeReader) -> OpCall:
    """Recomputes `tensor[indices]`, with tensors among the indices."""
    indices = tuple(reader.packed_operand(one.data) for one in reader.node._raw_saved_indices)
    return lambda t, *indices: _aten.index(t, indices), (reader.graph_operand(0), *indices)


def _pad_rule(reader: NodeReader) -> OpCall:
    if any(reader.attribute("pad")):
        raise NotRecomputable("the graph does not show the padding value")
    return torch.clone, (reader.graph_operand(0),)


def _native_dropout_rule(reader: NodeReader) -> OpCall:
    """Recomputes `input * mask * scale`."""
    reader.call_args()  # raises unless the call was in training; the node of an evaluation looks the same
    mask, output = reader.saved_operand("result1"), reader.metadata
    is_cuda = output.device.type == "cuda"
    if not is_cuda and output.dtype.itemsize == 2:  # some versions of torch round the scale
        raise NotRecomputable
    keep_probability = 1 - reader.attribute("p")
    if is_cuda and output.dtype is not torch.float64:
        keep_probability = c_float(keep_probability).value  # the kernel divides by a float32
    return lambda t, mask: t.mul(mask).mul_(1 / keep_probability), (reader.graph_operand(0), mask)


def _addcmul_rule(reader: NodeReader) -> OpCall:
    value = reader.attribute("value")
    arguments = (reader.graph_operand(0), reader.operand("tensor1", 1), reader.operand("tensor2", 2))
    return lambda a, b, c: torch.addcmul(a, b, c, value=value), arguments


def _join_rule(function: Callable[..., Tensor]) -> Callable[[NodeReader], OpCall]:
    def rule(reader: NodeReader) -> OpCall:
        dim = reader.attribute("dim")
        arguments = tuple(reader.graph_operand(i) for i in range(len(reader.edges)))
        return lambda *tensors: function(tensors, dim), arguments

    return rule


def _clone_rule(reader: NodeReader) -> OpCall:
    if reader.info is None or reader.info.as_strided_args is None:
        memory_format = (
            None if reader.info is None or reader.info.call_args is None else reader.info.call_args.scalar
        )
        if memory_format is None:
            raise NotRecomputable("the graph does not show the memory format of a copy")
        return lambda t: t.clone(memory_format=memory_format), (reader.graph_operand(0),)
    # Recipe._compute gives the output the strides of the original.
    return identity, (reader.graph_operand(0),)


def _to_copy_rule(reader: NodeReader) -> OpCall:
    output, producer = reader.metadata, reader.edges[0][0]
    is_leaf = producer is not None and producer.name() == LEAF_NODE
    source = producer and (producer.variable if is_leaf else producer._input_metadata[0])
    if producer is None or source.device != output.device:
        raise NotRecomputable
    info = reader.info
    if info is None or not (info.is_layout_known or info.as_strided_args):
        raise NotRecomputable("the graph does not show the memory format of a cast")
    is_bias = is_leaf and reader.num_ops_from_target and producer.variable.dim() <= 1
    is_weight = is_leaf and not is_bias
    if is_weight and not (reader.policy.weight_casts and type(producer.variable) is Parameter):
        raise NotRecomputable("the cast of a weight: recomputed with recompute_weight_casts=True")
    return _make_cast(output.dtype), (reader.graph_operand(0),)


@cache  # thousands of recipes share one function
def _make_cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype, copy=True)


def _unsafe_view_rule(reader: NodeReader) -> OpCall:
    """Recomputes `aten._unsafe_view`, which follows a matmul, or the clone of a reshape."""
    producer = reader.edges[0][0]
    if producer is None:
        raise NotRecomputable
    shape = tuple(reader.metadata.shape)
    if producer.name() == "CloneBackward0":
        return lambda t: t.contiguous().view(shape), (reader.reader_of(producer).graph_operand(0),)
    rule, level = reader.planner.find_rule(producer.name()), reader.planner.level_of(producer.name())
    if rule is not None and level is not RecomputeLevel.CHEAP:
        matmul_reader = reader.reader_of(producer)
        matmul, operands = rule(matmul_reader)
        reader.flops, reader.environment = matmul_reader.flops, matmul_reader.environment
        return lambda *tensors: matmul(*tensors).view(shape), operands
    raise NotRecomputable


def _addmm_rule(reader: NodeReader) -> OpCall:
    alpha, beta = reader.attribute("alpha"), reader.attribute("beta")
    x, weight = reader.operand("mat1", 1), reader.operand("mat2", 2)
    _require_no_narrowing(reader, "mat2")
    bias = reader.bias(0)
    if bias is None:
        raise NotRecomputable
    return lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), (bias, x, weight)


def _mm_rule(reader: NodeReader) -> OpCall:
    x, weight = reader.operand("self", 0), reader.operand("mat2", 1)
    _require_no_narrowing(reader, "mat2")
    return torch.mm, (x, weight)


def _require_no_narrowing(reader: NodeReader, weight: str) -> None:
    """Raises NotRecomputable for a matmul whose output is narrower than its input: too much arithmetic.

    At the level EVERY_OP the matmul is recomputed all the same.
    """
    shape = reader.attribute(f"{weight}_sym_sizes")
    if shape[0] > shape[1] and reader.policy.level < RecomputeLevel.EVERY_OP:
        raise NotRecomputable
    reader.flops = 2 * shape[0]


def _bmm_rule(reader: NodeReader) -> OpCall:
    arguments = reader.operand("self", 0), reader.operand("mat2", 1)
    reader.flops = 2 * reader.size_of("mat2")[1]
    return torch.bmm, arguments


def _softmax_rule(function: Callable[[Tensor, int], Tensor]) -> Rule:
    def rule(reader: NodeReader) -> OpCall:
        producer, dim = reader.edges[0][0], reader.attribute("dim")
        if producer is None or producer._input_metadata[0].dtype is not reader.metadata.dtype:
            raise NotRecomputable
        return lambda t: function(t, dim), (reader.graph_operand(0),)

    return rule


def _attention_rule(op: Callable[..., tuple], *masks: str, **options: bool) -> Rule:
    """Returns the rule of attention. With dropout the output is kept: the op does not return its mask.

    Args:
        masks: the arguments of `op` that are masks.
        options: further arguments of `op`.
    """
    names = "query", "key", "value", *masks

    def rule(reader: NodeReader) -> OpCall:
        if reader.attribute("dropout_p"):
            raise NotRecomputable
        reader.flops = 4 * reader.size_of("key")[-2]
        all_options = options | {name: reader.attribute(name) for name in ("is_causal", "scale")}
        arguments = *map(reader.operand, names[:3], range(3)), *map(reader.saved_operand, masks)
        return lambda *tensors: op(**dict(zip(names, tensors, strict=True)), **all_options)[0], arguments

    return rule


def _convolution_rule(reader: NodeReader) -> OpCall:
    """Recomputes a convolution unless cuDNN's benchmark may have chosen the kernel."""
    if reader.metadata.device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise NotRecomputable("cuDNN may choose another kernel, in its benchmark mode")
    x, weight = reader.operand("input", 0), reader.operand("weight", 1)
    has_bias = reader.edges[2][0] is not None or any(reader.attribute("bias_sym_sizes_opt") or ())
    names = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    options = [reader.attribute(name) for name in names]
    reader.flops = 2 * math.prod(reader.size_of("weight")[1:])
    operands = x, weight, reader.bias(2) if has_bias else None
    return lambda x, w, b: torch.convolution(x, w, b, *options), operands


def _copy_slices_rule(reader: NodeReader) -> OpCall:
    """Recomputes the base of a view to which an op in place has written."""
    call = reader.call_args().in_place
    if call is None:
        raise NotRecomputable("a part of it was written to")
    write, (size, stride, offset), base, copies = call
    copy = next(iter(copies), None)

    def write_to_base(tensor: Tensor) -> Tensor:
        memory = torch.empty_strided(base.size, base.stride, dtype=tensor.dtype, device=tensor.device)
        view = as_strided_in(memory, size, stride, offset)
        if copy is None:
            memory.copy_(tensor)
        else:
            view.copy_(tensor)
        write(view)
        return memory

    # The op has saved a copy of the view. The copy is the operand if the view covers its whole base.
    if copy is not None and math.prod(size) == math.prod(base.size):
        return write_to_base, (reader.packed_operand(copy),)
    copy = None  # `write_to_base` then takes the base
    return write_to_base, (reader.graph_operand(0),)


def _fastvit_layer_rule(reader: NodeReader) -> OpCall:
    """Recomputes the output of a fastvit layer. Its autograd Function provides `recompute_function(ctx)`."""
    node, function = reader.node, reader.node._forward_cls
    recompute, unsaved_inputs = function.recompute_function(node), getattr(node, "fastvit_unsaved_inputs", {})
    if recompute is None:
        raise NotRecomputable("the layer keeps its output")
    return recompute, tuple(
        reader.graph_operand(unsaved_inputs[i])
        if i in unsaved_inputs
        else reader.packed_operand(one.data, i in function.fastvit_private)
        for i, one in enumerate(node._raw_saved_tensors)
    )


_CHEAP_RULES: dict[str, Rule] = {
    "NativeLayerNormBackward0": norm_rules.layer_norm_rule,
    "FusedRmsNormBackward0": norm_rules.rms_norm_rule,
    "NativeGroupNormBackward0": norm_rules.group_norm_rule,
    "NativeBatchNormBackward0": norm_rules.batch_norm_rule,
    "CudnnBatchNormBackward0": norm_rules.cudnn_batch_norm_rule,
    "SyncBatchNormBackward": norm_rules.sync_batch_norm_rule,
    "MaxPool2DWithIndicesBackward0": _unary_rule(
        lambda *arguments: _aten.max_pool2d_with_indices(*arguments)[0],
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "ceil_mode",
    ),
    "AvgPool2DBackward0": _unary_rule(
        F.avg_pool2d, "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
    ),
    "GeluBackward0": _unary_rule(lambda t, approximate: F.gelu(t, approximate=approximate), "approximate"),
    "SiluBackward0": _unary_rule(F.silu),
    "MishBackward0": _unary_rule(F.mish),
    "HardswishBackward0": _unary_rule(F.hardswish),
    "HardsigmoidBackward0": _unary_rule(F.hardsigmoid),
    "HardtanhBackward0": _unary_rule(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _unary_rule(F.leaky_relu, "negative_slope"),
    "LeakyReluBackward1": _unary_rule(F.leaky_relu, "negative_slope", saves_input=False),
    "EluBackward0": _unary_rule(_aten.elu, "alpha", "scale", "input_scale"),
    "EluBackward1": _unary_rule(_aten.elu, "alpha", "scale", "input_scale", saves_input=False),
    "ClampBackward1": _unary_rule(torch.clamp, "min", "max"),
    "GluBackward0": _unary_rule(F.glu, "dim"),
    "ReluBackward0": _unary_rule(torch.relu, saves_input=False),
    "SigmoidBackward0": _unary_rule(torch.sigmoid, saves_input=False),
    "TanhBackward0": _unary_rule(torch.tanh, saves_input=False),
    "NativeDropoutBackward0": _native_dropout_rule,
    "NegBackward0": _unary_rule(torch.neg, saves_input=False),
    "PowBackward0": _unary_rule(torch.pow, "exponent"),
    "MulBackward0": _binary_rule(torch.mul),
    "MulBackward1": _scale_rule,
    "DivBackward0": _binary_rule(torch.div),
    "AddBackward0": _sum_rule(torch.add),
    "SubBackward0": _sum_rule(torch.sub),
    "AddcmulBackward0": _addcmul_rule,
    "CatBackward0": _join_rule(torch.cat),
    "StackBackward0": _join_rule(torch.stack),
    "RollBackward0": _unary_rule(torch.roll, "shifts", "dims", saves_input=False),
    "RepeatBackward0": _unary_rule(Tensor.repeat, "repeats", saves_input=False),
    "ConstantPadNdBackward0": _pad_rule,
    "CloneBackward0": _clone_rule,
    "UnsafeViewBackward0": _unsafe_view_rule,
    "ToCopyBackward0": _to_copy_rule,
    WRITE_TO_VIEW: _copy_slices_rule,
    **dict.fromkeys(
        (f"{name}FunctionBackward" for name in ("BatchNorm", "LayerNorm", "Act")), _fastvit_layer_rule
    ),
}


def cheap_op_packets() -> set[OpOverloadPacket]:
    """Returns the ops of the cheap rules, such as `aten._fused_rms_norm` for `FusedRmsNormBackward0`."""
    names = (
        re.sub("(?<=[a-zD])(?=[A-Z])", "_", name.partition("Backward")[0]).lower() for name in _CHEAP_RULES
    )
    ops = (getattr(_aten, name, None) or getattr(_aten, f"_{name}", None) for name in names)
    return {op for op in ops if op is not None}  # the nodes of autograd Functions have no op


_MATMUL_RULES: dict[str, Rule] = {"AddmmBackward0": _addmm_rule, "MmBackward0": _mm_rule}

_EVERY_OP_RULES: dict[str, Rule] = {
    "ConvolutionBackward0": _convolution_rule,
    "BmmBackward0": _bmm_rule,
    "IndexBackward0": _index_rule,
    "SoftmaxBackward0": _softmax_rule(torch.softmax),
    "SafeSoftmaxBackward0": _softmax_rule(_aten._safe_softmax),  # attention with a mask calls it
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention_rule(
        _aten._scaled_dot_product_flash_attention_for_cpu, "attn_mask"
    ),
    "ScaledDotProductFlashAttentionBackward0": _attention_rule(_aten._scaled_dot_product_flash_attention),
    "ScaledDotProductEfficientAttentionBackward0": _attention_rule(
        _aten._scaled_dot_product_efficient_attention, "attn_bias", compute_log_sumexp=True
    ),
    "ScaledDotProductCudnnAttentionBackward0": _attention_rule(
        _aten._scaled_dot_product_cudnn_attention, "attn_bias", compute_log_sumexp=True
    ),
}

RECOMPUTE_RULES: Rules = {
    name: (level, rule)
    for level, rules in (
        (RecomputeLevel.CHEAP, _CHEAP_RULES),
        (RecomputeLevel.MATMULS, _MATMUL_RULES),
        (RecomputeLevel.EVERY_OP, _EVERY_OP_RULES),
    )
    for name, rule in rules.items()
}
