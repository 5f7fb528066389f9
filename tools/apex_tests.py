"""Runs apex's own tests against fastvit.compat on the CPU and prints what passes, as a table in markdown.

    git clone --branch 25.05 https://github.com/NVIDIA/apex /tmp/apex
    python tools/apex_tests.py /tmp/apex [--only run_amp] [--limit 900] [--out docs/apex-tests.md]

Downloads nothing. The tests are read from the folder and run by pytest from a temporary copy, in which `cuda`
is replaced by `cpu`, and a loss is computed once instead of a thousand times; half precision is float16, as
on a GPU. `apex_syncbn.py` is there for scripts that call apex's compiled module `syncbn`. Exits with 1 if a
test fails without a reason in `REASONS`. test_fused_layer_norm.py needs the package expecttest, as
torch.testing does, and onnx and onnxscript for two of its tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from gpu import ROOT, run

COMPAT = (sys.executable, "-m", "fastvit.compat", "--prefer", "fastvit", "--half", "float16")
ENVIRONMENT = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
FOLDERS = ("L0/run_amp", "L0/run_fp16util", "L0/run_optimizers", "L0/run_fused_layer_norm")
CONTRIB = ("clip_grad", "xentropy")
SYNCBN = "distributed/synced_batchnorm"

SCRIPTS = {  # a file in SYNCBN -> the ranks (0: without a launcher) and arguments of each run
    "python_single_gpu_unit_test.py": [(0, "")],
    "single_gpu_unit_test.py": [(0, "")],
    "test_batchnorm1d.py": [(0, "")],
    "two_gpu_unit_test.py": [(2, ""), (2, "--fp16"), (2, "--fp64")],
    "two_gpu_test_different_batch_size.py": [(2, "--apex")],
    "test_groups.py": [(4, "--group_size=2")],
}

TO_CPU = (
    (r"torch\.cuda\.(\w+Tensor)\b", r"torch.\1"),
    (r"torch\.cuda\.manual_seed\([^()]*\)", "None"),
    (r"torch\.cuda\.is_bf16_supported\(\)", "True"),
    (r"torch\.cuda\b", "torch.cpu"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"""(["'])cuda(:[^"']*)?\1""", '"cpu"'),
    (r"assertTrue\((\w+)\.is_cuda\)", r"assertTrue(\1.is_cpu)"),
    (r"iters = 1000?\b", "iters = 1"),  # losses of 300 million logits
    (r", device_ids=\[[^]]*\], output_device=[\w.]+", ""),
    (r"""(["'])nccl\1""", '"gloo"'),
)

REASONS = (
    (
        r"apex\.amp: fastvit has no init",
        "calls `amp.init`, which is not there; scripts call `amp.initialize`",
    ),
    (r"TestFusedAdagrad", "`FusedAdagrad` is not there; torch has `torch.optim.Adagrad`"),
    (r"update_scale_hysteresis", "`amp_C.update_scale_hysteresis` is not there"),
    (
        r"test_multi_tensor_unscale_l2norm.*torch\.Size\(\[1\]\) != torch\.Size\(\[\]\)",
        "the test compares a norm of shape `(1,)`, which apex's kernel returns too, with a number",
    ),
    (r"FP16Model", "`fp16_utils.FP16Model` is not there; scripts call `network_to_half`"),
    (r"more than 1 GPU required$", "needs two GPUs"),
    (r"Insufficient \w+ memory|psutil", "needs 60 GB of GPU memory"),
    (
        r"test_fused_optimizer\.py TestFusedSGD\.test_half ",
        "`torch.optim.SGD` rounds the momentum to half before it uses it, and is 0.0015 away after 4 steps "
        "where the test allows 0.001; in float64 the weights are 0.0009 away from both",
    ),
)
"""Why a test does not pass on the CPU: a pattern for "file test message", and the reason."""

CONFTEST = """\
import pytest, torch
from apex import optimizers

optimizers.FusedAdagrad = None  # is not there, and the class of its tests names it

@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)  # test_loss_scale_decrease and test_lamb's test_half fail for some numbers
"""

PAGE = """\
# apex's own tests

The tests of apex 25.05 for what `fastvit.compat` stands in for, run over it on the CPU with `cuda` turned
into `cpu`. `python tools/apex_tests.py FOLDER --out docs/apex-tests.md` makes this page from a folder of
apex's sources. Each test draws its numbers from one seed. A script counts once for each way that apex
calls it.

{table}
"""


def to_cpu(text: str) -> str:
    for pattern, replacement in TO_CPU:
        text = re.sub(pattern, replacement, text)
    return text


def tests_of(file: Path, limit: float) -> list[tuple[str, str, str]]:
    """(test, outcome, message) of the unit tests in a file."""
    record, log = file.with_suffix(".xml"), file.with_suffix(".log")
    command = [*COMPAT, "-m", "pytest", "-c", os.devnull, "--timeout", str(limit), "--junit-xml", str(record)]
    run([*command, str(file)], log, 10 * limit, ENVIRONMENT | {"PYTHONPATH": f"{file.parent}:{ROOT}"})
    if not record.exists():
        return [("(the file)", "failed", log.read_text())]
    ended: dict[str, tuple[str, str, str]] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}".lstrip(".")
        bad = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        if bad is not None:
            skipped = bad.tag == "skipped"
            message = bad.get("message", "") if skipped else bad.text or ""
            ended[name] = (name, "skipped" if skipped else "failed", message)
        ended.setdefault(name, (name, "passed", ""))
    return list(ended.values())


def scripts_of(file: Path, limit: float) -> list[tuple[str, str, str]]:
    """The same of a script, which fails with the first comparison that comes out False.

    The two after its step are left out, as the scripts do not count them: they take gradients of some
    hundreds from weights of about 1, and what they see is the rounding of the gradients.
    """
    rows = []
    for ranks, arguments in SCRIPTS[file.name]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
        command = [sys.executable, *launch, *COMPAT[1:], str(file), *arguments.split()]
        status = run(command, log := file.with_suffix(".log"), limit, ENVIRONMENT)
        output = log.read_text()
        bad = status != 0 or re.search(r"(?m)^(?!comparing bn vs sbn).* False$|failed\*", output)
        name = f"{ranks} ranks {arguments}".strip() if ranks else "1 process"
        rows.append((name, "failed" if bad else "passed", output))
    return rows


def reason(file: str, test: str, message: str) -> str | None:
    text = f"{file} {test} {message}"
    return next((why for pattern, why in REASONS if re.search(pattern, text, re.S)), None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="apex's sources, 25.05")
    parser.add_argument("--only", default="", help="part of the paths to run")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one test or script")
    parser.add_argument("--out", type=Path, help="write the table there too")
    args = parser.parse_args()
    tests = args.folder / "tests"
    if not (tests / FOLDERS[0]).is_dir():
        parser.error(f"{args.folder} has no tests/{FOLDERS[0]}")
    lines = ["| file | passed | of | not passed, and why |", "|---|---|---|---|"]
    unexplained = total = all_passed = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "tests"
        shutil.copytree(tests, copy)
        for part in CONTRIB:
            if (source := args.folder / "apex/contrib/test" / part).is_dir():
                shutil.copytree(source, copy / "contrib" / part)
        for source in copy.rglob("*.py"):
            source.write_text(to_cpu(source.read_text()))
        (copy / "conftest.py").write_text(CONFTEST)
        (copy / SYNCBN).mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("apex_syncbn.py"), copy / SYNCBN / "syncbn.py")
        files = [f for folder in (*FOLDERS, "contrib/*") for f in sorted(copy.glob(f"{folder}/test_*.py"))]
        files += [copy / SYNCBN / name for name in SCRIPTS]
        for file in files:
            name = str(file.relative_to(copy))
            if args.only not in name:
                continue
            rows = scripts_of(file, args.limit) if file.name in SCRIPTS else tests_of(file, args.limit)
            why: Counter[str] = Counter()
            for test, outcome, message in rows:
                if outcome == "passed":
                    continue
                known = reason(file.name, test, message)
                if known is None and outcome == "skipped":
                    known = f"apex skips it: {message}"
                if known is None:
                    unexplained += 1
                    print(f"{name} {test}: {outcome}\n{message}", file=sys.stderr)
                why[known or f"**{outcome}: {test}**"] += 1  # bold is what has no reason
            passed = sum(outcome == "passed" for _, outcome, _ in rows)
            total, all_passed = total + len(rows), all_passed + passed
            reasons = "; ".join(f"{count} × {text}" for text, count in sorted(why.items()))
            lines.append(f"| {name} | {passed} | {len(rows)} | {reasons} |")
            print(lines[-1], flush=True)
    lines.append(f"| all | {all_passed} | {total} | |")
    print(lines[-1])
    if args.out:
        before = args.out.read_text() if args.out.exists() else ""
        rest = "".join(before.partition("\n## Attributes\n")[1:])  # tools/apex_attributes.py writes it
        args.out.write_text(PAGE.format(table="\n".join(lines)) + rest)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
