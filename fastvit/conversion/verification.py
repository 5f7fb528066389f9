"""`verify`: runs the same step on the original and on the converted model, and compares the results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_dtype, is_number
from .._deprecation import RenamedAttribute, renamed_arguments, renamed_state
from ..fusion import is_fused
from ..recompute import SavedMemory, observe_saved_tensors, skip_key
from .budget_hook import freeze_budgets
from .convert_model import ensure_converted
from .copy_runner import CopyRunner
from .nested_values import tensor_leaves
from .scope_hooks import revert

# Layers of fastvit round otherwise than torch's, and depth multiplies the difference.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-2}
_HALF_TOLERANCE = 0.2  # For half precision.
_DTYPE_WORDS = ("dtype", "type Double", "Double and")  # Torch's errors about dtypes have one of these.
_NONDETERMINISM_FACTOR = 4.0  # Allowed multiple of the difference between two runs of the original.
_MAX_LINES = 20  # Lines of one kind that a result prints.

SkipPairs = tuple[tuple[str, str], ...]  # Names of blocks and of ops.


@dataclass(frozen=True)
class Verification:
    """The result of `verify`, which is true if everything agrees. It prints the differences.

    Attributes:
        differences: relative differences by name, largest first.
        tolerance: the largest difference that is allowed.
        skip: pairs of a block's name and an op's name, whose recomputed output differs;
            `convert(model, skip=verification.skip)` keeps these outputs.
        nondeterministic: differences between two runs of the original, by name.
    """

    differences: dict[str, float]
    tolerance: float
    skip: SkipPairs = ()
    nondeterministic: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, float]:
        """The differences that are not allowed."""
        return {
            name: value
            for name, value in self.differences.items()
            if not value <= max(self.tolerance, _NONDETERMINISM_FACTOR * self.nondeterministic.get(name, 0.0))
        }

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return not self.failures and not self.skip

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        failures = self.failures
        printed = failures or dict(list(self.differences.items())[:1])
        lines = [f"  {name}: {value:.3g}" for name, value in list(printed.items())[:_MAX_LINES]]
        verdict = f"{len(failures)} of {len(self.differences)} tensors differ by more than {self.tolerance:g}"
        if not failures:
            verdict = f"{len(self.differences)} tensors agree; the largest difference is"
        lines.insert(0, verdict)
        if self.nondeterministic:
            lines.append(f"{len(self.nondeterministic)} tensors differ between two runs of the original")
        if self.skip:
            lines += ["recomputed outputs that differ, which convert(model, skip=verification.skip) keeps:"]
            lines += [f"  {pair}" for pair in self.skip[:_MAX_LINES]]
        return "\n".join(lines)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads pickles with the older names of fields."""
        new_names = {"limit": "tolerance", "sites": "skip", "unsteady": "nondeterministic"}
        self.__dict__.update(renamed_state(state, **new_names))

    limit = RenamedAttribute("tolerance")
    sites = RenamedAttribute("skip")
    unsteady = RenamedAttribute("nondeterministic")
    wrong = RenamedAttribute("failures")


@renamed_arguments(limit="tolerance")
def verify(
    model: nn.Module,
    *inputs: object,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    **kwinputs: object,
) -> Verification:
    """Runs one training step of the original and of the converted model, and compares the results.

        assert fastvit.verify(model, images)

    Copies of `model` run with the same random numbers: one reverted, and one converted as `model` is, or by
    `convert(model)` if `model` is not converted. `verify` compares outputs, inputs after the step, gradients
    of all parameters and floating-point inputs, and buffers. At the end of the forward everything that
    backward recomputes is also recomputed at once, and compared bit by bit with the saved tensor: they differ
    if something wrote to that tensor unnoticed. Modules run in the modes (training or evaluation) that they
    are in. Neither the model nor random states change.

    Gradients of inputs are left out if the model sets requires_grad on its inputs, as some do for
    checkpointing. If two runs of the original differ (atomic additions on CUDA, for example), the converted
    model may differ by four times as much.

    Args:
        model: converted or not. One more copy of it at a time must fit in memory.
        inputs: positional arguments of its forward.
        dtype: the dtype in which both copies compute. float64 tells a wrong gradient from roundings at any
            depth. None is the model's own dtype: which outputs are recomputed may depend on it, and on
            autocast.
        tolerance: largest allowed difference of a tensor, relative to its largest value. The default is 0,
            since the same op is repeated; for a model with layers of `fastvit.fuse` it depends on `dtype`.
            The scale of a gradient or buffer is at least 1e-4 of the model's largest one, because one that is
            zero up to rounding has no scale of its own.
        kwinputs: keyword arguments of its forward.

    Returns:
        A `Verification`, which is true if everything agrees. It prints the differences.

    Raises:
        TypeError: `model` is not a module, or an input is a size and not a tensor.
        ValueError: the model cannot be copied, is wrapped for data parallelism or sharded, is neither on the
            CPU nor on CUDA, or returns no tensor; `dtype` or `tolerance` is of another kind.
    """
    runner = CopyRunner("verify", model, (inputs, kwinputs))
    check_dtype("verify", "dtype", dtype)
    if tolerance is not None and not is_number(tolerance, 0, math.inf):
        raise ValueError(f"verify: tolerance is {tolerance!r}; a number of at least 0, or None, expected")
    if tolerance is None:
        compute_dtype = dtype or next((p.dtype for p in model.parameters()), torch.float32)
        tolerance = _TOLERANCES.get(compute_dtype, _HALF_TOLERANCE) if is_fused(model) else 0.0
    for marks_inputs in (False, True):  # Whether the model sets requires_grad on its inputs.
        try:
            expected, _ = _run_step(runner, revert, dtype, marks_inputs)
            break
        except RuntimeError as error:
            if dtype is not None and any(word in str(error) for word in _DTYPE_WORDS):
                message = f"the model does not run in {dtype} ({error}); pass dtype=None for its own dtype"
                raise RuntimeError(f"verify: {message}") from error
            if marks_inputs or "requires_grad flags of leaf" not in str(error):
                raise
    actual, skip = _run_step(runner, ensure_converted, dtype, marks_inputs)
    verification = Verification(_relative_differences(actual, expected), tolerance, skip)
    if not verification.failures:
        return verification
    second_run, _ = _run_step(runner, revert, dtype, marks_inputs)
    differences = _relative_differences(second_run, expected)
    nondeterministic = {name: value for name, value in differences.items() if value}
    return dataclasses.replace(verification, nondeterministic=nondeterministic)


def _find_mismatches(memory: list[SavedMemory]) -> SkipPairs:
    """Returns the skip pairs of the outputs that differ from the saved tensors when they are recomputed."""
    mismatches: dict[tuple[str, str], None] = {}
    for entry in memory:
        if entry.site is not None and not entry.is_mask:
            # Autograd refuses a saved tensor that was written to later, so no wrong gradient comes of it.
            unwritten = [
                (unpack, tensor) for (tensor, version), unpack in entry.saved if tensor._version == version
            ]
            if not all(_recomputes_same_bits(unpack, tensor) for unpack, tensor in unwritten):
                mismatches[skip_key(entry.site)] = None
            entry.clear_cached_outputs()
    return tuple(mismatches)


def _recomputes_same_bits(unpack: Callable[[], Tensor], tensor: Tensor) -> bool:
    """Returns whether `unpack` recomputes the bits of `tensor`; False if it raises."""
    try:
        actual = unpack()
    except Exception:
        return False
    bits = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (actual, tensor)]
    return actual.dtype == tensor.dtype and torch.equal(*bits)


def _run_step(
    runner: CopyRunner,
    prepare: Callable[[nn.Module], nn.Module],
    dtype: torch.dtype | None,
    marks_inputs: bool,
) -> tuple[dict[str, Tensor], SkipPairs]:
    """Runs a step of a copy that `prepare` converts or reverts.

    Returns outputs, inputs after the step, gradients and buffers by name, and the skip pairs of outputs whose
    recomputed bits differ.
    """
    model = prepare(_cast_model(runner.copy_model(), dtype))
    freeze_budgets(model)
    model.zero_grad(set_to_none=True)
    leaves = []

    def copy_as_leaf(tensor: Tensor) -> Tensor:
        leaf = _cast(tensor.detach().clone(), dtype)
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_(not marks_inputs)
        leaves.append(leaf)
        return leaf.clone()  # The result of an op, which the model may overwrite.

    with runner.preserve_random_state():
        arguments = runner.copy_inputs(copy_as_leaf)
        with observe_saved_tensors(lambda tensor: (tensor.detach(), tensor._version)) as observer:
            outputs = tensor_leaves(runner.run_forward(model, arguments))
        if not outputs:
            raise ValueError("verify: the model returned no tensor; a forward that returns tensors expected")
        skip = _find_mismatches(observer.saved_memory())
        result = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        result |= {
            f"input {i} afterwards": t.detach().clone() for i, t in enumerate(tensor_leaves(arguments))
        }
        # Random numbers of both signs, because the gradient of a plain sum through a normalisation is zero.
        roots = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(roots, list(map(torch.randn_like, roots)))
    gradients = [(f"input {i}", t.grad) for i, t in enumerate(leaves)]
    gradients += [(name, p.grad) for name, p in model.named_parameters()]
    result |= {f"gradient of {name}": g.detach() for name, g in gradients if g is not None}
    return result | {f"buffer {name}": b.detach() for name, b in model.named_buffers()}, skip


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _cast_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model._apply(lambda tensor: _cast(tensor, dtype))  # Module.to drops imaginary parts.
    return model.to(dtype)


# A tensor of these kinds that is zero up to rounding (a mean after a normalisation) has no scale of its own.
_PREFIXES_WITHOUT_SCALE = ("gradient of ", "buffer ")


def _relative_differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns relative differences by name, largest first."""
    largest = {
        prefix: max((_max_abs(t) for name, t in expected.items() if name.startswith(prefix)), default=0.0)
        for prefix in _PREFIXES_WITHOUT_SCALE
    }
    differences = dict.fromkeys(expected.keys() ^ actual.keys(), math.inf)
    for name in expected.keys() & actual.keys():
        prefixes = (prefix for prefix in _PREFIXES_WITHOUT_SCALE if name.startswith(prefix))
        min_scale = next((1e-4 * largest[prefix] for prefix in prefixes), 0.0)
        differences[name] = _relative_difference(actual[name], expected[name], min_scale)
    return dict(sorted(differences.items(), key=lambda item: (-item[1], item[0])))


def _to_float64(tensor: Tensor) -> Tensor:
    """Returns a tensor in float64; a complex one as its real and imaginary parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.double()


def _max_abs(tensor: Tensor) -> float:
    """Returns the largest finite absolute value."""
    return _to_float64(tensor).nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def _relative_difference(actual: Tensor, expected: Tensor, min_scale: float) -> float:
    if actual.shape != expected.shape or actual.is_complex() != expected.is_complex():
        return math.inf
    a, b = _to_float64(actual), _to_float64(expected)
    if any(not torch.equal(test(a), test(b)) for test in (torch.isnan, torch.isposinf, torch.isneginf)):
        return math.inf
    return _max_abs(a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)) / max(_max_abs(b), min_scale, 1e-30)
