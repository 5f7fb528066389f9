"""Draws the source of a random program from the tables of tests/program_kinds.py."""

from __future__ import annotations

import dataclasses
import random
import re
import textwrap
from collections.abc import Sequence

import torch
from program_kinds import ACTIVATIONS, KINDS, MASKABLE_ACTIVATIONS, NORMS, ONE_FORWARD_ONLY, SUMS

OPTIONS = {  # arguments of convert
    "convert": {},
    "products": {"matmuls": True},
    "recompute_weight_casts": {"recompute_weight_casts": True},
    "products, weight_casts": {"matmuls": True, "recompute_weight_casts": True},
    "least": {},  # every op that has a rule, except that inputs and outputs of blocks are kept
    "some": {},  # a random part of the sites, at a random level
    "across": {},  # a random part of the sites, and across blocks
    "planned": {"budget": "least"},  # the first step makes the plan
    "share": {"budget": 0.6},  # the first step makes the plan
    "scope": None,  # recompute_scope() instead of convert
    "scope, products": None,
}
_OPTIONS_ON_REQUEST = ("share",)  # drawn only if a kind has them in its options
DTYPES = {
    "float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "bfloat16, norms in float32": torch.bfloat16,
}  # fmt: skip
_SHIFT_PATTERN = r"(shift|frozen_shift|shift_buffer)\("
_VECTOR_PATTERN = rf"{_SHIFT_PATTERN}|(scale|frozen_scale|scale_of)\("


@dataclasses.dataclass(frozen=True)
class Program:
    """The source of a program, and how it is run."""

    seed: int
    kinds: tuple[str, ...]
    option: str
    dtype: str
    is_training: bool
    is_set_up_first: bool  # `set_up` runs before the conversion
    source: str
    steps: int = 2

    def __str__(self) -> str:
        mode = "train" if self.is_training else "eval"
        title = f"# seed {self.seed}, {' '.join(self.kinds)}: {self.option}, {self.dtype}, {mode}"
        return f"{title}, set up {'before' if self.is_set_up_first else 'after'} convert\n{self.source}"


class ForwardWriter:
    """Draws the class of a module from tables of lines."""

    def __init__(self, choose: random.Random, kinds: Sequence[str], subclass: str, has_one_forward: bool):
        self.choose, self.subclass, self.has_one_forward = choose, subclass, has_one_forward
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
            last = f"<<nn.Conv2d(8, 8, 1)>>(v[-1]) + <<nn.Conv2d(8, 8, 1)>>(v[{other}])"
            end = self.draw(f"return [{last}, *extras]")
        forward = textwrap.indent("\n".join([start, "aliases, extras = [], []", *lines, end]), " " * 8)
        made = "".join(f"        self.{name} = {expression}\n" for name, expression in self.modules.items())
        if name == "Program":
            parts = ", ".join(f"Part{i}()" for i in range(num_parts))
            made += f"        self.parts = nn.ModuleList([{parts}])\n"
        return (
            f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{made}\n"
            f"    def forward(self, x):\n{forward}\n"
        )

    def draw(self, template: str) -> str | None:
        """Returns a line of source, or None if the module lacks an operand of the line."""
        if not self.has_one_forward and template.endswith(ONE_FORWARD_ONLY):
            return None
        try:
            line = template.format_map(Fields(self))
        except LookupError:
            return None
        line = re.sub(r"<<(.*?)>>(?!>)", lambda found: self.add(found[1]), line)
        self.values += line.count("v.append(")
        return line

    def add(self, expression: str) -> str:
        """Returns the name of a module that this expression makes, or has made before."""
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
    """Draws the text for each placeholder of a line once."""

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
            case "norm_t":
                field = choose.choice(NORMS).format("t")
            case "norm_v":
                field = choose.choice(NORMS).format(f"v[{self['i']}]")
            case "sum":
                field = choose.choice(SUMS).format(j=self["j"])
            case "activation":
                field = choose.choice(ACTIVATIONS)
            case "activation_out_of_place":
                field = choose.choice([a for a in ACTIVATIONS if "inplace" not in a])
            case "subclass":
                field = self.writer.subclass
            case "maskable":
                field = choose.choice(MASKABLE_ACTIVATIONS)
            case _:
                field = "self." + choose.choice(find_operands(self.writer.modules)[name])
        self[name] = field
        return field


def find_operands(modules: dict[str, str]) -> dict[str, list[str]]:
    """Returns the operands that a line may name, by their placeholder in program_kinds.py."""
    found: dict[str, list[str]] = {"small": [], "bias": [], "large": [], "batch_norm": []}
    for name, expression in modules.items():
        if re.match(_VECTOR_PATTERN, expression):
            found["small"].append(name)
            found["bias"] += [name] * bool(re.match(_SHIFT_PATTERN, expression))
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
    """Draws the program of a seed, which mixes `kinds`; without `kinds` it draws them too."""
    choose = random.Random(f"{seed} {kinds}")
    if kinds is None:
        kinds = choose.sample(list(KINDS), choose.choice([1, 2, 2, 3]))
    dtype = choose.choices(list(DTYPES), [55, 20, 10, 8, 7])[0]
    tables = [KINDS[kind] for kind in kinds]

    def draw_some(name: str, chance: float, most: int = 1) -> list[str]:
        entries = [table for kind in tables for table in getattr(kind, name)]
        if not entries or choose.random() > chance:
            return []
        return choose.sample(entries, min(len(entries), choose.randint(1, most)))

    subclass = choose.choice(["Image", "LargeEps", "RUN.noted_type"])  # torch does not mix them
    forward = (draw_some("forwards", 0.6) or ["outputs = model(x)"])[0]
    between = draw_some("between", 0.6, 2)
    has_one_forward = (forward + "".join(between)).count("model(") == 1
    num_parts = choose.choice([0, 0, 1, 2])
    writers = [ForwardWriter(choose, kinds, subclass, has_one_forward) for _ in range(num_parts + 1)]
    classes = [w.write(f"Part{i}", choose.randint(1, 3), 0) for i, w in enumerate(writers[:-1])]
    classes.append(writers[-1].write("Program", choose.randint(2, 7), num_parts))
    operands: dict[str, list[str]] = {"small": [], "bias": [], "large": []}
    for i, writer in enumerate(writers):
        owner = f"model.parts[{i}]" if i < num_parts else "model"
        for name, paths in operands.items():
            paths += [f"{owner}.{path}" for path in find_operands(writer.modules)[name]]
    filled = {name: choose.choice(paths) for name, paths in operands.items() if paths}
    between = [line for line in between if set(re.findall(r"{(\w+)}", line)) <= filled.keys()]
    between = [line.format(**filled) for line in between]
    around = ["torch.autocast('cpu', torch.bfloat16)"] * (dtype == "autocast") + draw_some(
        "around_forward", 0.5
    )
    statements = {
        "input": (draw_some("inputs", 0.5) or ["x"])[0].replace("{subclass}", subclass),
        "attempt": "fail_once" in "".join(classes),
        "forward": forward,
        "between": between,
        "backward": (draw_some("backwards", 0.7) or ["sum(losses).backward()"])[0],
        "around_forward": around,
        "around_backward": draw_some("around_backward", 0.4),
        "around_step": draw_some("around_step", 0.2),
        "is_backward_inside": choose.random() < 0.15,
        "is_scope_outside": choose.random() < 0.3,
    }
    set_up = "".join(f"    {line}\n" for line in draw_some("set_up", 0.6, 2))
    source = "\n".join([*classes, f"def set_up(model):\n    pass\n{set_up}", _write_step(**statements)])
    options = [name for name in OPTIONS if name not in _OPTIONS_ON_REQUEST]
    wanted = [name for kind in tables for name in kind.options]
    option = choose.choice(wanted if wanted and choose.random() < 0.5 else options)
    return Program(seed, tuple(kinds), option, dtype, choose.random() < 0.8, choose.random() < 0.5, source)


def _write_step(
    *, input, attempt, forward, between, backward, around_forward, around_backward, around_step,
    is_backward_inside, is_scope_outside,
) -> str:  # fmt: skip
    """Returns the source of the function `step(model, x)`."""

    def indent_in(contexts: list[str], body: str) -> str:
        return f"with {', '.join(contexts)}:\n{textwrap.indent(body, '    ')}" if contexts else body

    after = "\n".join(
        [
            "losses = weigh(outputs)",
            *between,
            indent_in([] if is_backward_inside else around_backward, backward),
        ]
    )
    first = "RUN.attempt(model, x, SCOPE)\n" if attempt else ""
    body = indent_in(["SCOPE()"], f"{forward}\n{after}" if is_backward_inside else forward)
    if is_scope_outside and not attempt:
        body = indent_in(
            ["SCOPE()", *around_forward], f"{forward}\n{after}" if is_backward_inside else forward
        )
    else:
        body = indent_in(around_forward, first + body)
    if not is_backward_inside:
        body = f"{body}\n{after}"
    begin = (
        "trainable = [p for p in model.parameters() if p.requires_grad]\n"
        "half = len(trainable) // 2\n"
        "first_half, last_half = trainable[:half], trainable[half:]\n"
    )
    body = begin + indent_in(around_step, f"x = {input}\n{body}") + "\nreturn outputs"
    return "def step(model, x):\n" + textwrap.indent(body, "    ") + "\n"
