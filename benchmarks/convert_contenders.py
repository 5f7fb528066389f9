"""The contenders of bench_convert.py: `make_contender` makes a model, and `Contender` measures one."""

import copy
import functools
import time

import torch
from budget_curve import is_budget
from harness import time_us
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
    """A model, with the autocast context of its forward and the times of its steps in microseconds.

    A step takes `num_parts` parts of the batch one after the other, and adds their gradients.
    """

    def __init__(self, model, autocast, num_parts=1):
        self.model, self.autocast, self.num_parts = model, autocast, num_parts
        self.times_us = []

    def forward(self, x):
        torch.manual_seed(0)  # All contenders draw the same numbers for dropout and drop path.
        with self.autocast():
            return self.model(x)

    def step(self, x) -> None:
        for chunk in x.chunk(self.num_parts):
            (self.forward(chunk).float().square().mean() * (len(chunk) / len(x))).backward()

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def compute_gradients(self, x) -> dict:
        """Returns the gradients of a first step, by parameter. Later steps reuse buffers of the first."""
        self.zero_grad()
        self.step(x)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.zero_grad()
        return gradients

    def measure_kept(self, x) -> float:
        """Returns the MiB that a training forward leaves allocated."""
        chunk = x.chunk(self.num_parts)[0]
        return live_bytes(lambda: self.forward(chunk), x.device)[0] / MIB

    def measure_peak(self, x) -> float:
        """Returns the peak of a step in MiB. Gradients of weights are freed at once, so they hardly count."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
        peak = peak_bytes(lambda: self.step(x), x.device) / MIB
        for hook in hooks:
            hook.remove()
        return peak

    def time_step(self, x) -> None:
        """Appends the time of a step to `times_us`."""
        clock = time.perf_counter if x.device.type == "cuda" else time.process_time
        time_us(lambda: None, x.device)  # Waits until a GPU has finished earlier work.
        self.times_us.append(time_us(lambda: self.step(x), x.device, clock))
        self.zero_grad()


def _innermost_blocks(model) -> set:
    """Returns the blocks of a model that contain no other block."""
    blocks = set(find_blocks(model))
    return {block for block in blocks if not any(m in blocks for m in block.modules() if m is not block)}


def with_checkpointing(model, context_fn=None):
    """Returns the model with its innermost blocks checkpointed; `context_fn` is torch's option."""
    options = {} if context_fn is None else {"context_fn": context_fn}
    blocks = _innermost_blocks(model)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **options),
        check_fn=lambda module: module in blocks,
    )
    return model


aten = torch.ops.aten
MATMUL_OPS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
SAC_SAVED_OPS = MATMUL_OPS | {
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def selective_checkpoint_context(recomputes_half: bool):
    """Returns a context function that saves convolutions, attention and matmuls.

    With `recomputes_half` every second matmul is recomputed instead.
    """

    def context_fn():
        num_matmuls = {False: 0, True: 0}  # False: in the forward. True: in the recomputation.

        def policy(context, op, *args, **kwargs):
            if op in MATMUL_OPS:
                num_matmuls[context.is_recompute] += 1
                if recomputes_half and num_matmuls[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in SAC_SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return context_fn


CONTENDER_FACTORIES = {  # a contender's name -> a function that converts a copy of the eager model
    "convert": fastvit.convert,
    "matmuls": lambda model: fastvit.convert(model, matmuls=True),
    "weight_casts": lambda model: fastvit.convert(model, recompute_weight_casts=True),
    "fuse": lambda model: fastvit.convert(fastvit.fuse(model)),
    "sac": lambda model: with_checkpointing(model, selective_checkpoint_context(False)),
    "sac_half": lambda model: with_checkpointing(model, selective_checkpoint_context(True)),
    "checkpoint": with_checkpointing,
    "accumulate": lambda model: model,
}
CHECKPOINTING = ("sac", "sac_half", "checkpoint")
COMPILED_CONTENDERS = ("compiled_eager", "compiled_convert")
NUM_PARTS = {"accumulate": 2}  # a contender -> the parts of its batch


def make_contender(contender: str, eager, x):
    """Returns a contender made from a copy of the eager model.

    `x` is the example input of a budget. Without it the budget's plan is made in the first training step.
    """
    model, name = copy.deepcopy(eager), contender.removeprefix("compiled_")
    if is_budget(name):
        has_casts = torch.is_autocast_enabled(next(eager.parameters()).device.type)
        budget = "least" if name == "least" else float(name)
        model = fastvit.convert(model, recompute_weight_casts=has_casts, budget=budget, example_inputs=x)
    elif name != "eager":
        model = CONTENDER_FACTORIES[name](model)
    return torch.compile(model) if contender in COMPILED_CONTENDERS else model


def select_autocast(contender: str, precision: str, arguments):
    """Returns a function that makes the contender's autocast context.

    Contenders that recompute the casts of weights have no cache of autocast, which would keep all of them.
    """
    uncached = ("weight_casts", *(CHECKPOINTING if arguments.curve else ()))
    return functools.partial(
        torch.autocast,
        arguments.device,
        torch.bfloat16,
        enabled=precision == "bf16",
        cache_enabled=not (is_budget(contender) or contender in uncached),
    )
