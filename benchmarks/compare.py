"""Sets a table that was measured on a GPU beside the predictions for it, row by row; for tools/gpu.py.

The predictions are predicted_h200.csv and predicted_exchange_h200.csv of benchmarks/results, corrected for
the copy that the row's GPU reaches. Rows that differ by more than 15 % are marked `off`. Needs neither torch
nor a GPU.
"""

import csv
import math
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
OFF = 0.15  # difference from which on the model needs a correction
COSTLY = ("elu", "gelu", "gelu_tanh", "silu")  # activations of the costliest set
Key = tuple[str, ...]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def predictions(folder: Path = RESULTS) -> dict[Key, dict[str, str]]:
    found = {_op_key(row): row for row in read(folder / "predicted_h200.csv")}
    return found | {_exchange_key(row): row for row in read(folder / "predicted_exchange_h200.csv")}


def _op_key(row: dict) -> Key:
    return tuple(row.get(name, "") for name in ("op", "shape", "layout", "dtype"))


def _exchange_key(row: dict) -> Key:
    return tuple(row.get(name, "") for name in ("what", "world", "channels"))


def compared(rows: list[dict[str, str]], predicted: dict[Key, dict[str, str]]) -> list[dict]:
    """The rows of a table that are predicted: measured and predicted us, and the difference."""
    found = []
    for row in rows:
        if not row.get("contender", "fastvit.").startswith("fastvit.") or row.get("on_chip") == "0":
            continue
        us = row.get("exchange_us") or row.get("p50_us")
        key = _exchange_key(row) if "exchange_us" in row else _op_key(row)
        if key not in predicted or not us:
            continue
        costly, one = row.get("activation") in COSTLY, predicted[key]
        expected = float(one["us_costliest" if costly else "us"])
        if row.get("copy_GB_s") and "share" in one:  # the predictions' copy moves `reached` GB/s
            reached = float(one["bytes_MB"]) / float(one["us"]) / float(one["share"]) * 1e3
            expected += float(one["stream_us"]) * (reached / float(row["copy_GB_s"]) - 1)
        difference = expected / float(us) - 1 if float(us) > 0 else math.inf
        found.append({
            "row": " ".join([*key, *filter(None, [row.get("activation")])]),
            "measured_us": float(us),
            "predicted_us": expected,
            "difference": difference,
            "mark": "off" if abs(difference) > OFF else "",
        })  # fmt: skip
    return found


def lines(found: list[dict]) -> list[str]:
    """A line per row, and how many are off."""
    text = [  # the worst last
        f"{row['row']:56} {row['measured_us']:9.1f} us, predicted {row['predicted_us']:9.1f} "
        f"{row['difference']:+7.0%} {row['mark']}"
        for row in sorted(found, key=lambda row: abs(row["difference"]))
    ]
    off = sum(row["mark"] == "off" for row in found)
    return [*text, f"{len(found)} rows were predicted; {off} differ by more than {OFF:.0%}"]
