"""`convert` and `revert`."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ..recompute import Policy
from . import exporting, layers, tracing
from .adopted import References, adopt, conversions, release
from .budget import apply_budget
from .calls import Arguments, as_arguments
from .measure import Observed, account, kept_bytes, observe
from .plan import MEMORY, LayerPlan, LayerPlanner
from .rebuilding import adopt_blocks
from .report import LayerReport, Report, TensorReport
from .runtime import (
    AbsorbedActivation,
    ConvertedNorm,
    ConvertedNormSync,
    ConvertedRoot,
    Proof,
    Proven,
    adopt_norm,
)

_REBUILDS = ("auto", "gemm", "recompute")


def convert(
    model: nn.Module,
    memory: str = "auto",
    example_inputs: Tensor | Sequence | Mapping | None = None,
    *,
    weight_casts: bool = False,
    budget: float | None = None,
) -> tuple[nn.Module, Report]:
    """Reduces the memory that a model keeps for backward.

    BatchNorm and its activation become one layer where that is proven safe. Outputs of LayerNorms,
    activations, gates and other cheap ops are rebuilt in the backward pass, to the same bits.

    Args:
        model: changed in place. Modules stay the same objects, with a class derived from their own.
            Parameters, buffers, state_dict, hooks, requires_grad and training flags do not change, and
            optimizers built before stay valid. No forward is rewritten, and no Linear is replaced.
        memory: "auto" overwrites a BatchNorm's input where that is proven safe and the activation can be
            inverted; elsewhere it rebuilds outputs that take no matrix product. "gemm" also rebuilds the
            output of Linears that are no narrower than their input: less memory, more time. "recompute" is
            "auto" without overwriting. "inplace" converts only layers whose input may be overwritten. "keep"
            fuses BatchNorm and activation without reducing memory.
        example_inputs: inputs of a training forward (a tensor, a tuple of arguments or a dict of keyword
            arguments). A training forward runs with a copy of them before the conversion, in which nothing
            is kept, and another after it; the report has the difference. Where a forward cannot be measured
            the report has an estimate and the reason. The trace follows the same call.
        weight_casts: cast weights again in backward instead of keeping the half-precision copies that
            autocast makes: 2 bytes for each element of a weight, at any batch size. A write to a weight
            before the backward is then an error. A write through `weight.data` is not noticed, and the
            gradient is that of the new weight. autocast's own cache holds the copies until its block ends,
            unless it has cache_enabled=False.
        budget: the share of the kept bytes that remains, above 0 and below 1: 0.5 for half. Of the outputs
            that "gemm" rebuilds it takes only as many as the budget needs, those with most bytes per byte
            that is moved first. It measures training forwards, so it needs `example_inputs`. The report says
            which outputs were chosen, or that the budget cannot be met.

    Returns:
        The model, and a `Report` that prints as tables: the bytes that a training forward keeps before and
        after, both measured; the tensors that it keeps or rebuilds, from what, and why some are not rebuilt;
        the mode of each BatchNorm layer, with the reason. `report.plot(path)` draws it.

    Rebuilt are outputs of LayerNorm, RMSNorm and modules that call one of them once, of GELU, SiLU and other
    activations, of products (gates, LayerScale), sums, casts, concatenations, rolls and copies, where the
    inputs of the op are kept for another reason. The op and its inputs are read from autograd's graph as the
    forward runs, so this works for any model; `fastvit.recompute_scope` describes it. The model and each of
    its blocks open such a scope when they are called.

    Converted BatchNorms are torch's BatchNorm1d/2d/3d and SyncBatchNorm, fastvit's SyncBatchNorm, timm's
    BatchNormAct2d and mapillary's ABN. A layer is fused with an activation module that is the only reader of
    its output, through views and Identity. It is fused with the addition of a residual in between too, where
    no other op runs between the three and another op saves the residual for backward. Where an activation
    function follows, the layer's output is rebuilt if an op saves it. Other subclasses are left, and the
    report names them. Readers are found by tracing the forward symbolically, in training and in evaluation,
    with the call of the example inputs, or with default arguments. Of modules that cannot be traced, the
    children are. Where a layer is still left and there are example inputs, torch.export traces the model.

    Trial runs leave the model as it was: attributes, buffers, parameters, caches, counts of hooks and random
    states are restored. Effects outside of the process (a written file, for example) remain.

    A converted BatchNorm runs as the original layer outside of the traced forward; in another call (a tensor
    in place of None or the reverse, another value of an argument with a default, and after torch.export other
    shapes or dtypes); under torch.compile and exporters; and when a hook is registered that would see another
    tensor. It also does, with a warning, when the model has changed since the conversion: a module; or a
    method or plain value (a flag, a number, a string, a dtype, a short list of these) of a class, of a module
    or of a configuration object in a module. Convert again then. Changes by the forward itself, module-level
    variables and attributes of other objects are not checked.

    `convert_syncbn_model` may come before or after. torch.jit.script and torch.ao.quantization need `revert`
    first. Converted BatchNorms are differentiable once, in reverse mode. A forward that catches an exception
    while it is traced counts as one that cannot be traced. A trace has one outcome of a branch that depends
    on a random number; `verify` tests the others.

    Raises:
        ValueError: `memory` or `budget` is none of the above, `weight_casts` is given with a `memory` that
            rebuilds nothing, `budget` with a `memory` other than "auto" or without a forward that can be
            measured, or `model` is a torch.fx.GraphModule.
    """
    if memory not in MEMORY:
        raise ValueError(f"convert: memory is {memory!r}; one of {', '.join(MEMORY)} expected")
    _check_extent(memory, weight_casts, budget, example_inputs)
    if isinstance(model, fx.GraphModule):
        raise ValueError(
            "convert: model is a torch.fx.GraphModule, whose forward is generated; "
            "convert the module that it was traced from"
        )
    revert(model)
    arguments = as_arguments(example_inputs)
    norms = [module for module in model.modules() if layers.find(module)]
    before = observe(model, norms, arguments) if arguments else Observed()
    if budget is not None and before.kept is None:
        raise ValueError(
            f"convert: budget needs a training forward that can be measured; {before.unmeasured}"
        )
    traces, untraced = tracing.trace(model, before.constants)
    planner = LayerPlanner(model, memory)
    plans = planner.plans(traces)
    if arguments and any(planner.is_open(plan, traces) for plan in plans):
        exported = exporting.trace(model, arguments)
        if exported:
            settled = {plan.name: plan for plan in plans if not planner.is_open(plan, traces)}
            plans, traces = planner.plans(exported, settled), traces + exported
    kinds = {plan.name: type(plan.layer.module).__name__ for plan in plans}
    policy = None
    if memory in _REBUILDS:
        policy = Policy(products=memory == "gemm" or budget is not None, weight_casts=weight_casts)
        adopt_blocks(model, policy)
    _apply(model, [plan for plan in plans if plan.mode != "left"], planner.names, traces, policy)
    try:
        chosen = "" if budget is None else apply_budget(model, arguments, budget, before.kept, policy)
    except BaseException:
        revert(model)
        raise
    after, estimated, idle, tensors = _measured(model, arguments, before)
    rows = [
        _row(plan, kinds[plan.name], before.sizes.get(plan.layer.module), plan.layer.module in idle)
        for plan in plans
    ]
    opaque = [planner.names[module] or type(module).__name__ for module in untraced if _holds_norms(module)]
    kept_before = None if after is None else before.kept
    return model, Report(rows, opaque, kept_before, after, estimated, tensors, chosen)


def _check_extent(memory: str, weight_casts: bool, budget: float | None, example_inputs: object) -> None:
    if weight_casts and memory not in _REBUILDS:
        raise ValueError(
            f"convert: weight_casts=True with memory={memory!r}, which rebuilds nothing; one of "
            f"{', '.join(_REBUILDS)} expected"
        )
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < 1:
        raise ValueError(f"convert: budget is {budget!r}; a number above 0 and below 1 expected")
    if memory != "auto":
        raise ValueError(
            f"convert: budget with memory={memory!r}; 'auto' expected, since the budget sets the extent"
        )
    if example_inputs is None:
        raise ValueError("convert: budget without example_inputs; they are needed to measure a forward")


def _measured(
    model: nn.Module, arguments: Arguments | None, before: Observed
) -> tuple[int | None, str, set[nn.Module], list[TensorReport]]:
    """Measures a training forward of the converted model.

    Returns:
        The kept bytes, or None and the reason; the layers that did not run as converted; the saved tensors.
    """
    if before.kept is None:
        return None, before.unmeasured, set(), []
    tensors: list[TensorReport] = []
    try:
        kept, ran = kept_bytes(model, arguments, lambda result: tensors.extend(account(result, model)))
    except torch.OutOfMemoryError:
        return None, "a training forward needs more memory than there is", set(), []
    except BaseException:
        revert(model)
        raise
    for module in model.modules():
        if isinstance(module, ConvertedRoot):
            module._proof.begin(module)  # records the restored state
    norms = (module for module in model.modules() if isinstance(module, (ConvertedNorm, ConvertedNormSync)))
    return kept, "", set(norms) - ran, tensors


def _row(plan: LayerPlan, kind: str, size: int | None, idle: bool) -> LayerReport:
    kept = saved = None
    reason = plan.reason
    if size is not None:
        after = plan.kept_before if idle else plan.kept_after
        kept, saved = after * size, (plan.kept_before - after) * size
    if idle:
        reason += (
            "; with the example inputs it runs as the original, since their forward was not traced there"
        )
    return LayerReport(plan.name, kind, str(plan.activation), plan.mode, reason, kept, saved)


def _holds_norms(module: nn.Module) -> bool:
    """Whether a child is a BatchNorm, whose output only the forward of `module` reads."""
    return any(isinstance(child, nn.modules.batchnorm._NormBase) for child in module.children())


def _apply(
    model: nn.Module,
    plans: list[LayerPlan],
    names: dict[nn.Module, str],
    traces: list[tracing.Trace],
    policy: Policy | None,
) -> None:
    tokens: dict[nn.Module, str] = {model: uuid.uuid4().hex}
    proven: dict[nn.Module, list[Proven]] = defaultdict(list)
    absorbed: dict[nn.Module, list[tuple[str, str]]] = defaultdict(list)
    for plan in plans:
        module, key = plan.layer.module, f"{tokens[model]}:{plan.name}"
        for root, modes in plan.roots.items():
            tokens.setdefault(root, uuid.uuid4().hex)
            proven[root].append(Proven(key, frozenset(modes), References(plan.watched)))
        for activation in plan.absorbs:
            absorbed[activation].append((key, plan.name))
        adopt_norm(
            module,
            activation=plan.activation.name,
            activation_param=plan.activation.param,
            memory=plan.mode,
            _key=key,
            _tokens=frozenset(tokens[root] for root in plan.roots),
            _absorbs=bool(plan.absorbs),
            _adds=plan.adds,
            _through_views=plan.through_views,
            _reshaped=plan.reshaped,
        )
    for activation, places in absorbed.items():
        adopt(
            activation,
            AbsorbedActivation,
            _keys=frozenset(key for key, _ in places),
            _in=tuple(name for _, name in places),
        )
    for root, token in tokens.items():
        mine = [trace for trace in traces if trace.root is root]
        example = next((trace.example for trace in mine if trace.example), None)
        constants = mine[0].constants if mine else {}
        proof = Proof(token, root, proven[root], constants, example, policy)
        adopt(root, ConvertedRoot, _proof=proof)
    for root in tokens:
        root._proof.begin(root)


def revert(model: nn.Module) -> nn.Module:
    """Undoes `convert` in place: restores the original classes and attributes. Returns `model`."""
    for module in model.modules():
        for mixin in conversions(module):
            release(module, mixin)
    return model
