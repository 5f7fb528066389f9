"""`convert`: recompute scopes round the forwards of a model and of its blocks, by hooks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from .._checks import Model, check_flag, check_module
from ..recompute import Policy, RecomputeLevel
from .blocks import name_scoped_modules
from .budget import parse_budget, plan_budget, recording_policy
from .budget_hook import BudgetHook
from .copy_runner import as_arguments
from .scope_hooks import add_scope_hooks, is_converted


def convert(
    model: Model,
    *,
    products: bool = False,
    weight_casts: bool = False,
    budget: float | str | None = None,
    example_inputs: Tensor | Sequence | Mapping | None = None,
    skip: Iterable[tuple[str, str]] = (),
) -> Model:
    """Reduces the memory that a model keeps for backward. Gradients have the same bits.

    Outputs that take little arithmetic (normalisations, activations, elementwise products, sums, casts,
    copies, poolings) are rebuilt in backward instead of kept, where the inputs of the op are kept anyway. The
    forward of the model and of its blocks runs in a `recompute_scope`, by module hooks. Blocks have a
    normalisation and a weight, and are elements of a container, or attributes of one class. Nothing is run or
    traced; no module, class, parameter or buffer changes. Results, running statistics and random numbers are
    as before. A second call replaces the first.

    Outputs of unknown ops are kept, and so are tensors that were written before an op saved them. A write by
    other ways than torch's, such as an extension's, is not noticed; `verify` finds it. Nothing is recomputed
    in a forward that bypasses `model(...)` and the blocks' calls, runs without gradients, or runs inside
    torch's checkpoint. Compiled code recomputes the same ops by torch's partitioner.

    Args:
        model: changed in place, by hooks alone.
        products: rebuild outputs of Linears too, where they are no narrower than the input. A plain ViT then
            keeps a fifth instead of three fifths, for the time of these matrix products.
        weight_casts: cast weights again instead of keeping the half-precision copies that autocast makes. A
            write to a weight before the backward is then an error, and one through `weight.data` is not
            noticed: the gradient is that of the new weight.
        budget: the peak of a step: a share of the model's own, above 0 and at most 1, or bytes, an int or a
            str such as "2 GiB". The peak is what a forward and a backward allocate at a time above the model,
            its gradients and the optimizer's state. The budget recomputes as little work as it needs: any op
            that has a rule, up to whole blocks, and several blocks from one input where that has a smaller
            peak. "least" is the smallest peak. A smaller budget never has a larger peak on paper; a step is
            within a few percent of it.
        example_inputs: for a budget: a tensor, a tuple of arguments or a dict of keyword arguments. A forward
            of a copy is recorded, and steps of a copy are measured. Call `convert` as the model is trained,
            under the same autocast. Without them the first forward of the model in training with gradients
            recomputes whole blocks, and its record gives the plan, which holds from the next forward on. A
            forward with inputs of more bytes plans again. In compiled code the share is torch's
            `activation_memory_budget`, of kept bytes, which a convolutional model may exceed, "least" is
            products=True, and bytes need example inputs.
        skip: pairs of a block's name and an op, whose results are kept: `[("blocks.3", "gelu")]`. "" is the
            model itself. `verify(...).sites` has those that differ.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or an example input is a size and not a tensor.
        ValueError: `products` or `weight_casts` is no bool, `budget` is out of range or less than what is
            possible with `example_inputs`, `example_inputs` are given without it, the model cannot be copied
            for them, or a block of `skip` does not exist.

    Warns:
        UserWarning: a training forward shows, once, that the budget cannot be met, and the least is kept.
    """
    check_module("convert", model)
    check_flag("convert", "products", products)
    check_flag("convert", "weight_casts", weight_casts)
    policy = Policy(
        RecomputeLevel.MATMULS if products else RecomputeLevel.CHEAP,
        weight_casts,
        skip=_check_skip(model, skip),
    )
    if budget is None:
        if example_inputs is not None:
            raise ValueError("convert: budget and example_inputs expected together, got example_inputs alone")
        return add_scope_hooks(model, policy)
    return _convert_to_budget(model, policy, budget, example_inputs)


def _convert_to_budget(
    model: Model, policy: Policy, budget: float | str, example_inputs: Tensor | Sequence | Mapping | None
) -> Model:
    parsed = parse_budget(budget)
    if example_inputs is not None:
        return add_scope_hooks(model, plan_budget(model, policy, parsed, as_arguments(example_inputs)))
    if parsed.fraction == 1:
        return add_scope_hooks(model, dataclasses.replace(policy, only_sites=frozenset()))
    policy = dataclasses.replace(
        recording_policy(policy), kept_fraction=1.0 if parsed.is_least else parsed.fraction
    )
    return add_scope_hooks(model, policy, functools.partial(BudgetHook, budget=parsed))


def _check_skip(model: nn.Module, skip: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    pairs = list(skip) if isinstance(skip, Iterable) else [skip]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
            raise ValueError(f"convert: skip must have pairs of a block's name and an op, got {pair!r}")
    names = list(name_scoped_modules(model).values()) if pairs else []
    for block, _ in pairs:
        if block not in names:
            raise ValueError(f"convert: skip must have names of blocks ({names}), got {block!r}")
    return frozenset(pairs)


def ensure_converted(model: Model) -> Model:
    """Returns `model`, converted as it is, or by default."""
    return model if is_converted(model) else convert(model)
