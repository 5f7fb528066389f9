"""Trains one small ViT on scikit-learn's digits by apex's recipe, twice, and writes a page about the runs.

    python examples/digits_demo.py

The main run has `InPlaceABNSync`, amp, DistributedDataParallel and FusedAdam over two ranks (one per GPU if
there are GPUs), and shows its progress. The second run has the same model and recipe with SyncBatchNorm: from
NVIDIA apex if apex is installed, else from `fastvit.compat`. The results go into `runs/demo`:
TensorBoard events, metrics and the last checkpoint of each run, and the page `index.html`. The last
line of the output is `test accuracy 0.9xx` of the main run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_page import LAYERS, LayerCost, Result, write_page
from torch import Tensor, nn

import fastvit
from fastvit.models import vit_digits
from fastvit.training.config import Config, ConfigError, check_packages
from fastvit.training.datasets import load_digits
from fastvit.training.nvidia_apex import import_apex

MAIN_NORM = "inplace-abn-sync"
EPOCHS = 12
BATCH_SIZE = 32  # images per rank
MIN_ACCURACY = 0.97  # of the main run on test images
MAX_RUN_SECONDS = 900  # A run that takes longer counts as hung.
TIMING_SECONDS = 2.5  # for the training steps of all models together
WARM_UP_ROUNDS, MIN_ROUNDS = 2, 5


def create_model(name: str) -> nn.Module:
    """Returns the model with the layer of this name in LAYERS: a norm, or torch's in a converted model."""
    if name not in ("convert", "matmuls"):
        return vit_digits(name)
    return fastvit.convert(vit_digits("torch"), matmuls=name == "matmuls")


def measure_bytes(images: Tensor) -> tuple[dict[str, tuple[int, int]], dict[str, list[int]]]:
    """Returns the kept bytes and the peak of a step for each of LAYERS, and timelines of torch's model."""
    reports = {name: fastvit.report(create_model(name), images) for name in LAYERS if name != "convert"}
    nbytes = {name: (report.kept_before, report.peak_before) for name, report in reports.items()}
    # A report also measures the converted model. It converts torch's itself.
    for name, source in (("convert", "torch"), ("matmuls", "matmuls")):
        nbytes[name] = (reports[source].kept_after, reports[source].peak_after)
    return nbytes, reports["torch"].timelines


def measure_time_ratios(images: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns the time of a training step for each of LAYERS, as a ratio to the time of torch's model.

    A round has one step of each model in turn; a ratio is the median over rounds. Steps run in this process,
    on the CPU, in fp32. Their time is the processor's, which other programs hardly lengthen.
    """
    models = {name: create_model(name) for name in LAYERS}
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + TIMING_SECONDS
    while len(rounds) < WARM_UP_ROUNDS + MIN_ROUNDS or time.perf_counter() < end:
        seconds = {}
        for name, model in models.items():
            start = time.process_time()
            F.cross_entropy(model(images), labels).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name] = time.process_time() - start
        rounds.append(seconds)
    timed = rounds[WARM_UP_ROUNDS:]
    return {name: statistics.median(row[name] / row["torch"] for row in timed) for name in LAYERS}


def measure_costs(images: Tensor, labels: Tensor) -> tuple[dict[str, LayerCost], dict[str, list[int]]]:
    """Returns the cost of a training step for each of LAYERS, and the timelines of torch's model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Several threads would wait for each other on a busy machine.
    nbytes, timelines = measure_bytes(images)
    ratios = measure_time_ratios(images, labels)
    torch.set_num_threads(threads)
    return {name: LayerCost(*nbytes[name], ratios[name]) for name in LAYERS}, timelines


def find_apex_norm() -> str:
    """Returns the trainer's name of apex's SyncBatchNorm or, without apex, of fastvit.compat's."""
    try:
        import_apex("parallel")
        return "apex-sync"
    except ImportError:
        return "fastvit-sync"


def choose_amp_level() -> str:
    """Returns O1, or O0 on a CPU that emulates bfloat16, which takes 30 times as long."""
    return "O1" if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() else "O0"


def train(norm: str, ranks: int, epochs: int, threads: int, out: Path) -> Result:
    """Trains in new processes. The main run shows its progress; the second run writes a log."""
    level = choose_amp_level()
    launcher = f"torch.distributed.run --standalone --nproc_per_node={ranks} -m " if ranks > 1 else ""
    recipe = f"--norm {norm} --amp {level} --optimizer fused-adam --epochs {epochs} --batch-size {BATCH_SIZE}"
    command = f"python -m {launcher}fastvit.training {recipe} --threads {threads} --out {norm}"
    # torchrun warns about an unset OMP_NUM_THREADS; the trainer sets the number of threads itself.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    with open(os.devnull if norm == MAIN_NORM else out / f"{norm}.log", "w") as log:
        streams = {} if norm == MAIN_NORM else {"stdout": log, "stderr": subprocess.STDOUT}
        # With this cwd the installed package is imported, and no source tree in the current directory.
        words = [sys.executable, *command.split()[1:]]
        run = subprocess.run(words, cwd=out, env=environment, timeout=MAX_RUN_SECONDS, **streams)
    if run.returncode:
        place = "above" if norm == MAIN_NORM else f"in {log.name}"
        sys.exit(f"digits_demo: {command} failed with status {run.returncode}; its output is {place}")
    seconds = time.perf_counter() - start
    history = [json.loads(row) for row in (out / norm / "metrics.jsonl").read_text().splitlines()]
    result = Result(norm, level, command, ranks, seconds, history)
    print(f"{norm}: test accuracy {result.accuracy:.3f}, {seconds:.0f} s", flush=True)
    return result


def remove_old_results(out: Path) -> None:
    """Removes the results of earlier calls of the demo, and nothing else from `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for norm in ("apex-sync", "fastvit-sync", MAIN_NORM):
        if (out / norm / "metrics.jsonl").is_file():
            shutil.rmtree(out / norm)
    (out / "index.html").unlink(missing_ok=True)


def train_both(out: Path, epochs: int, ranks: int, quick: bool) -> list[Result]:
    """Trains with InPlaceABNSync, then with apex's SyncBatchNorm."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    main_result = train(MAIN_NORM, ranks, epochs, threads, out)
    return [main_result, train(find_apex_norm(), 1 if quick else ranks, epochs, threads, out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs of each run (default {EPOCHS})")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default runs/demo")
    parser.add_argument("--quick", action="store_true", help="test the demo: the second run has one rank")
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
    place = "CUDA" if gpus else "the CPU: about a minute on two free cores"
    print(
        f"digits_demo: measures memory and time of a ViT's training step, then trains it with {MAIN_NORM} "
        f"and with apex's SyncBatchNorm: {options.epochs} epochs each, {ranks} rank(s), {place}",
        flush=True,
    )
    remove_old_results(out)
    data = load_digits(0).train
    costs, timelines = measure_costs(data.images[:BATCH_SIZE], data.labels[:BATCH_SIZE])
    results = train_both(out, options.epochs, ranks, options.quick)
    memory = {"layers": {name: asdict(cost) for name, cost in costs.items()}, "timelines": timelines}
    for name, value in (("summary.json", [asdict(result) for result in results]), ("memory.json", memory)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    page = write_page(out / "index.html", results, costs, timelines, BATCH_SIZE)
    accuracy = results[0].accuracy
    if accuracy < MIN_ACCURACY and not options.quick:
        sys.exit(f"digits_demo: test accuracy {accuracy:.3f} of {MAIN_NORM} is below {MIN_ACCURACY}: {page}")
    print(f"all runs: {time.perf_counter() - start:.0f} s")
    print(f"TensorBoard: tensorboard --logdir {out}")
    print(f"page: {page}")
    print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
