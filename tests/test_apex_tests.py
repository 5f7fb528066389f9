"""tools/apex_tests.py, on a folder of tests written here."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

UNIT = """\
import unittest, time, torch
from apex import amp
from apex.optimizers import FusedAdam

class Cases(unittest.TestCase):
    def test_device(self):
        x = torch.ones(2, device="cuda").cuda()
        self.assertTrue(x.is_cuda)
        self.assertEqual(x.half().type(), "torch.cuda.HalfTensor")
        model = torch.nn.Sequential(torch.nn.Linear(2, 2)).cuda()
        seen = []
        model[0].register_forward_hook(lambda module, _, output: seen.append(output.dtype))
        amp.initialize(model, opt_level="O2", verbosity=0)(x)
        self.assertEqual(seen, [torch.half])

    @unittest.skip("two are needed")
    def test_skipped(self):
        pass

    def test_wrong(self):
        self.assertEqual(1, 2)

    def test_zzz_endless(self):
        time.sleep(1000)
"""
SCRIPT = """\
import argparse, torch, syncbn
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--apex", action="store_true")
rank = parser.parse_args().local_rank
torch.distributed.init_process_group(backend="nccl", init_method="env://")
x = torch.randn(4, 3, 5)
mean, var = syncbn.welford_mean_var(x)
close = torch.allclose(mean, x.mean((0, 2)), atol=1e-6)
print("comparing mean: ", {verdict})
print("comparing bn vs sbn weight:  False")
"""


def run(folder, *arguments):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools/apex_tests.py"), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)


def write(folder, files):
    for name, text in files.items():
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).write_text(text)


def test_unit_tests(tmp_path):
    """Passed, skipped and failed tests, and one that a time limit ended."""
    write(tmp_path, {"L0/run_amp/test_own.py": UNIT, "L0/run_amp/test_broken.py": "import not_there\n"})
    done = run(tmp_path, "--only", "run_amp", "--limit", "15", "--out", str(tmp_path / "table.md"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "| L0/run_amp/test_broken.py | 0 | 1 | 1 × **failed: test_broken** |" in lines, (
        done.stdout + done.stderr
    )
    assert (
        "| L0/run_amp/test_own.py | 1 | 4 | 1 × **failed: Cases.test_wrong**; 1 × **failed: "
        "Cases.test_zzz_endless**; 1 × apex skips it: two are needed |"
    ) in lines, done.stdout + done.stderr
    assert "No module named 'not_there'" in done.stderr and "1 != 2" in done.stderr
    assert lines[-1] == "| all | 1 | 5 | |"
    assert "\n".join(lines) in (tmp_path / "table.md").read_text()


def test_scripts(tmp_path):
    """On ranks over gloo. A comparison that is False fails the script, except for two that are ignored."""
    name = "distributed/synced_batchnorm/two_gpu_test_different_batch_size.py"
    for verdict, status in (("close", 0), ("not close", 1)):
        write(tmp_path, {name: SCRIPT.format(verdict=verdict), "L0/run_amp/README": ""})
        done = run(tmp_path, "--only", name, "--limit", "60")
        rest = "1 × **failed: 2 ranks --apex**" if status else ""
        assert done.stdout.splitlines()[0] == f"| {name} | {1 - status} | 1 | {rest} |", (
            done.stdout + done.stderr
        )
        assert done.returncode == status


def test_wrong_folder(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "has no tests/L0/run_amp" in done.stderr
