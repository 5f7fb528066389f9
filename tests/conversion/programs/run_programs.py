"""Random programs against `fastvit.convert`: a model, its options, and a step that must be eager's.

A program is source: the classes of a model and a function `step(model, x)`, drawn from the tables of
tests/program_kinds.py. The program runs as it is and converted, for two steps. All results of a step are
compared: outputs, gradients, parameters, buffers, the input, random numbers and notes.

    python tests/programs.py --programs 500 --first 0 --kinds writes flags

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
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import fastvit
from conversion.programs import names as program_tools
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
        self.run = program_tools.Run(DTYPES[program.dtype])
        uses_scope = is_converted and program.option.startswith("scope")
        names = {name: getattr(program_tools, name) for name in program_tools.__all__}
        names["RUN"] = self.run
        names["SCOPE"] = contextlib.nullcontext
        if uses_scope:
            matmuls = "products" in program.option
            names["SCOPE"] = functools.partial(fastvit.recompute_scope, matmuls=matmuls)
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
        if is_converted and not program.is_set_up_first:
            convert_program(self.model, program.option, program.seed)
        names["set_up"](self.model)
        if is_converted and program.is_set_up_first:
            convert_program(self.model, program.option, program.seed)
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


_SOURCE_ERRORS = (
    NameError,
    SyntaxError,
    AttributeError,
    LookupError,
)  # in eager: a mistake in a table


def run_program(program: Program, converted_execution: type[Execution] = Execution) -> tuple[Outcome, str]:
    """Runs a program as it is and converted, and returns the outcome and its details as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run_program(program, converted_execution)
        finally:
            _pop_open_hooks_and_modes()


def _run_program(program: Program, converted_execution: type[Execution]) -> tuple[Outcome, str]:
    eager = Execution(program, is_converted=False)
    converted_run: Execution | None = None
    for step_index in range(program.steps):
        expected = eager_error = actual = converted_error = None
        try:
            expected = eager.take_step(step_index)
        except _SOURCE_ERRORS as mistake:
            raise AssertionError(f"{mistake!r} in\n{program}") from mistake
        except Exception as error:
            eager_error = error
        try:
            converted_run = converted_run or converted_execution(program, is_converted=True)
            actual = converted_run.take_step(step_index)
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


def shrink_program(program: Program, outcome: Outcome) -> Program:
    """Returns a program with fewer statements and the same outcome."""
    lines, index = program.source.splitlines(), 0
    while index < len(lines):
        indent = re.match(" *", lines[index])[0]
        for replacement in ([], [f"{indent}v.append(v[-1])"], [f"{indent}pass"]):
            new_lines = [*lines[:index], *replacement, *lines[index + 1 :]]
            smaller = dataclasses.replace(program, source="\n".join(new_lines) + "\n")
            if new_lines != lines and _has_same_outcome(smaller, outcome):
                lines = new_lines
                index -= not replacement  # the next line has moved to this index
                break
        index += 1
    return dataclasses.replace(program, source="\n".join(lines) + "\n")


def _has_same_outcome(program: Program, outcome: Outcome) -> bool:
    try:
        return run_program(program)[0] is outcome
    except (AssertionError, *_SOURCE_ERRORS):
        return False


@dataclasses.dataclass
class Tally:
    """The number of programs by outcome, and the details and sources of the faults."""

    counts: Counter[Outcome] = dataclasses.field(default_factory=Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        outcomes = ", ".join(f"{self.counts[outcome]} {outcome.value}" for outcome in Outcome)
        num_programs = max(1, self.counts.total())
        return f"{num_programs} programs: {outcomes}; {1000 * self.seconds / num_programs:.1f} ms each"


def run_programs(
    seeds: range, kinds: Sequence[str] | None = None, option: str | None = None, shrink: bool = False
) -> Tally:
    """Runs the programs of `seeds`, each with the option that the program draws, or all with `option`."""
    tally, start_seconds = Tally(), time.perf_counter()
    for seed in seeds:
        program = draw_program(seed, kinds)
        if option is not None:
            program = dataclasses.replace(program, option=option)
        outcome, detail = run_program(program)
        tally.counts[outcome] += 1
        if outcome in FAULTS:
            program = shrink_program(program, outcome) if shrink else program
            tally.faults.append(f"{outcome.value}, {detail}\n{program}")
    tally.seconds = time.perf_counter() - start_seconds
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares random programs with their converted copies.")
    parser.add_argument("--programs", type=int, default=500, help="the number of programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="the kinds that each program mixes")
    parser.add_argument("--alone", action="store_true", help="run the programs of each kind alone")
    parser.add_argument("--option", choices=list(OPTIONS), help="run all programs with this option")
    parser.add_argument("--shrink", action="store_true", help="remove statements that a fault does not need")
    parser.add_argument("--quiet", action="store_true", help="do not print the sources of faults")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [(kind,) for kind in args.kinds or KINDS] if args.alone else [args.kinds]
    num_faults = 0
    for kinds in rows:
        tally = run_programs(range(args.first, args.first + args.programs), kinds, args.option, args.shrink)
        for fault in () if args.quiet else tally.faults:
            print(fault, flush=True)
        print(f"{' '.join(kinds or ['mixed'])}: {tally}", flush=True)
        num_faults += len(tally.faults)
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
