"""`verify`: runs the same step on the original and on the converted model, and compares the results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._checks import check_dtype, is_number
from ..fusion import is_fused
from ..recompute import SavedMemory, observe_saved_tensors, skip_key
from .budget_hook import freeze_budgets
from .convert_model import ensure_converted
from .copy_runner import CopyRunner
from .nested_values import tensor_leaves
from .scope_hooks import revert

# Layers of fastvit round otherwise than torch's, and depth multiplies it.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-2}
_HALF_PRECISION = 0.2
_DTYPE_WORDS = ("dtype", "type Double", "Double and")  # in torch's errors about dtypes
_NONDETERMINISM_FACTOR = 4.0  # allowed multiple of the difference between two runs of the original


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; true where everything agrees. Prints what does not.

    Attributes:
        differences: relative differences by name, largest first.
        limit: the largest that is allowed.
        sites: pairs of a block's name and an op whose result differs when it is rebuilt;
            `convert(model, skip=verification.sites)` keeps these.
        unsteady: differences between two runs of the original, where it differs from itself.
    """

    differences: dict[str, float]
    limit: float
    sites: tuple[tuple[str, str], ...] = ()
    unsteady: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, float]:
        """The differences that are not allowed."""
        return {
            name: value
            for name, value in self.differences.items()
            if not value <= max(self.limit, _NONDETERMINISM_FACTOR * self.unsteady.get(name, 0.0))
        }

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return not self.wrong and not self.sites

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        wrong = self.wrong
        shown = wrong or dict(list(self.differences.items())[:1])
        lines = [f"  {name}: {value:.3g}" for name, value in list(shown.items())[:20]]
        verdict = f"{len(wrong)} of {len(self.differences)} tensors differ by more than {self.limit:g}"
        if not wrong:
            verdict = f"{len(self.differences)} tensors agree; the largest difference is"
        lines.insert(0, verdict)
        if self.unsteady:
            lines.append(f"{len(self.unsteady)} tensors differ between two runs of the original")
        if self.sites:
            lines += ["rebuilt results that differ, which convert(model, skip=verification.sites) keeps:"]
            lines += [f"  {op} in {block or 'the model'}" for block, op in self.sites[:20]]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    *inputs: object,
    dtype: torch.dtype | None = torch.float64,
    limit: float | None = None,
    **kwinputs: object,
) -> Verification:
    """Runs one training step of the original and of the converted model, and compares the results.

        assert fastvit.verify(model, images)

    Copies of `model` run with the same random numbers: one reverted, and one converted as `model` is, or
    by `convert(model)` where it is not converted. Compared are outputs, inputs after the step, gradients of
    all parameters and floating-point inputs, and buffers. At the end of the forward everything that is
    rebuilt in backward is also rebuilt at once, and compared bit by bit with the tensor for which it stands:
    it differs where something wrote to that tensor unnoticed. Modules run in the modes (training or
    evaluation) that they are in. Neither the model nor random states change.

    Gradients of inputs are left out where the model sets requires_grad on its inputs, as some do for
    checkpointing. If two runs of the original differ (atomic additions on CUDA, for example), the converted
    model may differ by four times as much.

    Args:
        model: converted or not. One more copy of it at a time must fit in memory.
        inputs: positional arguments of its forward.
        dtype: both copies compute in it. float64 tells a wrong gradient from roundings at any depth. None is
            the model's own dtype: what is rebuilt may depend on it, and on autocast.
        limit: largest allowed difference of a tensor, relative to its largest value. The default is 0, since
            the same op is repeated; for a model with layers of `fastvit.fuse` it depends on `dtype`. The
            scale of a gradient or buffer is at least 1e-4 of the model's largest one, because one that is
            zero up to rounding has no scale of its own.
        kwinputs: keyword arguments of its forward.

    Returns:
        A `Verification`: true where all agrees. It prints what differs.

    Raises:
        TypeError: `model` is not a module, or an input is a size and not a tensor.
        ValueError: the model cannot be copied, is wrapped for data parallelism or sharded, is neither on the
            CPU nor on CUDA, or returns no tensor; `dtype` or `limit` is of another kind.
    """
    runner = CopyRunner("verify", model, (inputs, kwinputs))
    check_dtype("verify", "dtype", dtype)
    if limit is not None and not is_number(limit, 0, math.inf):
        raise ValueError(f"verify: limit is {limit!r}; a number of at least 0, or None, expected")
    if limit is None:
        computed = dtype or next((p.dtype for p in model.parameters()), torch.float32)
        limit = _TOLERANCES.get(computed, _HALF_PRECISION) if is_fused(model) else 0.0
    for marks_inputs in (False, True):  # whether the model sets requires_grad on its inputs
        try:
            expected, _ = _run_step(runner, revert, dtype, marks_inputs)
            break
        except RuntimeError as error:
            if dtype is not None and any(word in str(error) for word in _DTYPE_WORDS):
                message = f"the model does not run in {dtype} ({error}); pass dtype=None for its own dtype"
                raise RuntimeError(f"verify: {message}") from error
            if marks_inputs or "requires_grad flags of leaf" not in str(error):
                raise
    actual, sites = _run_step(runner, ensure_converted, dtype, marks_inputs)
    found = Verification(_differences(actual, expected), limit, sites)
    if found.wrong:
        again, _ = _run_step(runner, revert, dtype, marks_inputs)
        unsteady = {name: value for name, value in _differences(again, expected).items() if value}
        found = dataclasses.replace(found, unsteady=unsteady)
    return found


def _mismatched_sites(decisions: list[SavedMemory]) -> tuple[tuple[str, str], ...]:
    """The sites whose results differ when they are rebuilt."""
    found: dict[tuple[str, str], None] = {}
    for one in decisions:
        if one.site is not None and not one.is_mask:
            # autograd refuses what was written to since
            unwritten = [(unpack, t) for (t, version), unpack in one.saved if t._version == version]
            if not all(_recomputes_same_bits(*each) for each in unwritten):
                found[skip_key(one.site)] = None
            one.forget()
    return tuple(found)


def _recomputes_same_bits(unpack: Callable[[], Tensor], tensor: Tensor) -> bool:
    """Whether the rebuilt tensor has the bits of `tensor`. One that cannot be rebuilt has not."""
    try:
        actual = unpack()
    except Exception:
        return False
    bits = [
        one.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for one in (actual, tensor)
    ]
    return actual.dtype == tensor.dtype and torch.equal(*bits)


Step = tuple[dict[str, Tensor], tuple[tuple[str, str], ...]]


def _run_step(
    runner: CopyRunner,
    change: Callable[[nn.Module], nn.Module],
    dtype: torch.dtype | None,
    marks_inputs: bool,
) -> Step:
    """Returns outputs, gradients and buffers of a copy's step, by name; sites that are recomputed wrong."""
    model = change(_cast_model(runner.copy_model(), dtype))
    freeze_budgets(model)
    model.zero_grad(set_to_none=True)
    leaves = []

    def copy_as_leaf(tensor: Tensor) -> Tensor:
        leaf = _cast(tensor.detach().clone(), dtype)
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_(not marks_inputs)
        leaves.append(leaf)
        return leaf.clone()  # the result of an op, which the model may overwrite

    with runner.preserving_random_state():
        given = runner.copy_inputs(copy_as_leaf)
        with observe_saved_tensors(lambda tensor: (tensor.detach(), tensor._version)) as observer:
            outputs = tensor_leaves(runner.run_forward(model, given))
        if not outputs:
            raise ValueError("verify: a forward that returns tensors expected; the model returned none")
        sites = _mismatched_sites(observer.decisions())
        result = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        result |= {f"input {i} afterwards": t.detach().clone() for i, t in enumerate(tensor_leaves(given))}
        # Random numbers of both signs, because the gradient of a plain sum through a normalisation is zero.
        roots = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(roots, list(map(torch.randn_like, roots)))
    gradients = [(f"input {i}", t.grad) for i, t in enumerate(leaves)]
    gradients += [(name, p.grad) for name, p in model.named_parameters()]
    result |= {f"gradient of {name}": g.detach() for name, g in gradients if g is not None}
    return result | {f"buffer {name}": b.detach() for name, b in model.named_buffers()}, sites


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _cast_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model._apply(lambda tensor: _cast(tensor, dtype))  # Module.to drops imaginary parts
    return model.to(dtype)


# A tensor of these kinds that is zero up to rounding (a mean after a normalisation) has no scale of its own.
_WITHOUT_SCALE = ("gradient of ", "buffer ")


def _differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative differences by name, largest first."""
    largest = {
        kind: max((_largest(t) for name, t in expected.items() if name.startswith(kind)), default=0.0)
        for kind in _WITHOUT_SCALE
    }
    differences = dict.fromkeys(expected.keys() ^ actual.keys(), math.inf)
    for name in expected.keys() & actual.keys():
        least = next((1e-4 * largest[kind] for kind in _WITHOUT_SCALE if name.startswith(kind)), 0.0)
        differences[name] = _difference(actual[name], expected[name], least)
    return dict(sorted(differences.items(), key=lambda item: (-item[1], item[0])))


def _to_float64(tensor: Tensor) -> Tensor:
    """Returns the numbers of a tensor, of a complex one the real and imaginary parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.double()


def _largest(tensor: Tensor) -> float:
    """Returns the largest finite absolute value."""
    return _to_float64(tensor).nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def _difference(actual: Tensor, expected: Tensor, least: float) -> float:
    if actual.shape != expected.shape or actual.is_complex() != expected.is_complex():
        return math.inf
    a, b = _to_float64(actual), _to_float64(expected)
    if any(not torch.equal(kind(a), kind(b)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)):
        return math.inf
    return _largest(a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)) / max(_largest(b), least, 1e-30)
