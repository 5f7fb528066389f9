"""Measures the trainer's accuracy on scikit-learn's digits with every --norm and every --amp.

    python benchmarks/bench_train.py [--ranks 2] [--only norm=torch amp=O2 ...]

A case changes one option of the trainer's default recipe. The cases take several minutes, one after another.
`--only` runs some cases; the rows of other cases remain. The exit status is 1 if an accuracy is too low.
Results go to results/train_accuracy.csv and train_accuracy.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from conditions import describe_changes, format_conditions, provenance
from harness import make_parser, markdown_table, read_csv, write_csv

from fastvit.training.config import AMP_LEVELS, NORM_NAMES, Config
from fastvit.training.nvidia_apex import import_apex

MIN_ACCURACY, MIN_ACCURACY_O3 = 0.97, 0.90  # O3 trains in half precision alone.
DEFAULT_CONFIG = Config()


def measure_accuracy(ranks: int, only: list[str], results: Path) -> list[dict]:
    """Trains with each norm, and with each level of amp. Returns a row for each case; writes the table."""
    old_rows = read_csv("train_accuracy", results) if only else []
    rows: dict[str, dict] = {f"{row['option']}={row['value']}": row for row in old_rows}
    skipped_norms = set()
    if torch.cuda.device_count() < ranks:
        skipped_norms.add("torch-sync")
    try:
        import_apex("parallel")
    except ImportError as error:
        skipped_norms.add("apex-sync")
        print(f"not measured: norm=apex-sync: {error}")
    cases = [f"norm={name}" for name in NORM_NAMES if name not in skipped_norms]
    cases += [f"amp={level}" for level in AMP_LEVELS]
    for case in only or cases:
        option, value = case.split("=")
        with tempfile.TemporaryDirectory() as folder:
            out, start = Path(folder) / "run", time.perf_counter()
            command = f"-m torch.distributed.run --standalone --nproc_per_node={ranks} -m fastvit.training"
            options = [f"--{option}", value, "--out", str(out)]
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            subprocess.run([sys.executable, *command.split(), *options], check=True, env=environment)
            seconds = time.perf_counter() - start
            last_epoch = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        min_accuracy = MIN_ACCURACY_O3 if value == "O3" else MIN_ACCURACY
        row = {"option": option, "value": value, "ranks": ranks, "epochs": last_epoch["epoch"]}
        row |= {"test_accuracy": last_epoch["test_accuracy"], "required": min_accuracy}
        row |= {"test_loss": last_epoch["test_loss"]}
        rows[case] = row | {"seconds": seconds} | provenance("cpu")
        path = write_csv("train_accuracy", list(rows.values()), results)
        path.with_suffix(".md").write_text(format_table(read_csv(path.stem, results)))
    return list(rows.values())


def format_table(rows: list[dict]) -> str:
    """Returns the table of all cases in Markdown, with the conditions of the measurement."""
    names = ("option", "value", "test_accuracy", "required", "test_loss")
    first = rows[0]
    lines = [
        *markdown_table(names, [[row[name] for name in names] for row in rows]),
        "",
        f"vit_digits on scikit-learn's digits, {first['ranks']} gloo ranks, {first['epochs']} epochs of the "
        "default recipe, the other option at its default "
        f"(--norm {DEFAULT_CONFIG.norm}, --amp {DEFAULT_CONFIG.amp}). {format_conditions(first)}. "
        f"{describe_changes('train_accuracy', rows)} "
        "On the CPU the half precision of O1 to O3 is bfloat16; --norm torch-sync trains on CUDA only; "
        "--norm apex-sync is apex 25.05's own layer, from the same initial weights.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__, None)
    parser.add_argument("--ranks", type=int, default=2, help="number of gloo ranks")
    parser.add_argument("--only", nargs="+", default=[], metavar="OPTION=VALUE", help="run these cases alone")
    options = parser.parse_args()
    rows = measure_accuracy(options.ranks, options.only, options.out)
    return 0 if all(float(row["test_accuracy"]) >= float(row["required"]) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
