"""The results of bench_ops.py as a Markdown table."""

from statistics import median

from harness import markdown

PASSES = ("forward", "backward", "both")
COLUMNS = (
    "shape", "layout", "dtype", "threads", "layer", "forward us", "backward us", "both us (p20 to p80)",
    "against torch", "8 passes / time",
)  # fmt: skip


def _is_op(row: dict) -> bool:
    return row["op"] not in PASSES


def _case(row: dict) -> tuple[str, str, str, int | str]:
    return row["shape"], row["layout"], row["dtype"], row["threads"]


def _layers(rows: list[dict]) -> list[tuple]:
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if not _is_op(row):
            found.setdefault((*_case(row), row["contender"]), {})[row["op"]] = row
    lines = []
    for key, by_pass in sorted(found.items(), key=lambda item: list(map(_case, rows)).index(item[0][:4])):
        forward, backward, both = (by_pass[op] for op in PASSES)
        torch_both = found.get((*key[:4], "torch"), {}).get("both")
        lines.append((
            *key,
            f"{forward['p50_us']:.1f}",
            f"{backward['p50_us']:.1f}",
            f"{both['p50_us']:.1f} ({both['p20_us']:.1f} to {both['p80_us']:.1f})",
            f"{torch_both['p50_us'] / both['p50_us']:.2f}x" if torch_both else "",
            f"{both['share_of_copy']:.2f}",
        ))  # fmt: skip
    return lines


def _ops(rows: list[dict]) -> list[tuple]:
    """Time and bandwidth, one line per case and one column per op, with torch's where it was measured."""
    names = list(dict.fromkeys(row["op"] for row in rows if _is_op(row)))
    by_case: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if _is_op(row):
            text = f"{row['p50_us']:.1f}, {row['GB_s']:.0f} GB/s ({row['share_of_copy']:.2f})"
            found = by_case.setdefault(_case(row), {})
            torchs = row["contender"].startswith("torch") and row["op"] in found
            found[row["op"]] = f"{found[row['op']]}; torch {row['p50_us']:.1f}" if torchs else text
    lines = [(*case, *(ops.get(name, "") for name in names)) for case, ops in by_case.items()]
    return markdown(("shape", "layout", "dtype", "threads", *names), lines) if lines else []


def table(rows: list[dict]) -> str:
    """Markdown: place of the measurement, layers, raw ops."""
    first, copy = rows[0], median(row["copy_GB_s"] for row in rows)
    place = f"{first['device']}, {first['instructions']}, torch {first['torch']}, commit {first['commit']}"
    lines = [
        f"{place}, {first['date']}. Copy bandwidth {copy:.0f} GB/s.",
        "",
        "Layers, medians. `8 passes / time`: what a step reads and writes, over its time, as a share of the",
        "copy bandwidth.",
        "",
        *markdown(COLUMNS, _layers(rows)),
        "",
        "Raw ops, medians in us, GB/s (share of the copy bandwidth); torch's functions for the same work:",
        "",
        *_ops(rows),
        "",
    ]
    return "\n".join(lines)
