"""Random programs against `fastvit.convert`: a model, its options, and a step that must be eager's.

A program is source: the classes of a model and a function `step(model, x)`, drawn from the tables of
kinds.py. The program runs as it is and converted, for two steps. All results of a step are compared: outputs,
gradients, parameters, buffers, the input, random numbers and notes.

    cd tests; python -m conversion.programs.run_programs --programs 500 --first 0 --kinds writes flags

runs programs that mix these kinds, and prints each fault with its source and the count of each outcome.
Without `--kinds` each program draws its own kinds. With `--alone` each kind has a row for its programs alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import fastvit
from conversion.programs import names as program_names
from conversion.programs.kinds import KINDS, MAY_BE_REFUSED
from conversion.programs.source import DTYPES, OPTIONS, Program, draw_program
from fastvit.conversion.scope_hooks import ScopeHook
from fastvit.recompute import RecomputeLevel

_NORM_CLASSES = nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm


class Outcome(enum.Enum):
    """How the converted program compares with the program as it is, which is called eager."""

    SAME = "same bits"
    BOTH_RAISED = "both raised"
    EAGER_RAISED = "eager raised"  # only eager raised
    REFUSED = "refused"  # the error names a site and `skip`, and the program writes to a large tensor
    NONDETERMINISTIC = "nondeterministic"  # two runs of eager differ
    CHANGED_BY_HOOKS = "changed by hooks"  # identity hooks, which lose subclasses, do the same to eager
    CRASHED = "crashed"  # only the converted program raised, and the error is no allowed refusal
    LEFT_OPEN = "left open"  # a scope is open after the step
    SILENT = "silent"  # results differ without an error


FAULTS = Outcome.CRASHED, Outcome.LEFT_OPEN, Outcome.SILENT


class RandomSites:
    """A random set of sites, which contains each site with the same probability."""

    def __init__(self, seed: int):
        self.seed, self.probability = seed, random.Random(seed).choice([0.2, 0.5, 0.8, 1])

    def __contains__(self, site) -> bool:
        return random.Random(f"{self.seed} {site}").random() < self.probability


def convert_program(model: nn.Module, option: str, seed: int) -> None:
    """Converts the model of a program with an option of `OPTIONS`."""
    if OPTIONS[option] is None:
        return
    fastvit.convert(model, **OPTIONS[option])
    if option in ("least", "some", "across"):
        level = RecomputeLevel(seed % 3) if option == "some" else RecomputeLevel.EVERY_OP
        sites = None if option == "least" else RandomSites(seed)
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, ScopeHook):
                    hook.policy = dataclasses.replace(hook.policy, only_sites=sites, level=level)


class Execution:
    """A program's model, as it is or converted, which takes the steps of the program."""

    def __init__(self, program: Program, is_converted: bool):
        self.is_converted, self.run = is_converted, program_names.Run(DTYPES[program.dtype])
        scope: Callable = contextlib.nullcontext
        if is_converted and program.option.startswith("scope"):
            scope = functools.partial(fastvit.recompute_scope, matmuls="products" in program.option)
        names = vars(program_names) | {"RUN": self.run, "SCOPE": scope}
        exec(_compile(program.source), names)
        torch.manual_seed(program.seed)
        self.model, self.step = names["Program"](), names["step"]
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)
        self.model.to(self.run.dtype).train(program.is_training)
        for module in self.model.modules() if "norms" in program.dtype else ():
            if isinstance(module, _NORM_CLASSES):
                module.float()
        self.x = torch.randn(8, 8, 6, 6).to(self.run.dtype).requires_grad_(program.seed % 3 == 0)
        if program.is_set_up_first:
            names["set_up"](self.model)
        if is_converted:
            convert_program(self.model, program.option, program.seed)
        if not program.is_set_up_first:
            names["set_up"](self.model)
        self.run.log.clear()

    def take_step(self, step_index: int) -> dict[str, object]:
        """Takes a step and returns all results by name."""
        self.run.depth = 0
        torch.manual_seed(step_index)
        outputs = self.step(self.model, self.x)
        results: dict[str, object] = {f"output {i}": output for i, output in enumerate(outputs)}
        results["random numbers"], results["notes"] = torch.rand(2), list(self.run.log)
        with torch._C.DisableTorchFunctionSubclass():  # NotingTensor would note that `grad` is read
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers(), ("x", self.x)):
                results[name], results[f"gradient of {name}"] = tensor, tensor.grad
        return results


@functools.lru_cache(4)
def _compile(source: str):
    return compile(source, "<program>", "exec")


def _is_same(one: object, other: object) -> bool:
    """Returns whether two objects are equal. Tensors must have the same bits, but any NaN equals any NaN."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and one == other
    if type(one).__name__ != type(other).__name__:
        return False
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = (t.detach().as_subclass(Tensor).reshape(-1) for t in (one, other))
        if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            return True
        is_nan = one.isnan()
        if not torch.equal(is_nan, other.isnan()):
            return False
        one, other = (t.masked_fill(is_nan, 0).view(torch.uint8) for t in (one, other))
        return torch.equal(one, other)


def _find_differing(expected: dict, actual: dict) -> list[str]:
    """Returns the names of the results that differ."""
    names = expected.keys() | actual.keys()
    return sorted(name for name in names if not _is_same(expected.get(name), actual.get(name)))


def is_refusal(error: BaseException) -> bool:
    """Returns whether an error names `skip` and a site, as a pair `(block, op name)`."""
    text = str(error)
    return "skip" in text and re.search(r"\(['\"][^'\"]*['\"], ['\"][^'\"]+['\"]\)", text) is not None


def _pop_open_hooks_and_modes() -> bool:
    """Pops all hooks and modes from torch's stacks after a step, and returns whether there were any."""
    has_popped = False
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        has_popped = True
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
        has_popped = True
    return has_popped


# In eager, these errors are mistakes in a table.
_SOURCE_ERRORS = NameError, SyntaxError, AttributeError, LookupError


def run_program(program: Program) -> tuple[Outcome, str]:
    """Runs a program as it is and converted, and returns the outcome and its details as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run_program(program)
        finally:
            _pop_open_hooks_and_modes()


def _run_program(program: Program) -> tuple[Outcome, str]:
    eager = Execution(program, is_converted=False)
    converted: Execution | None = None
    for step_index in range(program.steps):
        expected = eager_error = actual = converted_error = None
        try:
            expected = eager.take_step(step_index)
        except _SOURCE_ERRORS as mistake:
            raise AssertionError(f"{mistake!r} in\n{program}") from mistake
        except Exception as error:
            eager_error = error
        try:
            converted = converted or Execution(program, is_converted=True)
            actual = converted.take_step(step_index)
        except Exception as error:
            converted_error = error
        is_left_open = _pop_open_hooks_and_modes()
        if eager_error is not None:
            outcome = Outcome.EAGER_RAISED if converted_error is None else Outcome.BOTH_RAISED
            return outcome, f"step {step_index}: {type(eager_error).__name__}: {eager_error}"
        if converted_error is not None:
            is_allowed = is_refusal(converted_error) and MAY_BE_REFUSED in program.source
            outcome = Outcome.REFUSED if is_allowed else Outcome.CRASHED
            return outcome, f"step {step_index}: {type(converted_error).__name__}: {converted_error}"
        if is_left_open:
            return Outcome.LEFT_OPEN, f"step {step_index}"
        assert expected is not None and actual is not None
        if differing := _find_differing(expected, actual):
            outcome = Outcome.SILENT
            if _find_differing(expected, _repeat_in_eager(program, step_index, contextlib.nullcontext())):
                outcome = Outcome.NONDETERMINISTIC
            elif not _find_differing(actual, _repeat_in_eager(program, step_index, _IDENTITY_HOOKS)):
                outcome = Outcome.CHANGED_BY_HOOKS
            detail = f"{len(differing)} of {len(expected)} differ: {', '.join(differing)}"
            return outcome, f"step {step_index}: {detail}"
    return Outcome.SAME, ""


_IDENTITY_HOOKS = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def _repeat_in_eager(program: Program, step_index: int, context) -> dict[str, object]:
    """Returns the results of a step of eager if all steps up to it run in `context`."""
    eager = Execution(program, is_converted=False)
    with context:
        return [eager.take_step(i) for i in range(step_index + 1)][-1]


def run_programs(seeds: range, kinds: Sequence[str] | None, option: str | None) -> Counter[Outcome]:
    """Runs the programs of `seeds`, prints the faults, and returns the count of each outcome."""
    counts: Counter[Outcome] = Counter()
    for seed in seeds:
        program = draw_program(random.Random(f"{seed} {kinds}").randrange, kinds, option)
        outcome, detail = run_program(program)
        counts[outcome] += 1
        if outcome in FAULTS:
            print(f"program {seed}: {outcome.value}, {detail}\n{program}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares random programs with their converted copies.")
    parser.add_argument("--programs", type=int, default=500, help="the number of programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="the kinds that each program mixes")
    parser.add_argument("--alone", action="store_true", help="run the programs of each kind alone")
    parser.add_argument("--option", choices=list(OPTIONS), help="run all programs with this option")
    args = parser.parse_args()
    torch.set_num_threads(1)
    has_faults = False
    for kinds in [(kind,) for kind in args.kinds or KINDS] if args.alone else [args.kinds]:
        counts = run_programs(range(args.first, args.first + args.programs), kinds, args.option)
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items())
        print(f"{' '.join(kinds or ['mixed'])}: {outcomes}", flush=True)
        has_faults |= any(counts[outcome] for outcome in FAULTS)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
