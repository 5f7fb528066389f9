"""Mutation tests: inserts small faults into the code, one at a time, and runs the tests.

    python tools/mutate.py [--only csrc/cpu/kernels/stats.cpp csrc/cpu/act.cpp] [--sample 40] [--seed 0]

A mutant is the tree with one operator, number or word of one line changed. Mutants that pass all tests are
listed: a test is missing, or the change has no effect (a grain size, for example). All work is done in a
copy, build/mutate. Kernels are compiled for the baseline instruction set only (ATEN_CPU_CAPABILITY=default).
Without --sample all mutants run, which takes hours. Exits with 0: survivors need a review.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build/mutate"
NORMS = ("stats", "forward", "reduce", "backward")
NORM_TESTS = ("tests/test_local_ops.py", "tests/test_ops.py")
LAYER_NORM_TESTS, ACT_TESTS = ("tests/test_layer_norm.py",), ("tests/test_act.py",)
SCOPE_TESTS = ("tests/test_recompute_writes.py", "tests/test_convert.py")
TARGETS = {
    "csrc/cpu/kernels.cpp": (*NORM_TESTS, *LAYER_NORM_TESTS, *ACT_TESTS),
    **{f"csrc/cpu/{name}.cpp": (*NORM_TESTS, "tests/test_peer.py") for name in NORMS},
    **{f"csrc/cpu/kernels/{name}.cpp": NORM_TESTS for name in NORMS},
    **{f"csrc/cpu/{folder}layer_norm.cpp": LAYER_NORM_TESTS for folder in ("", "kernels/")},
    **{f"csrc/cpu/{folder}act.cpp": ACT_TESTS for folder in ("", "kernels/")},
    "fastvit/recompute/calls.py": SCOPE_TESTS,
}
SHARED = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
          " + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", " += ": " -= "}  # fmt: skip
SWAPS = {
    ".cpp": SHARED | {" && ": " || ", " || ": " && ", "std::max": "std::min", "std::min": "std::max"},
    ".py": SHARED | {" and ": " or ", " or ": " and ", " not in ": " in ", "not ": "", " is not ": " is ",
                     "any(": "all(", "all(": "any(", "True": "False", "False": "True"},
}  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
# Lines without behaviour: text, declarations, and code that affects only speed.
SKIPPED = re.compile(r'^\s*(//|#|"""|template|using|import|from|static_assert|constexpr)|prefetch|describe\(')


@dataclass
class Mutant:
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n  - {self.before.strip()}\n  + {self.after.strip()}"


def mutants_of(path: str) -> list[Mutant]:
    """Every single change of every line, except in strings and comments."""
    found, inside = [], False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        quotes = line.count('"""') % 2
        if inside or quotes or SKIPPED.search(line):
            inside ^= bool(quotes)
            continue
        code = re.sub(r"(//|  #).*|\"[^\"]*\"", lambda m: "\0" * len(m[0]), line)
        changes = [(m.span(), to) for word, to in SWAPS[Path(path).suffix].items()
                   for m in re.finditer(re.escape(word), code)]  # fmt: skip
        changes += [(m.span(), str(int(m[1]) + 1)) for m in NUMBER.finditer(code)]
        for (start, end), to in sorted(changes):
            found.append(Mutant(path, number, line, line[:start] + to + line[end:]))
    return found


def run(command: str | list[str], seconds: float = 900, **environment: str) -> tuple[int, str]:
    """Status and output; a command that exceeds the limit is killed with its children, status -1."""
    env = os.environ | {"PYTHONPATH": str(COPY), "ATEN_CPU_CAPABILITY": "default"} | environment
    process = subprocess.Popen(
        command, cwd=COPY, shell=isinstance(command, str), env=env, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -1, ""


def copy_tree() -> Path:
    """Sources, the library and its objects, so that only what is mutated is compiled; the objects' folder."""
    shutil.rmtree(COPY, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in [*names.stdout.split("\0")[:-1], "fastvit/_C.so"]:
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name)
    (built,) = (ROOT / "build").glob("temp.*")
    folder = Path(shutil.copytree(built, COPY / "build" / built.name))
    commands = folder / "build.ninja"
    commands.write_text(re.sub("^csrc = .*", f"csrc = {COPY}/csrc", commands.read_text(), flags=re.M))
    return folder


def object_of(path: str) -> Path:
    """The plain version of one source, relative to the folder of objects."""
    return Path(path).relative_to("csrc").with_suffix(".baseline.o")


def compiled(path: str, folder: Path) -> bool:
    """Compiles the plain version of one source and links the library; False where it does not compile."""
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "ninja"
    for target in (str(object_of(path)), "_C.so"):
        listed = subprocess.run(
            [ninja, "-C", str(folder), "-t", "commands", target],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        if run(f"cd {folder} && {listed.stdout.splitlines()[-1]}")[0]:
            return False
    (COPY / "fastvit/_C.so").unlink()
    shutil.copy2(folder / "_C.so", COPY / "fastvit/_C.so")
    return True


def noticed(tests: tuple[str, ...], seconds: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "auto", "-p", "no:cacheprovider", *tests]
    return run(command, seconds, OMP_NUM_THREADS="1")[0] != 0


def outcome(mutant: Mutant, folder: Path, seconds: float) -> str:
    """`survived`, `noticed` or `does not compile`."""
    source = COPY / mutant.path
    original = source.read_text()
    lines = original.splitlines()
    lines[mutant.line - 1] = mutant.after
    source.write_text("\n".join(lines) + "\n")
    built = [folder / object_of(mutant.path), COPY / "fastvit/_C.so"] if source.suffix == ".cpp" else []
    before = [file.read_bytes() for file in built]
    try:
        if built and not compiled(mutant.path, folder):
            return "does not compile"
        return "noticed" if noticed(TARGETS[mutant.path], seconds) else "survived"
    finally:
        source.write_text(original)
        for file, content in zip(built, before, strict=True):
            file.unlink(missing_ok=True)
            file.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="FILE")
    parser.add_argument("--sample", type=int, help="so many mutants of all (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    mutants = [mutant for path in options.only for mutant in mutants_of(path)]
    chosen = random.Random(options.seed).sample(mutants, min(options.sample or len(mutants), len(mutants)))
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    folder, seconds = copy_tree(), {}
    for tests in {TARGETS[path] for path in options.only}:
        start = time.monotonic()
        if noticed(tests, 3600):
            sys.exit(f"{' '.join(tests)} fail without a mutant")
        seconds[tests] = 60 + 3 * (time.monotonic() - start)
    outcomes: dict[str, list[Mutant]] = {}
    for i, mutant in enumerate(chosen, 1):
        what = outcome(mutant, folder, seconds[TARGETS[mutant.path]])
        outcomes.setdefault(what, []).append(mutant)
        print(f"{i}/{len(chosen)} {what}: {mutant if what == 'survived' else mutant.path}", flush=True)
    print(", ".join(f"{len(found)} {what}" for what, found in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
