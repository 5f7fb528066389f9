"""Runs apex's own tests against fastvit.compat on the CPU and prints what passes, as a table in markdown.

    git clone --branch 25.05 https://github.com/NVIDIA/apex /tmp/apex
    python tools/run_apex_tests.py /tmp/apex [--only run_amp] [--limit 900] [--out docs/apex-tests.md]

The program downloads nothing. It runs a temporary copy of the tests in the folder of apex's sources. In the
copy `cuda` is replaced by `cpu`, and the timing loop of the cross entropy's test has one iteration. Half
precision is float16, as on a GPU. `syncbn_shim.py` replaces the compiled module `syncbn`, which some scripts
call. The program exits with 1 if a test fails without a reason in `KNOWN_REASONS`. test_fused_layer_norm.py
needs the package expecttest, through torch.testing, and onnx and onnxscript for two of its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
COMPAT = (sys.executable, "-m", "fastvit.compat", "--prefer", "fastvit", "--half", "float16")
VARIABLES = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": str(ROOT)}
FOLDERS = ("L0/run_amp", "L0/run_fp16util", "L0/run_optimizers", "L0/run_fused_layer_norm")
CONTRIB = ("clip_grad", "xentropy")  # packages of apex.contrib whose tests run
SYNCBN = "distributed/synced_batchnorm"

# A file in SYNCBN -> for each run the number of ranks (0: without a launcher) and the arguments.
SCRIPTS = {
    "python_single_gpu_unit_test.py": [(0, "")],
    "single_gpu_unit_test.py": [(0, "")],
    "test_batchnorm1d.py": [(0, "")],
    "two_gpu_unit_test.py": [(2, ""), (2, "--fp16"), (2, "--fp64")],
    "two_gpu_test_different_batch_size.py": [(2, "--apex")],
    "test_groups.py": [(4, "--group_size=2")],
}

CPU_REPLACEMENTS = (  # a pattern in the source of a test, and its replacement
    (r"torch\.cuda\.(\w+Tensor)\b", r"torch.\1"),
    (r"torch\.cuda\.manual_seed\([^()]*\)", "None"),
    (r"torch\.cuda\.is_bf16_supported\(\)", "True"),
    (r"torch\.cuda\b", "torch.cpu"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"""(["'])cuda(:[^"']*)?\1""", '"cpu"'),
    (r"assertTrue\((\w+)\.is_cuda\)", r"assertTrue(\1.is_cpu)"),
    (r"iters = 1000?\b", "iters = 1"),  # An iteration takes 300 million logits.
    (r", device_ids=\[[^]]*\], output_device=[\w.]+", ""),
    (r"""(["'])nccl\1""", '"gloo"'),
)

# Reasons why tests do not pass on the CPU: a pattern for the text `{file} {test} {message}`, and the reason.
KNOWN_REASONS = (
    (
        r"apex\.amp: fastvit has no init",
        "calls `amp.init`, not `amp.initialize`",
    ),
    (r"TestFusedAdagrad", "`FusedAdagrad` is absent; use `torch.optim.Adagrad`"),
    (r"update_scale_hysteresis", "`amp_C.update_scale_hysteresis` is absent"),
    (
        r"test_multi_tensor_unscale_l2norm.*torch\.Size\(\[1\]\) != torch\.Size\(\[\]\)",
        "the test compares a norm of shape `(1,)`, which apex's kernel returns too, with a number",
    ),
    (r"FP16Model", "`FP16Model` is absent; scripts call `network_to_half`"),
    (r"more than 1 GPU required$", "needs two GPUs"),
    (r"Insufficient \w+ memory|psutil", "needs 60 GB of GPU memory"),
    (
        r"test_fused_optimizer\.py TestFusedSGD\.test_half ",
        "`torch.optim.SGD` rounds the momentum to half before it uses it, and its weights differ from "
        "`FusedSGD`'s by 0.0015 after 4 steps, where the test allows 0.001",
    ),
)

CONFTEST = """\
import pytest, torch
from apex import optimizers

optimizers.FusedAdagrad = None  # absent in fastvit; without the name the whole file would fail

@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)  # test_loss_scale_decrease and test_lamb's test_half fail for some random numbers
"""

PAGE = """\
# apex's own tests

Reference, for people who ask which behaviour of apex is reproduced. The tests of apex 25.05 run over
`fastvit.compat` on the CPU, with `cpu` for `cuda`. This command makes the page from apex's sources:
`python tools/run_apex_tests.py FOLDER --out docs/apex-tests.md`.

{table}
"""


class Outcome(NamedTuple):
    """The outcome of a test or of a script's run."""

    test: str
    state: str  # passed, failed or skipped
    message: str


def replace_cuda(text: str) -> str:
    """Returns the source of a test with `cuda` replaced by `cpu`."""
    for pattern, replacement in CPU_REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return text


def run_command(command: list[str], log: Path, seconds: float, **variables: str) -> bool:
    """Runs a command with its output in `log`. Returns whether it passed; kills it after its time."""
    with log.open("w") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        environment = os.environ | VARIABLES | variables
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            file.write(f"run_apex_tests: killed after {seconds:g} s\n")
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):  # The command may have left children.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_test_file(file: Path, limit: float) -> list[Outcome]:
    """Runs the unit tests of a file by pytest. A test may take `limit` seconds, the file 10 * limit."""
    record, log = file.with_suffix(".xml"), file.with_suffix(".log")
    command = [*COMPAT, "-m", "pytest", "-c", os.devnull, "--timeout", str(limit), "--junit-xml", str(record)]
    run_command([*command, str(file)], log, 10 * limit, PYTHONPATH=f"{file.parent}:{ROOT}")
    if not record.exists():
        return [Outcome("(the file)", "failed", log.read_text())]
    outcomes: dict[str, Outcome] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}".lstrip(".")
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if problem is not None:
            is_skipped = problem.tag == "skipped"
            # The attribute `message` is the whole reason of a skip; the text of a failure has the traceback.
            message = problem.get("message", "") if is_skipped else (problem.text or "")
            outcomes[name] = Outcome(name, "skipped" if is_skipped else "failed", message)
        outcomes.setdefault(name, Outcome(name, "passed", ""))
    return list(outcomes.values())


def run_script(file: Path, limit: float) -> list[Outcome]:
    """Runs a script once for each entry of SCRIPTS. A run fails if a comparison prints False.

    Two comparisons of weights, "comparing bn vs sbn", do not count, as in the scripts themselves. They follow
    a step that subtracts gradients of some hundreds from weights of about 1, and so compare rounding errors.
    """
    outcomes = []
    for ranks, arguments in SCRIPTS[file.name]:
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
        )
        command = [sys.executable, *launcher, *COMPAT[1:], str(file), *arguments.split()]
        has_passed = run_command(command, log := file.with_suffix(".log"), limit)
        output = log.read_text()
        # Comparisons print "... False", and a script whose check fails prints "failed*" with stars around.
        if re.search(r"(?m)^(?!comparing bn vs sbn).* False$|failed\*", output):
            has_passed = False
        name = f"{ranks} ranks {arguments}".strip() if ranks else "1 process"
        outcomes.append(Outcome(name, "passed" if has_passed else "failed", output))
    return outcomes


def known_reason(file: str, outcome: Outcome) -> str | None:
    """Returns why a test does not pass, or None if the reason is not known."""
    text = f"{file} {outcome.test} {outcome.message}"
    for pattern, reason in KNOWN_REASONS:
        if re.search(pattern, text, re.S):
            return reason
    return "apex skips it" if outcome.state == "skipped" else None


def copy_tests(apex: Path, copy: Path) -> list[Path]:
    """Copies apex's tests, changed for the CPU; returns the files to run."""
    shutil.copytree(apex / "tests", copy)
    for package in CONTRIB:
        if (source := apex / "apex/contrib/test" / package).is_dir():
            shutil.copytree(source, copy / "contrib" / package)
    for source in copy.rglob("*.py"):
        source.write_text(replace_cuda(source.read_text()))
    (copy / "conftest.py").write_text(CONFTEST)
    (copy / SYNCBN).mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("syncbn_shim.py"), copy / SYNCBN / "syncbn.py")
    files = [f for folder in (*FOLDERS, "contrib/*") for f in sorted(copy.glob(f"{folder}/test_*.py"))]
    return [*files, *(copy / SYNCBN / name for name in SCRIPTS)]


def count_reasons(file: Path, outcomes: list[Outcome]) -> tuple[Counter[str], int]:
    """Counts why tests of a file did not pass, and those without a known reason; prints the latter."""
    reason_counts: Counter[str] = Counter()
    unexplained = 0
    for outcome in outcomes:
        if outcome.state == "passed":
            continue
        reason = known_reason(file.name, outcome)
        if reason is None:
            unexplained += 1
            reason = f"**{outcome.state}: {outcome.test}**"
            print(f"{file} {outcome.test}: {outcome.state}\n{outcome.message}", file=sys.stderr)
        reason_counts[reason] += 1
    return reason_counts, unexplained


def format_row(name: str, passed: int, total: int, reason_counts: Counter[str]) -> str:
    """Returns the row of a file or folder in the table."""
    reasons = "; ".join(f"{count} × {reason}" for reason, count in sorted(reason_counts.items()))
    return f"| {name} | {passed} | {total} | {reasons}{' ' * bool(reasons)}|"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="apex's sources, 25.05")
    parser.add_argument("--only", default="", help="run only files whose paths have this part")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one test or script")
    parser.add_argument("--out", type=Path, help="write the table of folders there too")
    args = parser.parse_args()
    if not (args.folder / "tests" / FOLDERS[0]).is_dir():
        parser.error(f"{args.folder} has no tests/{FOLDERS[0]}; give the folder of apex's sources")
    passed_by_folder, total_by_folder = Counter[str](), Counter[str]()
    reasons_by_folder: dict[str, Counter[str]] = defaultdict(Counter)
    unexplained = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "tests"
        for file in copy_tests(args.folder, copy):
            name = file.relative_to(copy)
            if args.only not in str(name):
                continue
            run = run_script if file.name in SCRIPTS else run_test_file
            outcomes = run(file, args.limit)
            reason_counts, num_unexplained = count_reasons(name, outcomes)
            passed, folder = sum(outcome.state == "passed" for outcome in outcomes), str(name.parent)
            unexplained += num_unexplained
            passed_by_folder[folder] += passed
            total_by_folder[folder] += len(outcomes)
            reasons_by_folder[folder] += reason_counts
            print(format_row(str(name), passed, len(outcomes), reason_counts), flush=True)
    lines = ["| folder | passed | of | not passed, and why |", "|---|---|---|---|"]
    lines += [
        format_row(folder, passed_by_folder[folder], total, reasons_by_folder[folder])
        for folder, total in total_by_folder.items()
    ]
    lines.append(format_row("all", passed_by_folder.total(), total_by_folder.total(), Counter()))
    print("\n".join(lines))
    if args.out:
        page = args.out.read_text() if args.out.exists() else ""
        # The section "Attributes" stays as it is: tools/apex_attributes.py writes it.
        _, heading, attributes = page.partition("\n## Attributes\n")
        args.out.write_text(PAGE.format(table="\n".join(lines)) + heading + attributes)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
