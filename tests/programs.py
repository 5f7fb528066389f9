"""Random programs against `fastvit.convert`: a model, its options, and a step that must be eager's.

A program is source: the classes of a model and a function `step(model, x)`, drawn from the tables of
tests/program_kinds.py. It is run as it is and converted, two steps each, and all that a step leaves is compared:
outputs, gradients, parameters, buffers, the input, random numbers, and what hooks have noted.

    python tests/programs.py --programs 500 --first 0 --kinds writes flags

runs programs that mix the kinds, prints how many had which outcome, and each fault with its source. Without
`--kinds` each program draws its own; with `--alone` there is a row for each kind alone.
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
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import program_tools
import torch
from program_kinds import ACTIVATIONS, KINDS, LARGE, MASKS, NORMS, SUMS, UNCOUNTED
from torch import Tensor, nn

import fastvit
from fastvit.conversion.convert_model import ScopeHook
from fastvit.recompute import RecomputeLevel

OPTIONS = {  # arguments of convert
    "convert": {},
    "products": {"products": True},
    "weight_casts": {"weight_casts": True},
    "products, weight_casts": {"products": True, "weight_casts": True},
    "least": {"budget": "least"},
    "some": {"budget": "least"},  # a random part of the sites
    "across": {"budget": "least"},  # and across blocks
    "share": {"budget": 0.6},  # planned in the first step
    "scope": None,  # recompute_scope() instead of convert
    "scope, products": None,
}
_SELDOM = ("share",)  # only where a kind asks for it
DTYPES = {
    "float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "bfloat16, norms in float32": torch.bfloat16,
}  # fmt: skip
_NORM_CLASSES = nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm
_SHIFTS = r"(shift|frozen_shift|shift_buffer)\("
_VECTORS = rf"{_SHIFTS}|(scale|frozen_scale|image_scale)\("


class Outcome(enum.Enum):
    """How a converted program ended, compared with eager."""

    SAME = "same bits"
    BOTH_RAISED = "both raised"
    EAGER_RAISED = "eager raised"
    REFUSED = "refused"  # an error that names a site and `skip`, for a write to a large tensor
    NONDETERMINISTIC = "nondeterministic"  # eager differs from eager
    CRASHED = "crashed"
    LEFT_OPEN = "left open"  # a scope, after the step
    SILENT = "silent"


FAULTS = Outcome.CRASHED, Outcome.LEFT_OPEN, Outcome.SILENT


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    kinds: tuple[str, ...]
    option: str
    dtype: str
    is_training: bool
    is_set_up_first: bool  # the program's hooks are there before the conversion
    source: str
    steps: int = 2

    def __str__(self) -> str:
        mode = "train" if self.is_training else "eval"
        title = f"# seed {self.seed}, {' '.join(self.kinds)}: {self.option}, {self.dtype}, {mode}"
        return f"{title}, set up {'before' if self.is_set_up_first else 'after'} convert\n{self.source}"


class ForwardWriter:
    """Draws the class of a module from tables of lines."""

    def __init__(self, choose: random.Random, kinds: Sequence[str], has_one_forward: bool):
        self.choose, self.has_one_forward = choose, has_one_forward
        self.modules: dict[str, str] = {}
        self.plain = KINDS["plain"].lines
        self.tables = [KINDS[kind].lines for kind in kinds if KINDS[kind].lines]
        self.around = [context for kind in kinds for context in KINDS[kind].around_lines]
        self.values = 1

    def write(self, name: str, num_lines: int, num_parts: int) -> str:
        lines = []
        while len(lines) < num_lines:
            table = self.choose.choice(self.tables) if self.choose.random() < 0.55 else self.plain
            if (line := self.draw(self.choose.choice(table))) is not None:
                lines.append(self.wrap(line))
        for part in range(num_parts):
            at = self.choose.randrange(len(lines) + 1)
            lines.insert(at, f"v.append(self.parts[{part}](v[-1]))")
        start, end = "v = [x]", "return v[-1]"
        if name == "Program":
            other = self.choose.randrange(-self.values, 0)
            start = self.draw("v = [<<nn.Conv2d(8, 8, 1)>>(x)]")
            end = self.draw(
                f"return [<<nn.Conv2d(8, 8, 1)>>(v[-1]) + <<nn.Conv2d(8, 8, 1)>>(v[{other}]), *extra]"
            )
        forward = textwrap.indent("\n".join([start, "held, extra = [], []", *lines, end]), " " * 8)
        made = "".join(f"        self.{name} = {expression}\n" for name, expression in self.modules.items())
        if name == "Program":
            made += (
                f"        self.parts = nn.ModuleList([{', '.join(f'Part{i}()' for i in range(num_parts))}])\n"
            )
        return (
            f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{made}\n"
            f"    def forward(self, x):\n{forward}\n"
        )

    def draw(self, template: str) -> str | None:
        """A line; None where it needs what the module does not have."""
        if not self.has_one_forward and template.endswith(UNCOUNTED):
            return None
        try:
            line = template.format_map(Fields(self))
        except LookupError:
            return None
        line = re.sub(r"<<(.*?)>>(?!>)", lambda found: self.add(found[1]), line)
        self.values += line.count("v.append(")
        return line

    def add(self, expression: str) -> str:
        """The name of a module that this expression makes, or has made."""
        made = [name for name, other in self.modules.items() if other == expression]
        if made and self.choose.random() < 0.4:
            return f"self.{self.choose.choice(made)}"
        name = f"m{len(self.modules)}"
        if self.choose.random() < 0.1 and re.match(r"nn\.(Conv|Linear|\w+Norm)", expression):
            expression = f"freeze({expression}, '{self.choose.choice(['', 'weight', 'bias'])}')"
        self.modules[name] = expression
        return f"self.{name}"

    def wrap(self, line: str) -> str:
        if not self.around or self.choose.random() > 0.3:
            return line
        context = self.choose.choice(self.around)
        wrapped = f"with {context}:\n{textwrap.indent(line, '    ')}"
        return f"RUN.cast(v)\n{wrapped}\nRUN.cast(v)" if "autocast" in context else wrapped


class Fields(dict):
    """What stands for the names in a line; the same for each occurrence of a name."""

    def __init__(self, writer: ForwardWriter):
        self.writer, self.choose = writer, writer.choose

    def __missing__(self, name: str) -> str:
        choose, values = self.choose, self.writer.values
        match name:
            case "i":
                field = str(max(0, values - 1 - int(choose.expovariate(1))))
            case "j":
                field = str(choose.randrange(values))
            case "number":
                field = str(choose.randrange(10**9))
            case "norm":
                field = choose.choice(NORMS).format("t")
            case "norm_i":
                field = choose.choice(NORMS).format(f"v[{self['i']}]")
            case "sum":
                field = choose.choice(SUMS).format(j=self["j"])
            case "activation":
                field = choose.choice(ACTIVATIONS)
            case "activation_out_of_place":
                field = choose.choice([a for a in ACTIVATIONS if "inplace" not in a])
            case "mask":
                field = choose.choice(MASKS)
            case _:
                field = "self." + choose.choice(find_operands(self.writer.modules)[name])
        self[name] = field
        return field


def find_operands(modules: dict[str, str]) -> dict[str, list[str]]:
    """The attributes of modules that a line may write to, by the names of program_kinds.py."""
    found: dict[str, list[str]] = {"small": [], "bias": [], "large": [], "batch_norm": []}
    for name, expression in modules.items():
        if re.match(_VECTORS, expression):
            found["small"].append(name)
            found["bias"] += [name] * bool(re.match(_SHIFTS, expression))
        elif expression.startswith("matrix"):
            found["large"].append(name)
        elif kind := re.search(r"nn\.(Conv2d|Linear|\w+Norm\w*)\(", expression):
            if expression.startswith("nn.Sequential"):
                continue
            is_norm, is_batch_norm = "Norm" in kind[1], "BatchNorm" in kind[1]
            has_affine = "affine=False" not in expression and "InstanceNorm2d(8)" not in expression
            has_affine = has_affine and ("InstanceNorm" not in kind[1] or "affine=True" in expression)
            if is_norm and has_affine:
                found["small"].append(f"{name}.weight")
            if has_affine and "bias=False" not in expression and kind[1] != "RMSNorm":
                found["bias"].append(f"{name}.bias")
                found["small"].append(f"{name}.bias")
            if is_batch_norm and "track_running_stats=False" not in expression:
                found["small"] += [f"{name}.running_mean", f"{name}.running_var"]
            if not is_norm:
                found["large"].append(f"{name}.weight")
            found["batch_norm"] += [name] * is_batch_norm
    return found


def draw_program(seed: int, kinds: Sequence[str] | None = None) -> Program:
    """The program of a seed, which mixes `kinds`, or some that it draws."""
    choose = random.Random(f"{seed} {kinds}")
    if kinds is None:
        kinds = choose.sample(list(KINDS), choose.choice([1, 2, 2, 3]))
    dtype = choose.choices(list(DTYPES), [55, 20, 10, 8, 7])[0]
    tables = [KINDS[kind] for kind in kinds]

    def some(name: str, chance: float, most: int = 1) -> list[str]:
        entries = [table for kind in tables for table in getattr(kind, name)]
        if not entries or choose.random() > chance:
            return []
        return choose.sample(entries, min(len(entries), choose.randint(1, most)))

    forward = (some("forwards", 0.6) or ["outputs = model(x)"])[0]
    between = some("between", 0.6, 2)
    has_one_forward = (forward + "".join(between)).count("model(") == 1
    num_parts = choose.choice([0, 0, 1, 2])
    writers = [ForwardWriter(choose, kinds, has_one_forward) for _ in range(num_parts + 1)]
    classes = [w.write(f"Part{i}", choose.randint(1, 3), 0) for i, w in enumerate(writers[:-1])]
    classes.append(writers[-1].write("Program", choose.randint(2, 7), num_parts))
    operands: dict[str, list[str]] = {"small": [], "bias": [], "large": []}
    for i, writer in enumerate(writers):
        owner = f"model.parts[{i}]" if i < num_parts else "model"
        for name, paths in operands.items():
            paths += [f"{owner}.{path}" for path in find_operands(writer.modules)[name]]
    filled = {name: choose.choice(paths) for name, paths in operands.items() if paths}
    between = [
        line.format(**filled) for line in between if set(re.findall(r"{(\w+)}", line)) <= filled.keys()
    ]
    around = ["torch.autocast('cpu', torch.bfloat16)"] * (dtype == "autocast") + some("around_forward", 0.5)
    statements = {
        "input": (some("inputs", 0.5) or ["x"])[0],
        "attempt": "fail_once" in "".join(classes),
        "forward": forward,
        "between": between,
        "backward": (some("backwards", 0.7) or ["sum(losses).backward()"])[0],
        "around_forward": around,
        "around_backward": some("around_backward", 0.4),
        "around_step": some("around_step", 0.2),
        "is_backward_inside": choose.random() < 0.15,
        "is_scope_outside": choose.random() < 0.3,
    }
    set_up = "".join(f"    {line}\n" for line in some("set_up", 0.6, 2))
    source = "\n".join([*classes, f"def set_up(model):\n    pass\n{set_up}", _write_step(**statements)])
    options = [name for name in OPTIONS if name not in _SELDOM]
    wanted = [name for kind in tables for name in kind.options]
    option = choose.choice(wanted if wanted and choose.random() < 0.5 else options)
    return Program(seed, tuple(kinds), option, dtype, choose.random() < 0.8, choose.random() < 0.5, source)


def _write_step(
    *, input, attempt, forward, between, backward, around_forward, around_backward, around_step,
    is_backward_inside, is_scope_outside,
) -> str:  # fmt: skip
    """The source of `step`."""

    def inside(contexts: list[str], body: str) -> str:
        return f"with {', '.join(contexts)}:\n{textwrap.indent(body, '    ')}" if contexts else body

    after = "\n".join(
        ["losses = weigh(outputs)", *between, inside([] if is_backward_inside else around_backward, backward)]
    )
    first = "RUN.attempt(model, x, SCOPE)\n" if attempt else ""
    body = inside(["SCOPE()"], f"{forward}\n{after}" if is_backward_inside else forward)
    if is_scope_outside and not attempt:
        body = inside(["SCOPE()", *around_forward], f"{forward}\n{after}" if is_backward_inside else forward)
    else:
        body = inside(around_forward, first + body)
    if not is_backward_inside:
        body = f"{body}\n{after}"
    begin = (
        "trainable = [p for p in model.parameters() if p.requires_grad]\n"
        "first, last = trainable[: len(trainable) // 2], trainable[len(trainable) // 2 :]\n"
    )
    body = begin + inside(around_step, f"x = {input}\n{body}") + "\nreturn outputs"
    return "def step(model, x):\n" + textwrap.indent(body, "    ") + "\n"


class SomeSites:
    """Sites, drawn at random for a model."""

    def __init__(self, seed: int):
        self.seed, self.share = seed, random.Random(seed).choice([0.2, 0.5, 0.8, 1])

    def __contains__(self, site) -> bool:
        return random.Random(f"{self.seed} {site}").random() < self.share


def convert_program(model: nn.Module, option: str, seed: int) -> None:
    """Converts the model of a program by an option of `OPTIONS`."""
    if OPTIONS[option] is None:
        return
    fastvit.convert(model, **OPTIONS[option])
    if option in ("some", "across"):
        level = RecomputeLevel.ACROSS_BLOCKS if option == "across" else RecomputeLevel(seed % 3)
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, ScopeHook):
                    hook.policy = dataclasses.replace(hook.policy, sites=SomeSites(seed), level=level)


class Execution:
    """A program's model, as it is or converted, and its steps."""

    def __init__(self, program: Program, is_converted: bool):
        self.run = program_tools.Run(DTYPES[program.dtype])
        products = "products" in program.option
        scope = is_converted and program.option.startswith("scope")
        names = {name: getattr(program_tools, name) for name in program_tools.__all__}
        names["RUN"] = self.run
        names["SCOPE"] = (
            functools.partial(fastvit.recompute_scope, products=products) if scope else contextlib.nullcontext
        )
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
        work = [lambda: names["set_up"](self.model)]
        if is_converted:
            work.insert(
                program.is_set_up_first, lambda: convert_program(self.model, program.option, program.seed)
            )
        for each in work:
            each()

    def take_step(self, number: int) -> dict[str, object]:
        """All that a step leaves."""
        self.run.depth = 0
        torch.manual_seed(number)
        outputs = self.step(self.model, self.x)
        left: dict[str, object] = {f"output {i}": output for i, output in enumerate(outputs)}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers(), ("x", self.x)):
            left[name], left[f"gradient of {name}"] = tensor, tensor.grad
        left["random numbers"] = torch.rand(2)
        left["notes"] = self.run.log
        return left


@functools.lru_cache(4)
def _compile(source: str):
    return compile(source, "<program>", "exec")


def _is_same(one: object, other: object) -> bool:
    """Whether two tensors have the same bits; any NaN is the same as any other."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and one == other
    if type(one).__name__ != type(other).__name__ or one.dtype != other.dtype or one.shape != other.shape:
        return False
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        one, other = (t.detach().as_subclass(Tensor).reshape(-1) for t in (one, other))
        if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            return True
        is_nan = one.isnan()
        if not torch.equal(is_nan, other.isnan()):
            return False
        one, other = (t.masked_fill(is_nan, 0).view(torch.uint8) for t in (one, other))
        return torch.equal(one, other)


def _differing(expected: dict, actual: dict) -> list[str]:
    names = expected.keys() | actual.keys()
    return sorted(name for name in names if not _is_same(expected.get(name), actual.get(name)))


def is_refusal(error: BaseException) -> bool:
    """Whether the engine's message names a site, as `skip` takes it, and `skip`."""
    text = str(error)
    return "skip" in text and re.search(r"\(['\"][^'\"]*['\"], ['\"][^'\"]+['\"]\)", text) is not None


def _close_left_open() -> bool:
    """Takes hooks and modes that a step has left off the stacks of torch. Whether there were some."""
    is_left = False
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        is_left = True
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
        is_left = True
    return is_left


_MISTAKES = NameError, SyntaxError, AttributeError, LookupError  # of a table's source


def run_program(program: Program) -> tuple[Outcome, str]:
    """Runs a program as it is and converted. The outcome, and what to know of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run_program(program)
        finally:
            _close_left_open()


def _run_program(program: Program) -> tuple[Outcome, str]:
    eager = Execution(program, is_converted=False)
    converted: Execution | None = None
    for number in range(program.steps):
        expected = error = actual = fault = None
        try:
            expected = eager.take_step(number)
        except _MISTAKES as mistake:
            raise AssertionError(f"{mistake!r} in\n{program}") from mistake
        except Exception as raised:
            error = raised
        try:
            converted = converted or Execution(program, is_converted=True)
            actual = converted.take_step(number)
        except Exception as raised:
            fault = raised
        is_left_open = _close_left_open()
        if error is not None:
            outcome = Outcome.EAGER_RAISED if fault is None else Outcome.BOTH_RAISED
            return outcome, f"step {number}: {type(error).__name__}: {error}"
        if fault is not None:
            is_allowed = is_refusal(fault) and any(m in program.source for m in (LARGE, UNCOUNTED))
            outcome = Outcome.REFUSED if is_allowed else Outcome.CRASHED
            return outcome, f"step {number}: {type(fault).__name__}: {fault}"
        if is_left_open:
            return Outcome.LEFT_OPEN, f"step {number}"
        assert expected is not None and actual is not None
        if wrong := _differing(expected, actual):
            again = Execution(program, is_converted=False)
            repeated = [again.take_step(n) for n in range(number + 1)][-1]
            is_repeatable = not _differing(expected, repeated)
            outcome = Outcome.SILENT if is_repeatable else Outcome.NONDETERMINISTIC
            return outcome, f"step {number}: {len(wrong)} of {len(expected)} differ: {', '.join(wrong)}"
    return Outcome.SAME, ""


@dataclasses.dataclass
class Tally:
    """Outcomes of programs."""

    counts: Counter[Outcome] = dataclasses.field(default_factory=Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        outcomes = ", ".join(f"{self.counts[outcome]} {outcome.value}" for outcome in Outcome)
        num_programs = max(1, self.counts.total())
        return f"{num_programs} programs: {outcomes}; {1000 * self.seconds / num_programs:.1f} ms each"


def run_programs(seeds: range, kinds: Sequence[str] | None = None, option: str | None = None) -> Tally:
    """Runs the programs of some seeds, with the options that they draw, or with one."""
    tally, start = Tally(), time.perf_counter()
    for seed in seeds:
        program = draw_program(seed, kinds)
        if option is not None:
            program = dataclasses.replace(program, option=option)
        outcome, detail = run_program(program)
        tally.counts[outcome] += 1
        if outcome in FAULTS:
            tally.faults.append(f"{outcome.value}, {detail}\n{program}")
    tally.seconds = time.perf_counter() - start
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs, as they are and converted.")
    parser.add_argument("--programs", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="what each program mixes")
    parser.add_argument("--alone", action="store_true", help="so many programs of each kind alone")
    parser.add_argument("--option", choices=list(OPTIONS), help="instead of one that each program draws")
    parser.add_argument("--quiet", action="store_true", help="no sources")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [(kind,) for kind in args.kinds or KINDS] if args.alone else [args.kinds]
    num_faults = 0
    for kinds in rows:
        tally = run_programs(range(args.first, args.first + args.programs), kinds, args.option)
        for fault in () if args.quiet else tally.faults:
            print(fault, flush=True)
        print(f"{' '.join(kinds or ['mixed'])}: {tally}", flush=True)
        num_faults += len(tally.faults)
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
