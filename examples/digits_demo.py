"""Train one small ViT on scikit-learn's digits by apex's recipe, twice, and write a page about it.

    python examples/digits_demo.py

The main run has `InPlaceABNSync`, amp, DistributedDataParallel and FusedAdam over two ranks (one per GPU
where there are GPUs), and shows its progress. The same model and recipe with apex's SyncBatchNorm follow:
that of NVIDIA apex where it is installed, else that of `fastvit.compat`. All of it goes into `runs/demo`:
for each run TensorBoard events, metrics and the last checkpoint, and `index.html` with the pictures. The
last line is `test accuracy 0.9xx` of the main run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from demo_page import Result, write_page

import fastvit
from fastvit.models import vit_digits
from fastvit.training.config import Config, ConfigError, check_packages
from fastvit.training.datasets import load_digits
from fastvit.training.nvidia_apex import import_apex

MAIN = "inplace-abn-sync"
MEASURED = ("torch", "fastvit-sync", "inplace-abn", MAIN)  # bytes kept for backward
EPOCHS = 12
BATCH = 32  # images per rank
REQUIRED_ACCURACY = 0.97
RUN_LIMIT = 900  # seconds after which a run counts as hung


def kept_bytes(images: torch.Tensor) -> dict[str, int]:
    """What the model keeps for backward: with each norm, and with torch's converted by fastvit.convert."""
    kept = {norm: fastvit.report(vit_digits(norm), images).kept_before for norm in MEASURED}
    for memory in ("convert", "products"):
        model = fastvit.convert(vit_digits("torch"), matmuls=memory == "products")
        kept[memory] = fastvit.report(model, images).kept_after
    return kept


def apex_norm() -> str:
    """The trainer's name of apex's SyncBatchNorm or, without apex, of fastvit.compat's."""
    try:
        import_apex("parallel")
        return "apex-sync"
    except ImportError:
        return "fastvit-sync"


def amp_level() -> str:
    """O1, or O0 on a CPU that emulates bfloat16, which takes 30 times as long."""
    return "O1" if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() else "O0"


def train(norm: str, ranks: int, epochs: int, threads: int, out: Path) -> Result:
    """One training run in processes of its own; the main one shows its progress, the other has a log."""
    level = amp_level()
    launcher = f"torch.distributed.run --standalone --nproc_per_node={ranks} -m " if ranks > 1 else ""
    recipe = f"--norm {norm} --amp {level} --optimizer fused-adam --epochs {epochs} --batch-size {BATCH}"
    command = f"python -m {launcher}fastvit.training {recipe} --threads {threads} --out {norm}"
    # torchrun warns about an unset OMP_NUM_THREADS; the trainer sets the number of threads itself.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    with open(os.devnull if norm == MAIN else out / f"{norm}.log", "w") as log:
        to = {} if norm == MAIN else {"stdout": log, "stderr": subprocess.STDOUT}
        # cwd: so that the installed package is imported, not a source tree in the current directory.
        words = [sys.executable, *command.split()[1:]]
        done = subprocess.run(words, cwd=out, env=environment, timeout=RUN_LIMIT, **to)
    if done.returncode:
        where = "above" if norm == MAIN else f"in {log.name}"
        sys.exit(f"digits_demo: {command} failed with status {done.returncode}; its output is {where}")
    seconds = time.perf_counter() - start
    history = [json.loads(row) for row in (out / norm / "metrics.jsonl").read_text().splitlines()]
    result = Result(norm, level, command, ranks, seconds, history)
    print(f"{norm}: test accuracy {result.accuracy:.3f}, {seconds:.0f} s", flush=True)
    return result


def clear(out: Path) -> None:
    """Remove the results of earlier runs of the demo, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for norm in ("apex-sync", *MEASURED):
        if (out / norm / "metrics.jsonl").is_file():
            shutil.rmtree(out / norm)
    (out / "index.html").unlink(missing_ok=True)


def compare(out: Path, epochs: int, ranks: int, quick: bool) -> list[Result]:
    """Train with InPlaceABNSync, then with apex's SyncBatchNorm."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    first = train(MAIN, ranks, epochs, threads, out)
    return [first, train(apex_norm(), 1 if quick else ranks, epochs, threads, out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs of each run (default {EPOCHS})")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default runs/demo")
    parser.add_argument("--quick", action="store_true", help="a test: the other run on one rank")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    out = options.out.resolve()
    start = time.perf_counter()
    try:
        check_packages(Config())
    except ConfigError as error:
        sys.exit(f"digits_demo: {error}")
    gpus = torch.cuda.device_count()
    ranks = gpus or 2
    where = "CUDA" if gpus else "the CPU: about a minute on two free cores"
    print(
        f"digits_demo: measures what a ViT keeps for backward, then trains it with {MAIN} and with apex's "
        f"SyncBatchNorm: {options.epochs} epochs each, {ranks} rank(s), {where}",
        flush=True,
    )
    clear(out)
    kept = kept_bytes(load_digits(0).train.images[:BATCH])
    results = compare(out, options.epochs, ranks, options.quick)
    for name, found in (("summary.json", [asdict(result) for result in results]), ("memory.json", kept)):
        (out / name).write_text(json.dumps(found, indent=2) + "\n")
    page = write_page(out / "index.html", results, kept, BATCH)
    accuracy = results[0].accuracy
    if accuracy < REQUIRED_ACCURACY and not options.quick:
        sys.exit(f"digits_demo: test accuracy {accuracy:.3f} of {MAIN} is below {REQUIRED_ACCURACY}: {page}")
    print(f"all runs: {time.perf_counter() - start:.0f} s")
    print(f"TensorBoard: tensorboard --logdir {out}")
    print(f"page: {page}")
    print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
