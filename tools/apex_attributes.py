"""Compares the public attributes of apex's modules and classes with those of fastvit.compat.

    git clone --branch 25.05 https://github.com/NVIDIA/apex /tmp/apex
    python tools/apex_attributes.py /tmp/apex [--out docs/apex-tests.md]

The program reads apex's sources by `ast` and runs none of them. An attribute is a function, class or constant
of a module; a method, property, class attribute or `self.x` of a class; or, in brackets, a key in the groups
or the state of an optimizer. An attribute is "there" if the look-alike in fastvit.compat has it: a module, a
class, or an instance that `INSTANCE_FACTORIES` makes. An attribute "raises" if its AttributeError has the
line to write instead. The program prints a table in Markdown; `--out` replaces the section of totals in a
page. It exits with 1 if an attribute is missing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastvit.compat

HEADING = "\n## Attributes\n"
SECTION = """
The public attributes of apex 25.05, where `fastvit.compat` has the same module or class:
{there} of {total} are there, and {raises} raise an error with the line to write instead.
`python tools/apex_attributes.py FOLDER --out docs/apex-tests.md` makes this section.

| part | there | error |
|---|---|---|
{rows}
"""
# The end of an AttributeError that names the line to write instead.
LINE_TO_WRITE = re.compile(r"[;:,.] (use|write|call|set) \S")
COMPILED_SOURCES = {"amp_C": "csrc/amp_C_frontend.cpp", "apex_C": "csrc/flatten_unflatten.cpp"}


def iterate_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, and those in `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for name in ("body", "orelse", "handlers", "finalbody"):
                yield from iterate_statements(getattr(statement, name, []))


def defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yields the functions, classes and variables that a body defines."""
    for statement in iterate_statements(body):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


class Sources:
    """Parses apex's modules, and lists the names that they define and export."""

    def __init__(self, folder: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.packages: set[str] = set()
        for file in sorted((folder / "apex").rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
                self.packages.add(".".join(parts))
            self.trees[".".join(parts)] = ast.parse(file.read_text())

    def imports(self, module: str) -> Iterator[tuple[str, str, str]]:
        """Yields (name, module that defines it, name there) for each name that a module imports from apex."""
        package = module if module in self.packages else module.rpartition(".")[0]
        for statement in iterate_statements(self.trees[module].body):
            if isinstance(statement, ast.ImportFrom):
                source = resolve_name("." * statement.level + (statement.module or ""), package)
                for alias in statement.names if source in self.trees else []:
                    names = defined_names(self.trees[source].body) if alias.name == "*" else [alias.name]
                    yield from ((alias.asname or name, source, name) for name in names)

    def public_names(self, module: str) -> set[str]:
        """Returns the public names that a module defines, and those that a package imports."""
        names = set(defined_names(self.trees[module].body))
        if module in self.packages:
            names |= {name for name, _, _ in self.imports(module)}
        return {name for name in names if not name.startswith("_")}

    def find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Returns the module that defines a class, and the class; `name` is its name in `module`."""
        for statement in iterate_statements(self.trees[module].body):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return module, statement
        for local_name, source, source_name in self.imports(module):
            if local_name == name and (source, source_name) != (module, name):
                return self.find_class(source, source_name)
        return None

    def class_attributes(self, module: str, class_def: ast.ClassDef) -> tuple[set[str], set[str]]:
        """Returns the public attributes of a class and its bases in apex, and keys of groups and state."""
        names, keys = set(defined_names(class_def.body)), set[str]()
        for node in ast.walk(class_def):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Subscript(
                    value=ast.Name(id="group" | "state" | "param_state"), slice=ast.Constant(value=key)
                ):
                    keys.add(str(key))
        for base in class_def.bases:
            if isinstance(base, ast.Name) and (parent := self.find_class(module, base.id)):
                parent_names, parent_keys = self.class_attributes(*parent)
                names, keys = names | parent_names, keys | parent_keys
        names -= {"warned"}  # Classes of apex have this flag after a warning about Python code.
        return {name for name in names if not name.startswith("_")}, keys


def make_sgd() -> torch.optim.Optimizer:
    """Returns torch's SGD, which apex's wrappers of optimizers take."""
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1, momentum=0.9)


def make_stepped(kind: Callable, **options: Any) -> torch.optim.Optimizer:
    """Returns an optimizer after a step, which makes its state."""
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).half())]
    optimizer = kind(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@cache
def initialized_amp_state() -> Any:
    """Returns amp's state after `initialize`."""
    amp, model = importlib.import_module("apex.amp"), torch.nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O1", verbosity=0)
    return amp._amp_state


INSTANCE_FACTORIES: dict[str, Callable[[Any], Any]] = {
    "FusedAdam FusedLAMB FusedNovoGrad": make_stepped,
    "FusedMixedPrecisionLamb": lambda kind: make_stepped(kind, reduced_precision_dtype=torch.float16),
    "FusedSGD": lambda kind: make_stepped(kind, momentum=0.9),
    "FP16_Optimizer LARC": lambda kind: kind(make_sgd()),
    "FP16Model DistributedDataParallel Reducer": lambda kind: kind(torch.nn.Linear(2, 2)),
    "apex.fp16_utils.LossScaler DynamicLossScaler tofp16 NoOpHandle O0 O1 O2 O3": lambda kind: kind(),
    "SyncBatchNorm FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm": lambda kind: kind(2),
    "FastLayerNorm MultiTensorApply": lambda kind: kind(2),
    "MLP": lambda kind: kind([2, 2]),
    "FusedDense DenseNoBias": lambda kind: kind(2, 2),
    "FusedDenseGeluDense": lambda kind: kind(2, 2, 2),
    "AmpState": lambda kind: initialized_amp_state(),
    "Properties": lambda kind: initialized_amp_state().opt_properties,
    "AmpHandle": lambda kind: initialized_amp_state().handle,
    "apex.amp.LossScaler": lambda kind: initialized_amp_state().loss_scalers[0],
}
"""Functions that make an instance, by names of classes; a package before a name tells classes apart."""


def make_instance(package: str, name: str, kind: Any) -> Any:
    """Returns an instance of a class, or the class itself if `INSTANCE_FACTORIES` has no factory."""
    for names, make in INSTANCE_FACTORIES.items():
        if name in names.split() or f"{package}.{name}" in names.split():
            return make(kind)
    return kind


def look_up(owner: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns "there", "raises" or "missing" for each attribute."""
    results = {}
    for name in sorted(names):
        try:
            getattr(owner, name)
            results[name] = "there"
        except AttributeError as error:
            results[name] = "raises" if LINE_TO_WRITE.search(str(error)) else "missing"
    return results


def compare(sources: Sources, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each module or class that fastvit.compat has too, with the outcome of each attribute."""
    compared = set[tuple[str, str]]()  # Several modules may export one class.
    for module in sources.trees:
        try:
            look_alike = importlib.import_module(module)
        except ImportError:
            continue
        yield module, look_up(look_alike, sources.public_names(module))
        for name in sorted(sources.public_names(module)):
            definition = sources.find_class(module, name)
            if not definition or (definition[0], name) in compared or not hasattr(look_alike, name):
                continue
            compared.add((definition[0], name))
            names, keys = sources.class_attributes(*definition)
            owner = make_instance(".".join(module.split(".")[:2]), name, getattr(look_alike, name))
            results = look_up(owner, names)
            if isinstance(owner, torch.optim.Optimizer) and keys:
                present_keys = {key for d in (*owner.param_groups, *owner.state.values()) for key in d}
                results |= {f"[{key}]": "there" if key in present_keys else "missing" for key in sorted(keys)}
            yield f"{module}.{name}", results
    for module, file in COMPILED_SOURCES.items():
        exported = re.findall(r'm\.def\("(\w+)"', (folder / file).read_text())
        yield module, look_up(importlib.import_module(module), exported)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="apex's sources, 25.05")
    parser.add_argument("--out", type=Path, help="a page whose section of attributes is replaced")
    args = parser.parse_args()
    if not (args.folder / COMPILED_SOURCES["amp_C"]).is_file():
        parser.error(f"{args.folder} has no {COMPILED_SOURCES['amp_C']}; give the folder of apex's sources")
    fastvit.compat.install(prefer="fastvit")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("ignore")
    totals: dict[str, Counter] = defaultdict(Counter)
    print("| module or class | attributes | there | raise with the line to write | missing |")
    print("|---|---|---|---|---|")
    for owner, results in compare(Sources(args.folder), args.folder):
        kinds = Counter(results.values())
        totals[".".join(owner.split(".")[:2])] += kinds
        if results:
            missing = ", ".join(name for name, kind in results.items() if kind == "missing")
            print(f"| {owner} | {len(results)} | {kinds['there']} | {kinds['raises']} | {missing} |")
    sum_of_totals = totals["all"] = sum(totals.values(), Counter())
    rows = "\n".join(
        f"| {package} | {kinds['there']} | {kinds['raises']} |" for package, kinds in totals.items()
    )
    section = SECTION.format(total=sum_of_totals.total(), rows=rows, **sum_of_totals)
    print(section)
    if args.out:
        args.out.write_text(args.out.read_text().partition(HEADING)[0] + HEADING + section)
    dist.destroy_process_group()
    return 1 if sum_of_totals["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
