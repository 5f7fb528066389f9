"""The contenders of bench_convert.py: how each is made of the eager model, and how it is measured."""

import copy
import functools
import time

import torch
from budget_curve import is_budget
from harness import timed_us
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fastvit
from fastvit.conversion.blocks import find_blocks
from fastvit.memory import live_bytes, peak_bytes

MIB = 2**20


class Contender:
    def __init__(self, model, autocast):
        self.model, self.autocast = model, autocast
        self.us = []

    def forward(self, x):
        torch.manual_seed(0)  # drop path and dropout draw the same
        with self.autocast():
            return self.model(x)

    def step(self, x) -> None:
        self.forward(x).float().square().mean().backward()

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self, x) -> dict:
        """Runs a first step, which allocates one-time buffers."""
        self.zero()
        self.step(x)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.zero()
        return gradients

    def kept(self, x) -> float:
        """MiB that a training forward leaves allocated."""
        return live_bytes(lambda: self.forward(x), x.device)[0] / MIB

    def peak(self, x) -> float:
        """Peak MiB of a step; gradients of weights, which are no activations, are freed at once."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
        peak = peak_bytes(lambda: self.step(x), x.device) / MIB
        for hook in hooks:
            hook.remove()
        return peak

    def timed(self, x) -> None:
        clock = time.perf_counter if x.device.type == "cuda" else time.process_time
        timed_us(lambda: None, x.device)  # waits until a GPU has finished earlier work
        self.us.append(timed_us(lambda: self.step(x), x.device, clock))
        self.zero()


def _innermost_blocks(model) -> set:
    found = set(find_blocks(model))
    return {block for block in found if not any(m in found for m in block.modules() if m is not block)}


def checkpointed(model, context_fn=None):
    options = {} if context_fn is None else {"context_fn": context_fn}
    found = _innermost_blocks(model)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **options),
        check_fn=lambda module: module in found,
    )
    return model


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
KEPT = PRODUCTS | {
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def selective(repeats_second: bool):
    """Keeps convolutions, attention and products; with repeats_second every second product is repeated."""

    def context_fn():
        count = {False: 0, True: 0}

        def policy(context, op, *args, **kwargs):
            if op in PRODUCTS:
                count[context.is_recompute] += 1
                if repeats_second and count[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return context_fn


MAKERS = {  # a contender's name -> what makes it of a copy of the eager model
    "convert": fastvit.convert,
    "products": lambda model: fastvit.convert(model, matmuls=True),
    "weight_casts": lambda model: fastvit.convert(model, recompute_weight_casts=True),
    "fuse": lambda model: fastvit.convert(fastvit.fuse(model)),
    "sac": lambda model: checkpointed(model, selective(False)),
    "sac_half": lambda model: checkpointed(model, selective(True)),
    "checkpoint": checkpointed,
}
CHECKPOINTING = ("sac", "sac_half", "checkpoint")
COMPILED = tuple(f"compiled_{name}" for name in ("eager", "sac", "convert", "0.4", "0.2", "0.1"))


def make(contender: str, eager, x):
    model, plain = copy.deepcopy(eager), contender.removeprefix("compiled_")
    if is_budget(plain):
        has_casts = torch.is_autocast_enabled(x.device.type)
        budget = "least" if plain == "least" else float(plain)
        model = fastvit.convert(model, recompute_weight_casts=has_casts, budget=budget, example_inputs=x)
    elif plain != "eager":
        model = MAKERS[plain](model)
    return torch.compile(model) if contender in COMPILED else model


def select_autocast(contender: str, precision: str, arguments):
    """Returns what makes the contender's autocast; autocast's cache would hold the copies of all weights."""
    uncached = ("weight_casts", *(CHECKPOINTING if arguments.curve else ()))
    return functools.partial(
        torch.autocast,
        arguments.device,
        torch.bfloat16,
        enabled=precision == "bf16",
        cache_enabled=not (is_budget(contender) or contender in uncached),
    )
