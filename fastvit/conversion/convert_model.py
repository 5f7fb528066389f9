"""`convert`: recompute scopes round the forwards of a model and of its blocks, by hooks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from .._checks import Model, check_flag, check_module
from .._deprecation import renamed_arguments
from ..recompute import Policy, RecomputeLevel
from .budget import make_recording_policy, parse_budget, plan_budget
from .budget_hook import BudgetHook
from .copy_runner import split_example_inputs
from .scope_hooks import add_scope_hooks, is_converted
from .skip_pairs import check_skip


@renamed_arguments(products="matmuls", weight_casts="recompute_weight_casts")
def convert(
    model: Model,
    *,
    matmuls: bool = False,
    recompute_weight_casts: bool = False,
    budget: float | str | None = None,
    example_inputs: Tensor | Sequence | Mapping | None = None,
    skip: Iterable[tuple[str, str]] = (),
) -> Model:
    """Adds hooks to a model, by which it keeps less memory for backward and has the same gradients.

    Outputs that take little arithmetic (normalisations, activations, elementwise products, sums, casts,
    copies, poolings) are recomputed in backward instead of kept, if the inputs of the op are kept anyway.
    The forward of the model and of its blocks runs in a `recompute_scope`, which module hooks open and close.
    Blocks have a normalisation and weights; they are elements of a container, or attributes of one class.
    Nothing is run or traced; no module, class, parameter or buffer changes. Gradients have the same bits.
    Results, running statistics and random numbers are as before. A second call replaces the first. `revert`
    undoes `convert`.

    Outputs of ops without a rule are kept. Tensors that were written to before an op saved them are kept too.
    A write by other ways than torch's, such as an extension's, is not noticed; `verify` finds it. Nothing is
    recomputed in a forward that bypasses `model(...)` and the blocks' calls, runs without gradients, or runs
    inside torch's checkpoint. Compiled code recomputes the same ops by torch's partitioner.

    Side effects: while a converted model exists, `torch.jit._recursive.get_hook_stubs` is replaced for the
    process, so that torch.jit.script does not compile the hooks. While a scope is open,
    `torch.autograd.graph.disable_saved_tensors_hooks` and `torch.overrides.has_torch_function` are replaced
    for the process, so that torch's own code runs as without a scope.

    Args:
        model: the model, which gets hooks and is changed in nothing else.
        matmuls: recompute outputs of Linears too, if they are no narrower than the input. A plain ViT then
            keeps a fifth instead of three fifths, for the time of these matmuls.
        recompute_weight_casts: cast weights again instead of keeping the half-precision copies that autocast
            makes. A write to a weight before the backward is then an error. A write through `weight.data` is
            not noticed, and the gradient is that of the new weight.
        budget: the peak of a step: a fraction of the model's own, above 0 and at most 1, or bytes, an int or
            a str such as "2 GiB". The peak is what a forward and a backward allocate at a time above the
            model, its gradients and the optimizer's state. The budget recomputes as little work as it needs:
            any op that has a rule, up to whole blocks, and several blocks from one input if that has a
            smaller peak. "least" is the smallest peak. A smaller budget never has a larger peak on paper; a
            step is within a few percent of it.
        example_inputs: for a budget: a tensor, a tuple of arguments or a dict of keyword arguments. A forward
            of a copy is recorded, and steps of a copy are measured. Call `convert` as the model is trained,
            under the same autocast. Without example inputs the first training forward with gradients
            recomputes whole blocks, and its record gives the plan, which holds from the next forward on. A
            forward with inputs of more bytes plans again. In compiled code a fraction is torch's
            `activation_memory_budget`, of kept bytes, which a convolutional model may exceed; "least" is
            matmuls=True; bytes need example inputs.
        skip: pairs of a block's name and an op's name: `[("blocks.3", "gelu")]`. The outputs of these ops are
            kept. "" is the model itself. The names are those that `report` prints, and
            `verify(...).skip` has the pairs whose recomputed outputs differ.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or an example input is a size and not a tensor.
        ValueError: `matmuls` or `recompute_weight_casts` is no bool, `budget` is out of range or less than
            what is possible with `example_inputs`, `example_inputs` are given without it, the model cannot be
            copied for them, or `skip` has no pairs, or a block or op that does not exist.

    Warns:
        UserWarning: a training forward shows, once, that the budget cannot be met, and the plan with the
            least peak is taken.
    """
    check_module("convert", model)
    check_flag("convert", "matmuls", matmuls)
    check_flag("convert", "recompute_weight_casts", recompute_weight_casts)
    level = RecomputeLevel.MATMULS if matmuls else RecomputeLevel.CHEAP
    policy = Policy(level, recompute_weight_casts, skip=check_skip(model, skip))
    if budget is None:
        if example_inputs is not None:
            raise ValueError("convert: budget and example_inputs expected together, got example_inputs alone")
        return add_scope_hooks(model, policy)
    return _convert_to_budget(model, policy, budget, example_inputs)


def _convert_to_budget(
    model: Model, policy: Policy, budget: float | str, example_inputs: Tensor | Sequence | Mapping | None
) -> Model:
    parsed_budget = parse_budget(budget)
    if example_inputs is not None:
        return add_scope_hooks(
            model, plan_budget(model, policy, parsed_budget, split_example_inputs(example_inputs))
        )
    if parsed_budget.fraction == 1:
        return add_scope_hooks(model, dataclasses.replace(policy, only_sites=frozenset()))
    policy = dataclasses.replace(
        make_recording_policy(policy), kept_fraction=1.0 if parsed_budget.is_least else parsed_budget.fraction
    )
    return add_scope_hooks(model, policy, functools.partial(BudgetHook, budget=parsed_budget))


def ensure_converted(model: Model) -> Model:
    """Returns `model`, which is converted by default unless it is converted already."""
    return model if is_converted(model) else convert(model)
