"""`convert` and `revert`."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ..recompute import Policy
from . import exporting, layers, tracing
from .accounts import Saved, account
from .adopted import Adopted, References, adopt, release
from .budget import keep_to
from .calls import Arguments, as_arguments
from .plan import MEMORY, LayerPlan, LayerPlanner
from .rebuilding import adopt_blocks
from .report import LayerReport, Report
from .runtime import (
    AbsorbedActivation,
    ConvertedNorm,
    ConvertedNormSync,
    ConvertedRoot,
    Proof,
    Proven,
    adopt_norm,
)
from .sizes import Observed, kept_bytes, observe

_REBUILDS = ("auto", "gemm", "recompute")


def convert(
    model: nn.Module,
    memory: str = "auto",
    example_inputs: Tensor | Sequence | Mapping | None = None,
    *,
    weight_casts: bool = False,
    budget: float | None = None,
) -> tuple[nn.Module, Report]:
    """Lets a model keep less for backward: BatchNorm and its activation become one layer wherever that is
    proven safe, and outputs of LayerNorms, activations, gates and the like are rebuilt, to the same bits.

    Args:
        model: changed in place. Layers stay the objects they are, in a class derived from the one they had:
            parameters, buffers, state_dict, hooks, requires_grad and training flags are untouched, and
            optimizers built before stay valid. No forward is rewritten, and no Linear touched.
        memory: "auto" overwrites a BatchNorm's input where that is proven safe and the activation can be
            inverted, and rebuilds what takes no matrix product elsewhere. "gemm" rebuilds the output of
            Linears too that are no narrower than their input: less still, for more time. "recompute" is
            "auto" without overwriting. "inplace" converts only what may be overwritten. "keep" fuses
            BatchNorm and activation without saving memory.
        example_inputs: what forward takes in training (a tensor, a tuple of arguments or a dict of keyword
            arguments). A training forward is run with a copy of them before the conversion, which keeps
            nothing, and one after, which keeps what a step does: the report has the difference. Where that
            is not possible the report estimates, and says why. This is also the call that is traced.
        weight_casts: cast weights again in the backward pass instead of keeping the copies in half precision
            that autocast makes of them: 2 bytes for each element of a weight, whatever the batch. A weight
            that is written to before the backward is then an error; a write through `weight.data` goes
            unnoticed, and the gradient is that of the new weight.
        budget: the share of what the model keeps now that it is to keep, above 0 and below 1: 0.5 for half.
            Rebuilds no more than that takes, of everything that "gemm" would, what saves most bytes for its
            arithmetic first, by measured training forwards; so it wants example_inputs. The report says what
            was chosen, or that all of it is not enough.

    Returns the model, and a `Report` that prints as tables: what a training forward keeps before and after,
    both measured; the tensors that it keeps or rebuilds, from what, and why some are left; and per BatchNorm
    layer its mode and the reason. `report.plot(path)` draws it.

    Outputs that are rebuilt: of LayerNorm, RMSNorm and modules that are one of them, GELU, SiLU and other
    activations, products (gates, LayerScale), sums, casts, concatenations, rolls and copies, wherever what
    they are made from is kept anyhow. How they were made is read from autograd's graph as the forward runs,
    whatever the model is, and the same op makes them again; `fastvit.recompute_scope` tells more. The model
    and each of its blocks do so when they are called.

    BatchNorms that are found: torch's BatchNorm1d/2d/3d and SyncBatchNorm, fastvit's SyncBatchNorm, timm's
    BatchNormAct2d and mapillary's ABN; an activation module that reads the layer's output alone, through
    views and Identity; the addition of a residual in between, where nothing else runs between the three and
    somebody keeps the residual for backward anyhow. A layer that an activation function follows is rebuilt by
    itself where somebody keeps its output. Other subclasses are left and named. Who reads what is known from
    tracing the forward symbolically, in training and in evaluation, called as with the example inputs, or
    with default arguments where there are none; modules that cannot be traced are taken in the pieces that
    can, and where that leaves a layer alone torch.export is asked, if there are example inputs.

    But for its classes the model is left as it was, whatever its forward changes: attributes, buffers,
    parameters, caches, hooks' counts and random states are put back. What a forward does to the world outside
    (a file, say) is done.

    A converted BatchNorm is what it was outside the forward that was traced, in another call (tensors where
    there were none or the other way round, other values of arguments with defaults; where torch.export was
    asked, other shapes and dtypes too), under torch.compile and exporters, and once somebody registers a hook
    that would see another tensor. So it is, and a warning says why, once something is another than it was
    when the model was converted: a module; a forward, another method or a plain value (a flag, a number, a
    word, a dtype, a short list of these) of a class, of a module or of a configuration object that a module
    holds. Convert again then. What a forward changes itself, module-level variables and the insides of other
    objects are not watched.

    convert_syncbn_model may come before or after. torch.jit.script and torch.ao.quantization want `revert`
    first. Converted BatchNorms are differentiable once, in reverse mode. A forward that catches an exception
    while it is traced counts as one that cannot be. What tracing does not follow (a branch on a random
    number, say) it takes as it came out then: `verify` is the test.

    Raises:
        ValueError: `memory` or `budget` is none of the above, `weight_casts` comes with a `memory` that
            rebuilds nothing, `budget` with another than "auto" or without a forward that can be measured, or
            `model` is a torch.fx.GraphModule.
    """
    if memory not in MEMORY:
        raise ValueError(f"convert: memory is {memory!r}; one of {', '.join(MEMORY)} expected")
    _check_extent(memory, weight_casts, budget, example_inputs)
    if isinstance(model, fx.GraphModule):
        raise ValueError(
            "convert: model is a torch.fx.GraphModule, which generates its own forward; "
            "convert the module that it was traced from"
        )
    revert(model)
    arguments = as_arguments(example_inputs)
    norms = [module for module in model.modules() if layers.find(module)]
    before = observe(model, norms, arguments) if arguments else Observed()
    if budget is not None and before.kept is None:
        raise ValueError(
            f"convert: budget wants a training forward that can be measured; {before.unmeasured}"
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
        chosen = "" if budget is None else keep_to(model, arguments, budget, before.kept, policy)
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
        raise ValueError(f"convert: budget with memory={memory!r}; 'auto' expected, it chooses how far to go")
    if example_inputs is None:
        raise ValueError("convert: budget without example_inputs, with which to measure what is kept")


def _measured(
    model: nn.Module, arguments: Arguments | None, before: Observed
) -> tuple[int | None, str, set[nn.Module], list[Saved]]:
    """What a training forward of the converted model keeps, or why that is not known; layers at rest; of what
    tensors that is.
    """
    if before.kept is None:
        return None, before.unmeasured, set(), []
    tensors: list[Saved] = []
    try:
        kept, ran = kept_bytes(model, arguments, lambda result: tensors.extend(account(result, model)))
    except torch.OutOfMemoryError:
        return None, "a training forward needs more memory than there is", set(), []
    except BaseException:
        revert(model)
        raise
    for module in model.modules():
        if isinstance(module, ConvertedRoot):
            module._proof.begin(module)  # from what was put back after the run
    norms = (module for module in model.modules() if isinstance(module, (ConvertedNorm, ConvertedNormSync)))
    return kept, "", set(norms) - ran, tensors


def _row(plan: LayerPlan, kind: str, size: int | None, idle: bool) -> LayerReport:
    kept = saved = None
    reason = plan.reason
    if size is not None:
        after = plan.kept_before if idle else plan.kept_after
        kept, saved = after * size, (plan.kept_before - after) * size
    if idle:
        reason += "; not with the example inputs, whose forward is not the traced one there"
    return LayerReport(plan.name, kind, str(plan.activation), plan.mode, reason, kept, saved)


def _holds_norms(module: nn.Module) -> bool:
    """Whether a BatchNorm is among the children whose outputs only this module's forward sees."""
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
    """Undoes `convert` in `model`, in place, and returns `model`; the classes and attributes of before."""
    for module in model.modules():
        while isinstance(module, Adopted):
            release(module)
    return model
