"""The results of bench_ops.py as a Markdown table."""

from statistics import median

from harness import markdown

CASE = ("shape", "layout", "dtype", "threads")
COLUMNS = (*CASE, "layer", "forward us", "backward us", "both us (p20 to p80)")
COLUMNS += ("against torch", "8 passes / time")


def _layers(rows: list[dict]) -> list[tuple]:
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in (*CASE, "contender")), {})[row["op"]] = row
    lines = []
    for key, by_pass in found.items():
        both, torchs = by_pass["both"], found[(*key[:-1], "torch")]["both"]
        cells = [f"{by_pass[one]['p50_us']:.1f}" for one in ("forward", "backward")]
        cells.append(f"{both['p50_us']:.1f} ({both['p20_us']:.1f} to {both['p80_us']:.1f})")
        cells += [f"{torchs['p50_us'] / both['p50_us']:.2f}x", f"{both['share_of_copy']:.2f}"]
        lines.append((*key, *cells))
    return lines


def _ops(rows: list[dict]) -> list[str]:
    """Time and bandwidth, one line per case and one column per op, with torch's where it was measured."""
    names = list(dict.fromkeys(row["op"] for row in rows))
    by_case: dict[tuple, dict[str, str]] = {}
    for row in rows:
        text = f"{row['p50_us']:.1f}, {row['GB_s']:.0f} GB/s ({row['share_of_copy']:.2f})"
        found = by_case.setdefault(tuple(row[name] for name in CASE), {})
        torchs = row["contender"].startswith("torch") and row["op"] in found
        found[row["op"]] = f"{found[row['op']]}; torch {row['p50_us']:.1f}" if torchs else text
    lines = [(*case, *(ops.get(name, "") for name in names)) for case, ops in by_case.items()]
    return markdown((*CASE, *names), lines)


def table(rows: list[dict]) -> str:
    """Markdown: layers, raw ops, and the place of the measurement."""
    first, copy = rows[0], median(row["copy_GB_s"] for row in rows)
    place = f"{first['device']}, {first['instructions']}, torch {first['torch']}, commit {first['commit']}"
    passes = ("forward", "backward", "both")
    lines = [
        f"{place}, {first['date']}. Copy bandwidth {copy:.0f} GB/s.",
        "",
        "Layers, medians. `8 passes / time`: what a step reads and writes, over its time, as a share of the",
        "copy bandwidth.",
        "",
        *markdown(COLUMNS, _layers([row for row in rows if row["op"] in passes])),
        "",
        "Raw ops, medians in us, GB/s (share of the copy bandwidth); torch's functions for the same work:",
        "",
        *_ops([row for row in rows if row["op"] not in passes]),
        "",
    ]
    return "\n".join(lines)
