"""Measures every result of a CPU, one benchmark after the other: `make results`.

    python benchmarks/run_benchmarks.py [ops_cpu host_cpu ...] [--again] [--work runs/results]

A benchmark writes into a folder of `--work`. When it has ended, its files replace those in results/. A result
that was measured on this machine with this code and this torch is not measured again, and neither are the
models that an interrupted bench_convert.py has measured; `--again` measures after a change of a benchmark.
The program exits with 1 if a benchmark failed; the others are still measured.

FASTVIT_APEX, a folder of apex's sources, adds apex's layers. sync_hosts_cpu makes network namespaces, which
needs root.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from conditions import ROOT, current_commit, identify_measurement
from harness import RESULTS, read_csv

BENCHMARKS = {  # a result -> the command that measures it, with variables of its environment in front
    "layers_cpu": "bench_layers.py --threads 1",
    "ops_cpu": "bench_ops.py --threads 1",
    "ops_cpu_avx2": "ATEN_CPU_CAPABILITY=avx2 bench_ops.py --threads 1",
    "host_cpu": "bench_host.py",
    "sync_cpu": "bench_sync.py --world 2 4 8",
    "sync_hosts_cpu": "bench_sync.py --hosts 2 --world 4 --what exchange",
    "train_accuracy": "bench_train.py",
    "batches_cpu": "bench_batches.py",
    "curve_cpu": "bench_convert.py --curve --resume",
    "convert_cpu": "bench_convert.py --models norms --resume",
    "convert_vits_cpu": "bench_convert.py --models vits --resume",
}


def is_current(name: str, folder: Path = RESULTS) -> bool:
    """Returns whether a folder has the result, all of this machine, this torch and this code."""
    measured = {(row["device"], row["torch"], row["sources"]) for row in read_csv(name, folder)}
    return measured == {identify_measurement(name, "cpu")}


def measure(name: str, work: Path, commit: str) -> bool:
    """Runs the benchmark of a result and moves its files to results/; returns whether it has succeeded."""
    words = BENCHMARKS[name].split()
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    program, *options = words[len(variables) :]
    command = [sys.executable, str(ROOT / "benchmarks" / program), *options, "--out", str(work)]
    environment = os.environ | variables | {"FASTVIT_COMMIT": commit}
    work.mkdir(parents=True, exist_ok=True)
    with (work / "log.txt").open("a") as log:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    if status or not is_current(name, work):  # It is not current, too, if code was edited meanwhile.
        return False
    for path in work.glob(f"{name}.*"):
        shutil.copy2(path, RESULTS)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"results (default: {' '.join(BENCHMARKS)})")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/results", help="folder for logs and parts")
    parser.add_argument("--again", action="store_true", help="measure, though code and machine are the same")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark measures {' '.join(unknown)}; the results are {' '.join(BENCHMARKS)}")
    commit, failed = current_commit(), []
    for name in options.names or BENCHMARKS:
        begin, work = time.monotonic(), options.work.resolve() / name
        if options.again:
            shutil.rmtree(work, ignore_errors=True)
        if is_current(name) and not options.again:
            print(f"{name}: measured before", flush=True)
        elif measure(name, work, commit):
            print(f"{name}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        else:
            print(f"{name}: failed, see {work / 'log.txt'}", flush=True)
            failed.append(name)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
