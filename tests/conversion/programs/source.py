"""Draws the source of a random program from the tables of kinds.py."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence

import torch

from conversion.programs.kinds import ACTIVATIONS, KINDS, MASKABLE_ACTIVATIONS, NORMS, ONE_FORWARD_ONLY, SUMS

# The arguments of `convert` for each option; None stands for `recompute_scope()` instead of `convert`. With
# `least`, `some` and `across`, convert_program of run_programs.py then sets the policy of each block.
OPTIONS = {
    "convert": {},
    "products": {"matmuls": True},
    "recompute_weight_casts": {"recompute_weight_casts": True},
    "products, recompute_weight_casts": {"matmuls": True, "recompute_weight_casts": True},
    "least": {},  # recomputes every op that has a rule; inputs and outputs of blocks are kept
    "some": {},  # recomputes a random share of the sites, at a random level
    "across": {},  # recomputes a random share of the sites, and inputs and outputs of blocks
    "planned": {"budget": "least"},  # the first step makes the plan
    "share": {"budget": 0.6},  # the first step makes the plan
    "scope": None,
    "scope, products": None,
}
_OPTIONS_ON_REQUEST = ("share",)  # these options are drawn only for a kind that has them in its options
DTYPES = {  # dtypes of parameters; the norms may be in float32, and `autocast` is a context
    "float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "bfloat16, norms in float32": torch.bfloat16,
}  # fmt: skip
_DTYPE_PERCENTS = dict(zip(DTYPES, (55, 20, 10, 8, 7), strict=True))
_SHIFT_PATTERN = r"(shift|frozen_shift|shift_buffer)\("
_VECTOR_PATTERN = rf"{_SHIFT_PATTERN}|(scale|frozen_scale|scale_of)\("


@dataclasses.dataclass(frozen=True)
class Program:
    """The source of a program, and the options with which it runs."""

    seed: int  # of the weights and the input
    kinds: tuple[str, ...]
    option: str
    dtype: str
    is_training: bool
    is_set_up_first: bool  # Whether `set_up` runs before the conversion of the model.
    source: str
    steps: int = 2

    def __repr__(self) -> str:
        mode = "train" if self.is_training else "eval"
        order = "set up before convert" if self.is_set_up_first else "set up after convert"
        title = f"{' '.join(self.kinds)}: {self.option}, {self.dtype}, {mode}, {order}, seed {self.seed}"
        return f"# {title}\n{self.source}"


class Choices:
    """Choices made by `draw_below(n)`, which returns an integer from 0 to n - 1; 0 is the simplest choice."""

    def __init__(self, draw_below: Callable[[int], int]):
        self.draw_below = draw_below
        self.line_numbers = itertools.count()  # of lines that differ by a number alone

    def choose(self, options: Sequence):
        return options[self.draw_below(len(options))]

    def choose_several(self, options: Sequence, number: int) -> list:
        remaining = list(options)
        return [remaining.pop(self.draw_below(len(remaining))) for _ in range(min(number, len(options)))]

    def decide(self, percent: int) -> bool:
        """Returns True with this probability."""
        return self.draw_below(100) >= 100 - percent


class ForwardWriter:
    """Draws the class of a module from tables of lines."""

    def __init__(self, choices: Choices, kinds: Sequence[str], subclass: str, has_one_forward: bool):
        self.choices, self.subclass, self.has_one_forward = choices, subclass, has_one_forward
        self.modules: dict[str, str] = {}  # expressions of submodules, parameters and buffers, by attribute
        self.tables = [KINDS[kind].lines for kind in kinds if KINDS[kind].lines]
        self.contexts = [context for kind in kinds for context in KINDS[kind].line_contexts]
        self.num_values = 1  # the length of `v` after the lines that are drawn; `v` begins with x

    def write_part(self, class_name: str, num_lines: int) -> str:
        """Returns the source of a class that returns one tensor."""
        return self._write_class(class_name, ["v = [x]", *self.draw_lines(num_lines), "return v[-1]"])

    def write_program(self, num_lines: int, num_parts: int) -> str:
        """Returns the source of the class `Program`, which calls each part and returns a list."""
        start, lines = self.draw_line("v = [<<nn.Conv2d(8, 8, 1)>>(x)]"), self.draw_lines(num_lines)
        for part_index in range(num_parts):
            line_index = self.choices.draw_below(len(lines) + 1)
            lines.insert(line_index, f"v.append(self.parts[{part_index}](v[-1]))")
        second_index = -1 - self.choices.draw_below(self.num_values)
        sum_of_two = f"<<nn.Conv2d(8, 8, 1)>>(v[-1]) + <<nn.Conv2d(8, 8, 1)>>(v[{second_index}])"
        end = self.draw_line(f"return [{sum_of_two}, *extras]")
        self.modules["parts"] = f"nn.ModuleList([{', '.join(f'Part{i}()' for i in range(num_parts))}])"
        return self._write_class("Program", [start, *lines, end])

    def _write_class(self, class_name: str, lines: list[str]) -> str:
        forward = textwrap.indent("\n".join(["aliases, extras = [], []", *lines]), " " * 8)
        assignments = "".join(f"        self.{name} = {text}\n" for name, text in self.modules.items())
        return (
            f"class {class_name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{assignments}\n    def forward(self, x):\n{forward}\n"
        )

    def draw_lines(self, num_lines: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < num_lines:
            table = self.choices.choose(self.tables) if self.choices.decide(55) else KINDS["plain"].lines
            if (line := self.draw_line(self.choices.choose(table))) is not None:
                lines.append(self.put_in_context(line))
        return lines

    def draw_line(self, template: str) -> str | None:
        """Returns the source of a line, or None if the line is left out."""
        if not self.has_one_forward and template.endswith(ONE_FORWARD_ONLY):
            return None
        try:
            line = template.format_map(PlaceholderTexts(self))
        except LookupError:  # the module lacks an operand of the line
            return None
        line = re.sub(r"<<(.*?)>>(?!>)", lambda match: self.name_module(match[1]), line)
        self.num_values += line.count("v.append(")
        return line

    def name_module(self, expression: str) -> str:
        """Returns the name of a module that this expression makes, or has made for an earlier line."""
        earlier_names = [name for name, text in self.modules.items() if text == expression]
        if earlier_names and self.choices.decide(40):
            return f"self.{self.choices.choose(earlier_names)}"
        name = f"m{len(self.modules)}"
        if re.match(r"nn\.(Conv|Linear|\w+Norm)", expression) and self.choices.decide(10):
            expression = f"freeze({expression}, '{self.choices.choose(['', 'weight', 'bias'])}')"
        self.modules[name] = expression
        return f"self.{name}"

    def put_in_context(self, line: str) -> str:
        """Returns the line, or the line in one of the contexts of the kinds."""
        if not self.contexts or not self.choices.decide(30):
            return line
        context = self.choices.choose(self.contexts)
        wrapped = f"with {context}:\n{textwrap.indent(line, '    ')}"
        return f"RUN.cast_values(v)\n{wrapped}\nRUN.cast_values(v)" if "autocast" in context else wrapped


class PlaceholderTexts(dict):
    """Maps placeholders of a line to texts, each of which is drawn when the placeholder is first read."""

    def __init__(self, writer: ForwardWriter):
        self.writer = writer

    def __missing__(self, name: str) -> str:
        choose, num_values = self.writer.choices.choose, self.writer.num_values
        match name:
            case "i":  # mostly one of the newest
                text = str(max(0, num_values - 1 - choose([0] * 12 + [1] * 5 + [2, 2, 3])))
            case "j":
                text = str(self.writer.choices.draw_below(num_values))
            case "number":
                text = str(next(self.writer.choices.line_numbers))
            case "norm_t":
                text = choose(NORMS).format("t")
            case "norm_v":
                text = choose(NORMS).format(f"v[{self['i']}]")
            case "sum":
                text = choose(SUMS).format(j=self["j"])
            case "activation":
                text = choose(ACTIVATIONS)
            case "activation_out_of_place":
                text = choose([a for a in ACTIVATIONS if "inplace" not in a])
            case "subclass":
                text = self.writer.subclass
            case "maskable":
                text = choose(MASKABLE_ACTIVATIONS)
            case _:
                if not (operands := find_operands(self.writer.modules)[name]):
                    raise LookupError(name)
                text = f"self.{choose(operands)}"
        self[name] = text
        return text


def find_operands(modules: dict[str, str]) -> dict[str, list[str]]:
    """Returns the operands that a line may read or write, by their placeholder in kinds.py."""
    operands: dict[str, list[str]] = {"small": [], "bias": [], "large": [], "batch_norm": []}
    for name, expression in modules.items():
        if re.match(_VECTOR_PATTERN, expression):
            operands["small"].append(name)
            operands["bias"] += [name] * bool(re.match(_SHIFT_PATTERN, expression))
        elif expression.startswith("matrix"):
            operands["large"].append(name)
        elif kind := re.search(r"nn\.(Conv2d|Linear|\w+Norm\w*)\(", expression):
            if expression.startswith("nn.Sequential"):
                continue
            is_norm, is_batch_norm = "Norm" in kind[1], "BatchNorm" in kind[1]
            has_affine = "affine=False" not in expression and "InstanceNorm2d(8)" not in expression
            has_affine = has_affine and ("InstanceNorm" not in kind[1] or "affine=True" in expression)
            if is_norm and has_affine:
                operands["small"].append(f"{name}.weight")
            if has_affine and "bias=False" not in expression and kind[1] != "RMSNorm":
                operands["bias"].append(f"{name}.bias")
                operands["small"].append(f"{name}.bias")
            if is_batch_norm and "track_running_stats=False" not in expression:
                operands["small"] += [f"{name}.running_mean", f"{name}.running_var"]
            if not is_norm:
                operands["large"].append(f"{name}.weight")
            operands["batch_norm"] += [name] * is_batch_norm
    return operands


def draw_program(
    draw_below: Callable[[int], int], kinds: Sequence[str] | None = None, option: str | None = None
) -> Program:
    """Draws a program that mixes `kinds`; draws these and the option, too, where they are None."""
    choices = Choices(draw_below)
    seed = choices.draw_below(1000)
    if kinds is None:
        kinds = choices.choose_several(list(KINDS), choices.choose([1, 2, 2, 3]))
    dtype = choices.choose([name for name, percent in _DTYPE_PERCENTS.items() for _ in range(percent)])
    kinds_to_mix = [KINDS[kind] for kind in kinds]

    def draw_entries(table: str, percent: int, max_entries: int = 1) -> list[str]:
        entries = [entry for kind in kinds_to_mix for entry in getattr(kind, table)]
        if not entries or not choices.decide(percent):
            return []
        return choices.choose_several(entries, 1 + choices.draw_below(max_entries))

    subclass = choices.choose(["Image", "LargeEps", "RUN.noting_subclass"])  # torch cannot mix subclasses
    forward = (draw_entries("forward_calls", 60) or ["outputs = model(x)"])[0]
    pre_backward_lines = draw_entries("pre_backward_lines", 60, 2)
    has_one_forward = (forward + "".join(pre_backward_lines)).count("model(") == 1
    num_parts = choices.choose([0, 0, 1, 2])
    writers = [ForwardWriter(choices, kinds, subclass, has_one_forward) for _ in range(num_parts + 1)]
    classes = [w.write_part(f"Part{i}", 1 + choices.draw_below(3)) for i, w in enumerate(writers[:-1])]
    classes.append(writers[-1].write_program(2 + choices.draw_below(6), num_parts))
    operands: dict[str, list[str]] = {"small": [], "bias": [], "large": []}
    for i, writer in enumerate(writers):
        owner = f"model.parts[{i}]" if i < num_parts else "model"
        for name, paths in operands.items():
            paths += [f"{owner}.{path}" for path in find_operands(writer.modules)[name]]
    texts = {name: choices.choose(paths) for name, paths in operands.items() if paths}
    pre_backward_lines = [
        line.format(**texts)
        for line in pre_backward_lines
        if set(re.findall(r"{(\w+)}", line)) <= texts.keys()
    ]
    forward_contexts = ["torch.autocast('cpu', torch.bfloat16)"] * (dtype == "autocast")
    step = _write_step(
        input=(draw_entries("inputs", 50) or ["x"])[0].replace("{subclass}", subclass),
        may_fail="fail_once" in "".join(classes),
        forward=forward,
        pre_backward_lines=pre_backward_lines,
        backward=(draw_entries("backward_calls", 70) or ["sum(losses).backward()"])[0],
        forward_contexts=forward_contexts + draw_entries("forward_contexts", 50),
        backward_contexts=draw_entries("backward_contexts", 40),
        step_contexts=draw_entries("step_contexts", 20),
        is_backward_inside=choices.decide(15),
        is_scope_outside=choices.decide(30),
    )
    set_up = "".join(f"    {line}\n" for line in draw_entries("set_up", 60, 2))
    source = "\n".join([*classes, f"def set_up(model):\n    pass\n{set_up}", step])
    if option is None:
        kind_options = [name for kind in kinds_to_mix for name in kind.options]
        options = [name for name in OPTIONS if name not in _OPTIONS_ON_REQUEST]
        option = choices.choose(kind_options if kind_options and choices.decide(50) else options)
    is_training, is_set_up_first = not choices.decide(20), choices.decide(50)
    return Program(seed, tuple(kinds), option, dtype, is_training, is_set_up_first, source)


def _write_step(
    *, input, may_fail, forward, pre_backward_lines, backward, forward_contexts, backward_contexts,
    step_contexts, is_backward_inside, is_scope_outside,
) -> str:  # fmt: skip
    """Returns the source of the function `step(model, x)`.

    Args:
        may_fail: Whether a line may raise, so that the forward is repeated until no line raises.
        is_backward_inside: Whether the backward runs in the scope of the forward and in its contexts.
        is_scope_outside: Whether the scope is entered before the contexts of the forward.
    """

    def indent_in(contexts: list[str], body: str) -> str:
        return f"with {', '.join(contexts)}:\n{textwrap.indent(body, '    ')}" if contexts else body

    backward_source = "\n".join(
        [
            "losses = make_losses(outputs)",
            *pre_backward_lines,
            indent_in([] if is_backward_inside else backward_contexts, backward),
        ]
    )
    scope_body = f"{forward}\n{backward_source}" if is_backward_inside else forward
    if is_scope_outside and not may_fail:
        body = indent_in(["SCOPE()", *forward_contexts], scope_body)
    else:
        failing_forwards = "RUN.repeat_until_complete(model, x, SCOPE)\n" if may_fail else ""
        body = indent_in(forward_contexts, failing_forwards + indent_in(["SCOPE()"], scope_body))
    if not is_backward_inside:
        body = f"{body}\n{backward_source}"
    halves = (
        "trainable = [p for p in model.parameters() if p.requires_grad]\n"
        "half = len(trainable) // 2\n"
        "first_half, last_half = trainable[:half], trainable[half:]\n"
    )
    body = halves + indent_in(step_contexts, f"x = {input}\n{body}") + "\nreturn outputs"
    return "def step(model, x):\n" + textwrap.indent(body, "    ") + "\n"
