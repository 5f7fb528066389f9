"""The trainer: its images/s against a bare loop, and the accuracy of every --norm and --amp on digits.

    python benchmarks/bench_train.py overhead [--ranks 2] [--epochs 12]
    python benchmarks/bench_train.py accuracy [--ranks 2] [--only norm=torch amp=O2 ...]

`overhead` runs both loops in the same processes, an epoch of each in turn, over the same model, data and
augmentation; it reports the median over the epochs. `accuracy` trains with the default recipe, one case after
another, and takes several minutes; `--only` runs a part, and the other rows remain.
Results go to results/train_overhead.csv, train_accuracy.csv and train_accuracy.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from harness import RESULTS, markdown, provenance, read_csv, write_csv
from torch.utils.data import DistributedSampler

from fastvit.models import vit_digits
from fastvit.sync.teardown import destroy_process_group
from fastvit.training import datasets, distributed, loaders, loop, train_state, watch
from fastvit.training.config import ALL_NORMS, AMP_LEVELS, Config
from fastvit.training.datasets import random_shift
from fastvit.training.engine import import_apex
from fastvit.training.launch import find_launch
from fastvit.training.watch import StopRequest

REQUIRED = {"overhead": 0.95, "accuracy": 0.97, "O3": 0.90}
DEFAULT = Config()


def bare_epoch(model, data, sampler, optimizer, epoch: int) -> int:
    """A minimal training loop; returns the number of images."""
    sampler.set_epoch(epoch)
    order = torch.tensor(list(sampler))
    generator = torch.Generator().manual_seed(epoch)
    model.train()
    batches = order[: len(order) // DEFAULT.batch_size * DEFAULT.batch_size].split(DEFAULT.batch_size)
    for indices in batches:
        images = random_shift(data.train.images[indices], 1, generator, datasets.BACKGROUND)
        loss = F.cross_entropy(model(images), data.train.labels[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return len(batches) * DEFAULT.batch_size


def compare_loops(epochs: int) -> list[dict]:
    """On every rank: images/s of both loops, an epoch of each in turn, without the first epochs."""
    ranks = distributed.init(find_launch(), "cpu")
    torch.set_num_threads(distributed.own_cores())
    data = datasets.load_digits(0)
    torch.manual_seed(0)
    # Buffers need no broadcast, as the layers agree on them; the trainer leaves it out too.
    bare = vit_digits()
    optimizer = train_state.make_optimizer(bare, DEFAULT.optimizer, DEFAULT.lr, DEFAULT.weight_decay)
    bare = train_state.data_parallel(bare, DEFAULT, ranks)
    sampler = DistributedSampler(data.train.labels, ranks.world, ranks.rank, seed=0)
    batches, keys = loaders.make_train_loader(data.train, DEFAULT, ranks)
    trainer = train_state.make_train_state(vit_digits(), DEFAULT, ranks, (1, 8, 8), len(batches), None)
    rates: dict[str, list[float]] = {"bare loop": [], "fastvit-train": []}
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        images = bare_epoch(bare, data, sampler, optimizer, epoch) * ranks.world
        rates["bare loop"].append(images / (time.perf_counter() - start))
        keys.set_epoch(epoch)
        result = loop.train_one_epoch(trainer, batches, data.shape, epoch, watch.Progress(), StopRequest())
        rates["fastvit-train"].append(result.images / result.seconds)
    share = median(b / a for a, b in list(zip(*rates.values(), strict=True))[1:])
    where = {"model": "vit_digits", "ranks": ranks.world, "threads": torch.get_num_threads()}
    rows = [
        where
        | {"loop": name, "images_s": median(values[1:]), "of_bare": share if name != "bare loop" else 1.0}
        for name, values in rates.items()
    ]
    if ranks.rank == 0:
        write_csv("train_overhead", [row | provenance("cpu") for row in rows])
        print(json.dumps(rows, indent=1))
        print(f"fastvit-train has {share:.3f} of the bare loop's images/s; {REQUIRED['overhead']} required")
    del bare, optimizer, trainer, sampler, batches, keys
    destroy_process_group()
    return rows


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([*command, *arguments], check=True, env=environment)


def measure_accuracy(ranks: int, only: list[str]) -> list[dict]:
    """Train with each norm, and with each precision; one row each."""
    before = read_csv("train_accuracy") if only else []
    rows: dict[str, dict] = {f"{row['option']}={row['value']}": row for row in before}
    left_out = set()
    if torch.cuda.device_count() < ranks:
        left_out.add("torch-sync")
    try:
        import_apex("parallel")
    except ImportError as error:
        left_out.add("apex-sync")
        print(f"not measured: norm=apex-sync: {error}")
    cases = [f"norm={name}" for name in ALL_NORMS if name not in left_out]
    cases += [f"amp={level}" for level in AMP_LEVELS]
    for case in only or cases:
        option, value = case.split("=")
        with tempfile.TemporaryDirectory() as folder:
            out, start = Path(folder) / "run", time.perf_counter()
            torchrun(ranks, "-m", "fastvit.training", f"--{option}", value, "--out", str(out))
            seconds = time.perf_counter() - start
            last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        required = REQUIRED["O3" if value == "O3" else "accuracy"]
        rows[case] = {
            "option": option, "value": value, "ranks": ranks, "epochs": last["epoch"],
            "test_accuracy": last["test_accuracy"], "required": required,
            "test_loss": last["test_loss"], "seconds": seconds, **provenance("cpu"),
        }  # fmt: skip
        write_csv("train_accuracy", list(rows.values()))
        (RESULTS / "train_accuracy.md").write_text(table(list(rows.values())))
    print(table(list(rows.values())))
    return list(rows.values())


def table(rows: list[dict]) -> str:
    cells = [
        (
            f"--{row['option']} {row['value']}",
            f"{float(row['test_accuracy']):.3f}",
            row["required"],
            f"{float(row['test_loss']):.4f}",
        )
        for row in rows
    ]
    first = rows[0]
    lines = [
        *markdown(("option", "test accuracy", "required", "test loss"), cells),
        "",
        f"vit_digits on scikit-learn's digits, {first['ranks']} gloo ranks, {first['epochs']} epochs of the "
        f"default recipe, the other option at its default (--norm {DEFAULT.norm}, --amp {DEFAULT.amp}). "
        f"{first['device']}, torch {first['torch']}, commit {first['commit']}, {first['date']}. On the CPU "
        f"the half precision of O1 to O3 is bfloat16; --norm torch-sync trains on CUDA only; --norm "
        f"apex-sync is apex 25.05's own layer, from the same initial weights.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "accuracy"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12, help="of each loop, for overhead")
    parser.add_argument("--only", nargs="+", default=[], metavar="OPTION=VALUE", help="for accuracy")
    options = parser.parse_args()
    if options.what == "accuracy":
        rows = measure_accuracy(options.ranks, options.only)
        return 0 if all(float(row["test_accuracy"]) >= float(row["required"]) for row in rows) else 1
    if "RANK" not in os.environ and options.ranks > 1:
        torchrun(options.ranks, __file__, "overhead", "--epochs", str(options.epochs))
        return 0
    compare_loops(options.epochs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
