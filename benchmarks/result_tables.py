"""Formats results as tables in Markdown: results/NAME.md from results/NAME.csv."""

from pathlib import Path

from budget_curve import check_curve, order_contenders
from conditions import describe_changes, format_conditions
from harness import markdown_table, read_csv

# The columns of a CSV that identify a case, which is one line of the table.
CASE_COLUMNS = ("world", "what", "shape", "dtype", "threads", "memory_MiB", "direction")
CONVERT_NOTE = """\
peak: of a whole step, above the model and without the gradients of weights. kept: what a training forward
leaves allocated. x: the time of a step divided by torch's; on a CPU processor time. bf16 is autocast, with
cache_enabled=False for weight_casts and for budgets, which include weight_casts then. sac: selective
checkpointing of each block, which keeps matmuls, convolutions and attention; sac_half: every second matmul is
repeated too; checkpoint: of whole blocks; accumulate: two halves of the batch, one after the other, without
the gradients of weights that the second half has to hold; compiled_eager: torch.compile; compiled_convert:
torch.compile of a converted model."""
CURVE_NOTE = f"""\
{CONVERT_NOTE} Under bf16 the three kinds of checkpointing have cache_enabled=False too.
A number at the head of a column is a budget, a share of the peak; an empty cell is one that cannot be met.

![peak against time](NAME.png)"""
COPY_NOTE = """\
x: torch's time divided by this one's. of copy: the bandwidth of the bytes that must be read and written at
least, divided by that of a copy of the same size that is timed in turn. +-: the largest time of a turn less
the least, divided by the median. host: what the host spends on queueing one call. late: turns in which the
host was late, so that gaps between launches may be in the time"""
# The beginning of a result's name -> the note under its table; the first that matches counts.
TABLE_NOTES = {
    "batches": "The largest batch whose training steps with AdamW fit into memory_MiB, under bf16 autocast, "
    "by torch's allocator: the model, its gradients, AdamW's state, the batch and activations. In brackets: "
    'what `fastvit.report(model, x, memory=...).batches` says, from a batch of 8. least: budget="least". '
    "checkpoint: torch's checkpointing of whole blocks.",
    "convert": CONVERT_NOTE,
    "curve": CURVE_NOTE,
    "layers": f"{COPY_NOTE}. A batch norm's bytes are 3 passes over the activation forward and 5 backward.\n"
    "keeps: what a forward leaves allocated, in activations.",
    "ops": f"{COPY_NOTE}.",
    "host": "x: torch's time divided by this one's, each the mean of all rounds, or the least where the "
    "CSV has least_us, on tensors so small that Python and dispatch dominate.",
    "sync": "Median times of the slowest rank. `bare`: torch.distributed's collective of as many numbers. "
    "`local`: a layer without other ranks. x: in an exchange bare's time divided by this one's, in a step "
    "local's. `calls`: collectives + torch's ops, without ops inside ops, by torch's profiler. With more "
    "ranks than cores only the counts are meaningful.",
}
COLUMN_FORMATS = {  # A cell has the values of these columns, without zeros.
    "times": "{:.2f}x",
    "share_of_copy": "{:.2f} of copy",
    "spread": "+-{:.0%}",
    "kept": "keeps {:.2f}",
    "host_us": "host {:.0f} us",
    "late": "late {:.0f}",
}


def format_cell(row: dict[str, str], torch_row: dict[str, str]) -> str:
    """Returns the text of a row's numbers. A model's are relative to the eager model's, `torch_row`."""
    if row.get("batch"):
        return row["batch"] + (f" ({row['reported']})" if row["reported"] else "")
    if row.get("kept_MiB"):
        names = ("peak_MiB", "kept_MiB", "p50_us")
        peak, kept, us = (float(row[name]) for name in names)
        if row is torch_row:
            return f"peak {peak:.0f} MiB, kept {kept:.0f}, {us / 1e3:.0f} ms"
        peak, kept, us = (float(row[name]) / float(torch_row[name]) for name in names)
        bits = "" if float(row["same_bits"]) == 1 else ", other bits"
        return f"peak {peak - 1:+.1%}, kept {kept - 1:+.1%}, {us:.2f}x{bits}"
    us = float(row.get("p50_us") or row.get("mean_us") or row["least_us"])
    parts = [f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"]
    parts += [
        text.format(float(row[name])) for name, text in COLUMN_FORMATS.items() if float(row.get(name) or 0)
    ]
    parts += [f"{row['collectives']} + {row['ops']} calls"] if row.get("ops") else []
    return ", ".join(parts)


def format_table(name: str, rows: list[dict[str, str]]) -> str:
    """Returns a table with a line for each case and a column for each contender, and its notes."""
    columns = [key for key in CASE_COLUMNS if any(row.get(key) for row in rows)]
    contenders = order_contenders(dict.fromkeys(row["contender"] for row in rows))
    rows_by_case: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in rows:
        rows_by_case.setdefault(tuple(row[key] for key in columns), {})[row["contender"]] = row
    lines = [
        (*case, *(format_cell(cells[k], cells.get("torch", {})) if k in cells else "" for k in contenders))
        for case, cells in rows_by_case.items()
    ]
    first = rows[0]
    details = [f"{value} {key}" for key in ("cores", "hosts") if (value := first.get(key))]
    details += [first["instructions"]] if first.get("instructions") else []
    details += [f"a delay of {first['delay_ms']} ms between hosts"] if first.get("delay_ms") else []
    note = next(note for prefix, note in TABLE_NOTES.items() if name.startswith(prefix))
    faults = ["", *check_curve(rows)[0]] if name.startswith("curve") else []
    conditions = "; ".join(dict.fromkeys(format_conditions(row, *details) for row in rows))
    table = markdown_table([*columns, *contenders], lines)
    last_line = f"{conditions}. {describe_changes(name, rows)}".rstrip()
    return "\n".join([*table, "", note.replace("NAME", name), *faults, "", last_line, ""])


def write_table(path: Path) -> Path:
    """Writes NAME.md beside NAME.csv."""
    path.with_suffix(".md").write_text(format_table(path.stem, read_csv(path.stem, path.parent)))
    return path
