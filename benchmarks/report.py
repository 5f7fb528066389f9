"""Results as tables in Markdown.

python benchmarks/report.py [NAME ...]     writes results/NAME.md from NAME.csv, or all of them
"""

from pathlib import Path

from budget_curve import check_curve, order_contenders
from harness import command_line, conditions, markdown, read_csv

KEYS = ("world", "what", "shape", "dtype", "threads", "direction")
CONVERTED = """\
peak: of a whole step, above the model and without the gradients of weights. kept: what a training forward
leaves allocated. x: the time of a step divided by torch's; on a CPU processor time. bf16 is autocast, with
cache_enabled=False for weight_casts and for budgets, which include weight_casts then. sac: selective
checkpointing of each block, which keeps products, convolutions and attention; sac_half: every second product
is repeated too; checkpoint: of whole blocks."""
CURVE = f"""\
{CONVERTED} Under bf16 these three have cache_enabled=False too.
A number at the head of a column is a budget, a share of the peak; an empty cell is one that cannot be met.

![peak against time](NAME.png)"""
COPIED = """\
x: torch's time divided by this one's. of copy: the bandwidth of the bytes that must be read and written at
least, divided by that of a copy of the same size that is timed in turn. +-: the largest time of a turn less
the least, divided by the median. host: what the host spends on queueing one call. late: turns in which the
host was late, so that gaps between launches may be in the time"""
WORDS = {
    "convert": CONVERTED,
    "curve": CURVE,
    "layers": f"{COPIED}. A batch norm's bytes are 3 passes over the activation forward and 5 backward.\n"
    "keeps: what a forward leaves allocated, in activations.",
    "ops": f"{COPIED}.",
    "host": "x: torch's time divided by this one's, each the mean of all rounds, or the least where the "
    "CSV has least_us, on tensors so small that Python and dispatch dominate.",
    "sync": "Median times of the slowest rank. `bare`: torch.distributed's collective of as many numbers. "
    "`local`: a layer without other ranks. x: in an exchange bare's time divided by this one's, in a step "
    "local's. `calls`: collectives + torch's ops, without ops inside ops, by torch's profiler. With more "
    "ranks than cores only the counts are meaningful.",
}
SHOWN = {
    "times": "{:.2f}x",
    "share_of_copy": "{:.2f} of copy",
    "spread": "+-{:.0%}",
    "kept": "keeps {:.2f}",
    "host_us": "host {:.0f} us",
    "late": "late {:.0f}",
}


def cell(row: dict[str, str], torchs: dict[str, str]) -> str:
    """Time, and what else was measured; for a converted model beside the eager one's."""
    if row.get("kept_MiB"):
        names = ("peak_MiB", "kept_MiB", "p50_us")
        peak, kept, us = (float(row[name]) for name in names)
        if row is torchs:
            return f"peak {peak:.0f} MiB, kept {kept:.0f}, {us / 1e3:.0f} ms"
        peak, kept, us = (float(row[name]) / float(torchs[name]) for name in names)
        bits = "" if float(row["same_bits"]) == 1 else ", other bits"
        return f"peak {peak - 1:+.1%}, kept {kept - 1:+.1%}, {us:.2f}x{bits}"
    us = float(row.get("p50_us") or row.get("mean_us") or row["least_us"])
    parts = [f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"]
    parts += [form.format(float(row[name])) for name, form in SHOWN.items() if float(row.get(name) or 0)]
    parts += [f"{row['collectives']} + {row['ops']} calls"] if row.get("ops") else []
    return ", ".join(parts)


def table(name: str, rows: list[dict[str, str]]) -> str:
    """A line for each thing that was measured, with a column for each contender."""
    keys = [key for key in KEYS if any(row.get(key) for row in rows)]
    contenders = order_contenders(dict.fromkeys(row["contender"] for row in rows))
    measured: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in rows:
        measured.setdefault(tuple(row[key] for key in keys), {})[row["contender"]] = row
    cells = [
        (*of, *(cell(found[one], found.get("torch", {})) if one in found else "" for one in contenders))
        for of, found in measured.items()
    ]
    first = rows[0]
    more = [f"{value} {key}" for key in ("cores", "hosts") if (value := first.get(key))]
    more += [first["instructions"]] if first.get("instructions") else []
    more += [f"a delay of {first['delay_ms']} ms between hosts"] if first.get("delay_ms") else []
    words = next(words for kind, words in WORDS.items() if name.startswith(kind))
    faults = ["", *check_curve(rows)[0]] if name.startswith("curve") else []
    measured_on = dict.fromkeys(conditions(row, *more) for row in rows)
    lines = markdown([*keys, *contenders], cells)
    return "\n".join([*lines, "", words.replace("NAME", name), *faults, "", f"{'; '.join(measured_on)}.", ""])


def write_table(path: Path) -> Path:
    """Writes NAME.md beside NAME.csv."""
    path.with_suffix(".md").write_text(table(path.stem, read_csv(path.stem, path.parent)))
    return path


def main() -> None:
    parser = command_line(__doc__, None)
    parser.add_argument("names", nargs="*", help="of results, as ops_cpu (default: all)")
    options = parser.parse_args()
    names = options.names or sorted(
        path.stem for path in options.out.glob("*.csv") if path.stem.startswith(tuple(WORDS))
    )
    for name in names:
        print(write_table(options.out / f"{name}.csv").with_suffix(".md"))


if __name__ == "__main__":
    main()
