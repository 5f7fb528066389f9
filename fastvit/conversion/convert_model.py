"""`convert` and `revert`: recompute scopes round the forwards of a model and of its blocks, by hooks."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .._checks import Model, check_flag, check_module
from ..fuse import unfuse
from ..recompute import Policy, RecomputeLevel, close_scope, dynamo_hooks, open_scope
from .budget import Budget, parse_budget, plan_budget
from .copy_runner import as_arguments

__all__ = ["convert", "revert"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ScopeHook:
    """Opens a recompute scope as a forward pre-hook; closes it as a forward hook, after an exception too."""

    def __init__(self, policy: Policy, block: str):
        self.policy = policy
        self.share = str(policy.share)  # Dynamo would make a number a symbol
        self.block = block
        self.products = policy.level >= RecomputeLevel.MATMULS  # a constant to Dynamo, as an int need not be
        _hide_scopes_from_torchscript()

    def __reduce__(self):
        return ScopeHook, (self.policy, self.block)

    def __call__(self, module: nn.Module, args: object, *output: object) -> None:
        if output and torch.compiler.is_compiling():
            dynamo_hooks.end_traced_scope(self.products, self.policy.weight_casts, self.share)
        elif output:
            close_scope(module, *[one if isinstance(one, (tuple, list)) else (one,) for one in output])
        elif torch.compiler.is_compiling():
            dynamo_hooks.begin_traced_scope()
        elif torch.is_grad_enabled():
            inputs = args if isinstance(args, tuple) else ()
            open_scope(module, self.policy, self.block, inputs, sys._getframe(1))


class BudgetHook:
    """A forward pre-hook: meets a budget with the arguments of the first training forward, and goes."""

    def __init__(self, policy: Policy, budget: Budget):
        self.policy, self.budget = policy, budget

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        _add(module, plan_budget(module, self.policy, self.budget, (args, kwargs), revert, _add))


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
    forward of the model and of its blocks (elements of containers in which there is a normalisation) runs in
    a `recompute_scope`, by module hooks. Nothing is run or traced; no module, class, parameter or buffer
    changes. Results, running statistics and random numbers are as before. A second call replaces the first.

    Kept are results of ops that are not known, and tensors that were written to before they were saved. A
    write by other ways than torch's, such as an extension's, is not noticed; `verify` finds it. A forward
    that does not go through the call of the model or of a block is as before, and so is one without
    gradients or inside torch's checkpoint. Compiled code recomputes the same ops by torch's partitioner.

    Args:
        model: changed in place, by hooks alone.
        products: rebuild outputs of Linears too, where they are no narrower than the input. A plain ViT then
            keeps a fifth instead of three fifths, for the time of these matrix products.
        weight_casts: cast weights again instead of keeping the half-precision copies that autocast makes. A
            write to a weight before the backward is then an error, and one through `weight.data` is not
            noticed: the gradient is that of the new weight.
        budget: what remains of the kept bytes: a share, above 0 and at most 1, or bytes, an int or a str such
            as "2 GiB". It takes what is needed of all that can be rebuilt, the ops with most bytes for their
            work first, and products last; then attention, convolutions and Linears that narrow, down to what
            goes into each block: "least" is that. Below it several blocks are made from the input of the
            first, for which the peak of a step may rise. Forwards of a copy are measured for this.
        example_inputs: for a budget: a tensor, a tuple of arguments or a dict of keyword arguments. Call
            `convert` as the model is trained, under the same autocast. Without them the first forward with
            gradients of the model in training takes its own arguments for this, and lasts as long as some
            twenty forwards. In compiled code the share is torch's `activation_memory_budget`, which a
            convolutional model may exceed, "least" is products=True, and bytes need example inputs.
        skip: pairs of a block's name and an op, whose results are kept: `[("blocks.3", "gelu")]`. "" is the
            model itself. `verify(...).sites` has those that differ.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or an example input is a size and not a tensor.
        ValueError: `products` or `weight_casts` is no bool, `budget` is out of range or less than what is
            possible, `example_inputs` are given without it, the model cannot be copied for it, or a block of
            `skip` does not exist. Without `example_inputs` the first forward raises what only a forward can
            show.
    """
    check_module("convert", model)
    check_flag("convert", "products", products)
    check_flag("convert", "weight_casts", weight_casts)
    policy = Policy(
        RecomputeLevel.MATMULS if products else RecomputeLevel.CHEAP,
        weight_casts,
        skip=_check_skip(model, skip),
    )
    if budget == "least":
        return _add(model, dataclasses.replace(policy, level=RecomputeLevel.EVERY_OP))
    if budget is None:
        if example_inputs is not None:
            raise ValueError("convert: budget and example_inputs expected together, got example_inputs alone")
        return _add(model, policy)
    try:
        wanted = parse_budget(budget)
    except ValueError as error:
        raise ValueError(f"convert: {error}") from None
    if example_inputs is not None:
        arguments = as_arguments(example_inputs)
        return _add(model, plan_budget(model, policy, wanted, arguments, revert, _add))
    _add(model, dataclasses.replace(policy, share=wanted[0]))
    for module in _entry_modules(model):
        module.register_forward_pre_hook(BudgetHook(policy, wanted), prepend=True, with_kwargs=True)
    return model


def _check_skip(model: nn.Module, skip: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    pairs = list(skip) if isinstance(skip, Iterable) else [skip]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
            raise ValueError(f"convert: skip must have pairs of a block's name and an op, got {pair!r}")
    names = list(_scoped(model).values()) if pairs else []
    for block, _ in pairs:
        if block not in names:
            raise ValueError(f"convert: skip must have names of blocks ({names}), got {block!r}")
    return frozenset(pairs)


def _add(model: Model, policy: Policy) -> Model:
    """Adds hooks in place of those that there are."""
    _take_off(model)
    for module, name in _scoped(model).items():
        # First of all hooks: the block ends before FSDP shards its parameters again.
        hook = ScopeHook(policy, name)
        module.register_forward_pre_hook(hook, prepend=True)
        module.register_forward_hook(hook, prepend=True, always_call=True)
        dynamo_hooks.enable(module, policy)
    return model


def _scoped(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose forwards run in a scope, with their names."""
    names = {module: name for name, module in model.named_modules()}
    return {module: names[module] for module in [*_entry_modules(model), *find_blocks(model)]}


def _entry_modules(model: nn.Module) -> list[nn.Module]:
    """The model, or where it is a list or a dictionary of modules, which is never called, those."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [module for child in model.children() for module in _entry_modules(child)]
    return [model]


def has_scope_hook(module: nn.Module) -> bool:
    """Whether the forward of `module` runs in a scope of its own."""
    return any(isinstance(hook, ScopeHook) for hook in module._forward_pre_hooks.values())


def is_converted(model: nn.Module) -> bool:
    """Whether there are scopes in `model`."""
    return any(map(has_scope_hook, model.modules()))


def ensure_converted(model: Model) -> Model:
    """`model`, converted as it is, or by default."""
    return model if is_converted(model) else convert(model)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of containers in which there is a normalisation."""
    with_norm: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if "Norm" in type(module).__name__:
            parts = name.split(".")
            with_norm.update(".".join(parts[:depth]) for depth in range(len(parts)))
    return [
        child
        for name, container in model.named_modules(remove_duplicate=False)
        if isinstance(container, _CONTAINERS) and (name in with_norm or not name)
        for key, child in container.named_children()
        if not isinstance(child, _CONTAINERS) and f"{name}.{key}".lstrip(".") in with_norm
    ]


@functools.cache
def _hide_scopes_from_torchscript() -> None:
    """torch.jit.script compiles hooks; those of a scope mean nothing to it."""
    get_hook_stubs = torch.jit._recursive.get_hook_stubs

    @functools.wraps(get_hook_stubs)
    def get_hook_stubs_without_scopes(module: nn.Module):
        hooks = module._forward_hooks, module._forward_pre_hooks
        before = [dict(each) for each in hooks]
        _pop_scopes(module, *hooks)
        try:
            return get_hook_stubs(module)
        finally:
            for each, old in zip(hooks, before, strict=True):
                each.clear()
                each.update(old)

    torch.jit._recursive.get_hook_stubs = get_hook_stubs_without_scopes


def revert(model: Model) -> Model:
    """Undoes `convert` and `fuse` in place.

    Args:
        model: converted, fused or neither.

    Returns:
        `model`.
    """
    check_module("revert", model)
    _take_off(model)
    return unfuse(model)


def _take_off(model: nn.Module) -> None:
    for module in model.modules():
        _pop_scopes(
            module,
            module._forward_pre_hooks,
            module._forward_hooks,
            module._forward_hooks_always_called,
            module._forward_pre_hooks_with_kwargs,
        )
        dynamo_hooks.disable(module)


def _pop_scopes(module: nn.Module, *dictionaries: dict) -> None:
    """Removes the hooks of a scope from dictionaries of a module."""
    every = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
    for key, hook in every:
        if hook is dynamo_hooks.announce_compiled_module or isinstance(hook, (ScopeHook, BudgetHook)):
            for one in dictionaries:
                one.pop(key, None)
