"""Draws the source of a random program from the tables of tests/program_kinds.py."""

from __future__ import annotations

import dataclasses
import random
import re
import textwrap
from collections.abc import Sequence

import torch

from conversion.programs.kinds import ACTIVATIONS, KINDS, MASKABLE_ACTIVATIONS, NORMS, ONE_FORWARD_ONLY, SUMS

# The arguments of `convert` for each option; None stands for `recompute_scope()` instead of `convert`. With
# `least`, `some` and `across`, convert_program of tests/programs.py then sets the policy of each block.
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
_SHIFT_PATTERN = r"(shift|frozen_shift|shift_buffer)\("
_VECTOR_PATTERN = rf"{_SHIFT_PATTERN}|(scale|frozen_scale|scale_of)\("


@dataclasses.dataclass(frozen=True)
class Program:
    """The source of a program, and the options with which it runs."""

    seed: int
    kinds: tuple[str, ...]
    option: str
    dtype: str
    is_training: bool
    is_set_up_first: bool  # Whether `set_up` runs before the conversion of the model.
    source: str
    steps: int = 2

    def __str__(self) -> str:
        mode = "train" if self.is_training else "eval"
        title = f"# seed {self.seed}, {' '.join(self.kinds)}: {self.option}, {self.dtype}, {mode}"
        return f"{title}, set up {'before' if self.is_set_up_first else 'after'} convert\n{self.source}"


class ForwardWriter:
    """Draws the class of a module from tables of lines."""

    def __init__(self, rng: random.Random, kinds: Sequence[str], subclass: str, has_one_forward: bool):
        self.rng, self.subclass, self.has_one_forward = rng, subclass, has_one_forward
        self.modules: dict[str, str] = {}  # expressions of submodules, parameters and buffers, by attribute
        self.plain_lines = KINDS["plain"].lines
        self.tables = [KINDS[kind].lines for kind in kinds if KINDS[kind].lines]
        self.contexts = [context for kind in kinds for context in KINDS[kind].line_contexts]
        self.num_values = 1  # the length of `v` after the lines that are drawn; `v` begins with x

    def write_class(self, class_name: str, num_lines: int, num_parts: int) -> str:
        """Returns the source of a class. Only `Program` has parts, each of which a line calls."""
        lines = []
        while len(lines) < num_lines:
            table = self.rng.choice(self.tables) if self.rng.random() < 0.55 else self.plain_lines
            if (line := self.draw_line(self.rng.choice(table))) is not None:
                lines.append(self.put_in_context(line))
        for part_index in range(num_parts):
            line_index = self.rng.randrange(len(lines) + 1)
            lines.insert(line_index, f"v.append(self.parts[{part_index}](v[-1]))")
        start, end = "v = [x]", "return v[-1]"
        if class_name == "Program":
            second_index = self.rng.randrange(-self.num_values, 0)
            start = self.draw_line("v = [<<nn.Conv2d(8, 8, 1)>>(x)]")
            sum_of_two = f"<<nn.Conv2d(8, 8, 1)>>(v[-1]) + <<nn.Conv2d(8, 8, 1)>>(v[{second_index}])"
            end = self.draw_line(f"return [{sum_of_two}, *extras]")
        forward = textwrap.indent("\n".join([start, "aliases, extras = [], []", *lines, end]), " " * 8)
        assignments = "".join(f"        self.{name} = {text}\n" for name, text in self.modules.items())
        if class_name == "Program":
            parts = ", ".join(f"Part{i}()" for i in range(num_parts))
            assignments += f"        self.parts = nn.ModuleList([{parts}])\n"
        return (
            f"class {class_name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{assignments}\n"
            f"    def forward(self, x):\n{forward}\n"
        )

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
        if earlier_names and self.rng.random() < 0.4:
            return f"self.{self.rng.choice(earlier_names)}"
        name = f"m{len(self.modules)}"
        if self.rng.random() < 0.1 and re.match(r"nn\.(Conv|Linear|\w+Norm)", expression):
            expression = f"freeze({expression}, '{self.rng.choice(['', 'weight', 'bias'])}')"
        self.modules[name] = expression
        return f"self.{name}"

    def put_in_context(self, line: str) -> str:
        """Returns the line, or the line in one of the contexts of the kinds."""
        if not self.contexts or self.rng.random() > 0.3:
            return line
        context = self.rng.choice(self.contexts)
        wrapped = f"with {context}:\n{textwrap.indent(line, '    ')}"
        return f"RUN.cast_values(v)\n{wrapped}\nRUN.cast_values(v)" if "autocast" in context else wrapped


class PlaceholderTexts(dict):
    """Maps placeholders of a line to texts, each of which is drawn when the placeholder is first read."""

    def __init__(self, writer: ForwardWriter):
        self.writer, self.rng = writer, writer.rng

    def __missing__(self, name: str) -> str:
        rng, num_values = self.rng, self.writer.num_values
        match name:
            case "i":
                text = str(max(0, num_values - 1 - int(rng.expovariate(1))))  # mostly one of the newest
            case "j":
                text = str(rng.randrange(num_values))
            case "number":
                text = str(rng.randrange(10**9))
            case "norm_t":
                text = rng.choice(NORMS).format("t")
            case "norm_v":
                text = rng.choice(NORMS).format(f"v[{self['i']}]")
            case "sum":
                text = rng.choice(SUMS).format(j=self["j"])
            case "activation":
                text = rng.choice(ACTIVATIONS)
            case "activation_out_of_place":
                text = rng.choice([a for a in ACTIVATIONS if "inplace" not in a])
            case "subclass":
                text = self.writer.subclass
            case "maskable":
                text = rng.choice(MASKABLE_ACTIVATIONS)
            case _:
                text = "self." + rng.choice(find_operands(self.writer.modules)[name])
        self[name] = text
        return text


def find_operands(modules: dict[str, str]) -> dict[str, list[str]]:
    """Returns the operands that a line may read or write, by their placeholder in program_kinds.py."""
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


def draw_program(seed: int, kinds: Sequence[str] | None = None) -> Program:
    """Draws the program of a seed, which mixes `kinds`; without `kinds` it draws them too."""
    rng = random.Random(f"{seed} {kinds}")
    if kinds is None:
        kinds = rng.sample(list(KINDS), rng.choice([1, 2, 2, 3]))
    dtype = rng.choices(list(DTYPES), [55, 20, 10, 8, 7])[0]  # in percent
    kinds_to_mix = [KINDS[kind] for kind in kinds]

    def draw_entries(table: str, chance: float, max_entries: int = 1) -> list[str]:
        entries = [entry for kind in kinds_to_mix for entry in getattr(kind, table)]
        if not entries or rng.random() > chance:
            return []
        return rng.sample(entries, min(len(entries), rng.randint(1, max_entries)))

    subclass = rng.choice(["Image", "LargeEps", "RUN.noting_subclass"])  # torch cannot mix subclasses
    forward = (draw_entries("forward_calls", 0.6) or ["outputs = model(x)"])[0]
    pre_backward_lines = draw_entries("pre_backward_lines", 0.6, 2)
    has_one_forward = (forward + "".join(pre_backward_lines)).count("model(") == 1
    num_parts = rng.choice([0, 0, 1, 2])
    writers = [ForwardWriter(rng, kinds, subclass, has_one_forward) for _ in range(num_parts + 1)]
    classes = [w.write_class(f"Part{i}", rng.randint(1, 3), 0) for i, w in enumerate(writers[:-1])]
    classes.append(writers[-1].write_class("Program", rng.randint(2, 7), num_parts))
    operands: dict[str, list[str]] = {"small": [], "bias": [], "large": []}
    for i, writer in enumerate(writers):
        owner = f"model.parts[{i}]" if i < num_parts else "model"
        for name, paths in operands.items():
            paths += [f"{owner}.{path}" for path in find_operands(writer.modules)[name]]
    texts = {name: rng.choice(paths) for name, paths in operands.items() if paths}
    pre_backward_lines = [
        line.format(**texts)
        for line in pre_backward_lines
        if set(re.findall(r"{(\w+)}", line)) <= texts.keys()
    ]
    forward_contexts = ["torch.autocast('cpu', torch.bfloat16)"] * (dtype == "autocast")
    forward_contexts += draw_entries("forward_contexts", 0.5)
    statements = {
        "input": (draw_entries("inputs", 0.5) or ["x"])[0].replace("{subclass}", subclass),
        "may_fail": "fail_once" in "".join(classes),
        "forward": forward,
        "pre_backward_lines": pre_backward_lines,
        "backward": (draw_entries("backward_calls", 0.7) or ["sum(losses).backward()"])[0],
        "forward_contexts": forward_contexts,
        "backward_contexts": draw_entries("backward_contexts", 0.4),
        "step_contexts": draw_entries("step_contexts", 0.2),
        "is_backward_inside": rng.random() < 0.15,
        "is_scope_outside": rng.random() < 0.3,
    }
    set_up = "".join(f"    {line}\n" for line in draw_entries("set_up", 0.6, 2))
    source = "\n".join([*classes, f"def set_up(model):\n    pass\n{set_up}", _write_step(**statements)])
    options = [name for name in OPTIONS if name not in _OPTIONS_ON_REQUEST]
    kind_options = [name for kind in kinds_to_mix for name in kind.options]
    option = rng.choice(kind_options if kind_options and rng.random() < 0.5 else options)
    return Program(seed, tuple(kinds), option, dtype, rng.random() < 0.8, rng.random() < 0.5, source)


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
