"""`verify`: runs the same step on the original and on the converted model, and compares the results."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .adopted import Converted
from .calls import Arguments, as_arguments, plain_output
from .convert import convert, revert
from .runtime import ConvertedNorm, ConvertedNormSync
from .untouched import untouched

# The order of operations differs, so results differ by roundings, which depth multiplies.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-2}
_HALF_PRECISION = 0.2


@dataclass(frozen=True)
class Verification:
    """Result of `verify`: relative differences by name, largest first; true where all are within `limit`."""

    differences: dict[str, float]
    limit: float

    @property
    def ok(self) -> bool:
        return all(difference <= self.limit for difference in self.differences.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        wrong = {name: value for name, value in self.differences.items() if not value <= self.limit}
        shown = wrong or dict(list(self.differences.items())[:1])
        lines = [f"  {name}: {value:.3g}" for name, value in list(shown.items())[:20]]
        verdict = f"{len(wrong)} of {len(self.differences)} tensors differ by more than {self.limit:g}"
        return "\n".join([verdict if wrong else f"{len(self.differences)} tensors agree; at most", *lines])


def verify(
    model: nn.Module,
    inputs: Tensor | Sequence | Mapping,
    *,
    memory: str = "auto",
    dtype: torch.dtype | None = torch.float64,
    limit: float | None = None,
) -> Verification:
    """Runs one training step of the original and of the converted model, and compares the results.

    Compared are outputs, inputs after the step, the gradient of every parameter and of every floating-point
    input, and every buffer. Gradients of inputs are left out where the model sets requires_grad on its
    inputs, as some do for checkpointing. Modules run in the modes (training or evaluation) that they are in.
    `model` is not changed: two copies of it run, one reverted, and one converted (with `memory`, unless
    `model` is converted).

    Args:
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        dtype: both copies compute in it. float64 tells a wrong gradient from roundings at any depth. None is
            the model's own dtype.
        limit: largest allowed difference of a tensor, relative to its largest value. The default depends on
            `dtype` where a BatchNorm is fused, and is 0 elsewhere, since rebuilding repeats the same op. The
            scale of a gradient is at least 1e-4 of the model's largest gradient, because a gradient that is
            zero up to rounding has no scale of its own. The same holds for buffers.

    Returns:
        A `Verification`: true when all differences are within the limit. It prints those that are not.
    """
    arguments = as_arguments(inputs)

    def both(inputs_require_grad: bool) -> list[dict[str, Tensor]]:
        original, converted = revert(copy.deepcopy(model)), copy.deepcopy(model)
        if not any(isinstance(module, Converted) for module in model.modules()):
            converted, _ = convert(converted, memory, inputs)
        if dtype is not None:
            original, converted = original.to(dtype), converted.to(dtype)
        nonlocal fused
        fused = any(isinstance(module, (ConvertedNorm, ConvertedNormSync)) for module in converted.modules())
        steps = []
        for m in (original, converted):
            # Copies share the state of hooks, and both begin with the same random states.
            with untouched(model):
                steps.append(_step(m, arguments, dtype, inputs_require_grad))
        return steps

    fused = False
    try:
        want, got = both(inputs_require_grad=True)
    except RuntimeError as error:
        if "requires_grad flags of leaf" not in str(error):
            raise
        # The model sets requires_grad on its inputs, which only a leaf allows.
        want, got = both(inputs_require_grad=False)
    largest = {kind: _largest(want, kind) for kind in _WITHOUT_SCALE}
    differences = {}
    for name in want.keys() | got.keys():
        if name not in want or name not in got:
            differences[name] = float("inf")
            continue
        least = next((1e-4 * largest[kind] for kind in _WITHOUT_SCALE if name.startswith(kind)), 0.0)
        differences[name] = _difference(got[name], want[name], least)
    ordered = dict(sorted(differences.items(), key=lambda item: (-item[1], item[0])))
    if limit is None and not fused:
        limit = 0.0
    if limit is None:
        computed = dtype or next((p.dtype for p in model.parameters()), torch.float32)
        limit = _TOLERANCES.get(computed, _HALF_PRECISION)
    return Verification(ordered, limit)


# A tensor of these kinds that is zero up to rounding (a mean after a normalisation) has no scale of its
# own.
_WITHOUT_SCALE = ("gradient of ", "buffer ")


def _largest(tensors: dict[str, Tensor], kind: str) -> float:
    values = [t.abs().max().item() for name, t in tensors.items() if name.startswith(kind) and t.numel()]
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _step(
    model: nn.Module, arguments: Arguments, dtype: torch.dtype | None, inputs_require_grad: bool
) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of one forward and backward, by name."""
    model.zero_grad(set_to_none=True)
    leaves = pytree.tree_map_only(Tensor, lambda t: _leaf(t, dtype, inputs_require_grad), arguments)
    # Results of an op, not leaves, so that the model may overwrite its inputs where the original does.
    args, kwargs = given = pytree.tree_map_only(Tensor, torch.clone, leaves)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        outputs = _tensors(model(*args, **kwargs))
        if not outputs:
            raise ValueError("verify: the model returned no tensor; a forward that returns tensors expected")
        result = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        result |= {f"input {i} afterwards": t.detach().clone() for i, t in enumerate(_tensors(given))}
        # Weights of both signs, since a plain sum has no gradient through a normalisation.
        losses = [
            (t * torch.randn(t.shape, dtype=torch.float64).to(t)).sum() for t in outputs if t.requires_grad
        ]
        if losses:
            torch.stack([loss.double() for loss in losses]).sum().backward()
    gradients = [(f"input {i}", t.grad) for i, t in enumerate(_tensors(leaves))]
    gradients += [(name, p.grad) for name, p in model.named_parameters()]
    result |= {f"gradient of {name}": g.detach() for name, g in gradients if g is not None}
    return result | {f"buffer {name}": b.detach() for name, b in model.named_buffers()}


def _leaf(tensor: Tensor, dtype: torch.dtype | None, requires_grad: bool) -> Tensor:
    copied = tensor.detach().clone()
    return copied.to(dtype).requires_grad_(requires_grad) if copied.is_floating_point() else copied


def _tensors(values: object) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(plain_output(values)) if isinstance(t, Tensor)]


def _difference(got: Tensor, want: Tensor, least: float) -> float:
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    if any(not torch.equal(kind(got), kind(want)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)):
        return float("inf")
    scale = max(want.nan_to_num(0, 0, 0).abs().max().item(), least, 1e-30)
    return (got - want).nan_to_num(0, 0, 0).abs().max().item() / scale
