"""Tables of results in Markdown, and a picture of the layers'.

python benchmarks/report.py [--name layers_cpu]     of bench_layers.py
python benchmarks/report.py --name sync_cpu         of bench_sync.py
python benchmarks/report.py --name vit_ops_cpu      of bench_vit_ops.py
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from harness import command_line, markdown, place, read_csv  # noqa: E402


def table(rows: list[dict[str, str]]) -> str:
    header = "shape", "threads", "layer", "ms (p20 to p80)", "against torch", "8 passes / time"
    lines = [
        (
            *(r[name] for name in ("shape", "threads", "layer")),
            f"{float(r['p50_ms']):.2f} ({float(r['p20_ms']):.2f} to {float(r['p80_ms']):.2f})",
            f"{float(r['speedup']):.2f}x",
            f"{float(r['share_of_floor']):.2f}",
            f"{float(r['saved_activations']):.2f}",
        )
        for r in rows
    ]
    copies = [float(r["copy_GB_s"]) for r in rows]
    text = [
        *markdown((*header, "saved"), lines),
        "",
        f"Forward + backward of one layer, fp32. {place(rows[0])}, copy bandwidth "
        f"{min(copies):.0f} to {max(copies):.0f} GB/s.",
        "Activations that a forward leaves allocated.",
        "",
    ]
    return "\n".join(text)


def sync_table(rows: list[dict[str, str]]) -> str:
    first, lines = rows[0], []
    header = "ranks", "what", "C, or shape", "direction", "contender", "us (p95)", "collectives", "ops"
    for r in rows:
        ratio = f"{float(r['ratio']):.3g}"
        if r.get("apex_ratio"):
            ratio += f" ({float(r['apex_ratio']):.3g} times as fast as apex)"
        cells = [r["world"], r["what"], r.get("shape") or r["channels"], r["direction"], r["contender"]]
        cells += [f"{float(r['p50_us']):.0f} ({float(r['p95_us']):.0f})", r["collectives"], r["ops"]]
        lines.append([*cells, ratio])
    text = [
        *markdown((*header, "bare / time, or time / local"), lines),
        "",
        f"{first['threads']} thread(s) per rank; medians of the slowest rank's. "
        f"{place(first, first['cores'] + ' cores')}.",
        "`bare`: torch.distributed's collective of as many numbers and nothing else. Counts are torch's",
        "profiler's; ops are torch's, those inside others left out.",
    ]
    if first.get("hosts"):
        text.append(
            f"{first['hosts']} hosts with equal parts of the ranks; a packet between them takes "
            f"{first['delay_ms']} ms."
        )
    elif any(int(r["world"]) > int(r["cores"]) for r in rows):
        text.append(
            "More ranks than cores wait for a core most of the time: only their counts mean something."
        )
    return "\n".join(text) + "\n"


def vit_ops_table(rows: list[dict[str, str]]) -> str:
    lines = []
    for torchs, own in zip(rows[::2], rows[1::2], strict=True):
        speeds = [f"{float(r['p50_ms']):.2f} ms, {float(r['GB_s']):.1f} GB/s" for r in (torchs, own)]
        what = (own["op"], own["shape"], own["dtype"], own["direction"])
        lines.append((*what, *speeds, f"{float(own['times']):.2f}"))
    first, copies = rows[0], [float(r["copy_GB_s"]) for r in rows]
    text = [
        *markdown(("op", "shape", "dtype", "direction", "torch", "fastvit", "times as fast"), lines),
        "",
        "Processor time of the process; GB/s of what the operation has to read and write at least; a copy "
        f"moves {min(copies):.0f} to {max(copies):.0f} GB/s.",
        f"{place(first, first['threads'] + ' thread(s)')}.",
    ]
    return "\n".join(text) + "\n"


def picture(rows: list[dict[str, str]], path) -> None:
    groups = list(dict.fromkeys((r["shape"], r["threads"]) for r in rows))
    layers = list(dict.fromkeys(r["layer"] for r in rows))
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(groups) + 1.6), layout="constrained")
    height = 0.8 / len(layers)
    for i, layer in enumerate(layers):
        values = [
            next(float(r["speedup"]) for r in rows if (r["shape"], r["threads"], r["layer"]) == (*g, layer))
            for g in groups
        ]
        positions = [g + i * height for g in range(len(groups))]
        bars = axes.barh(positions, values, height, label=layer)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([g + 0.4 - height / 2 for g in range(len(groups))])
    axes.set_yticklabels([f"{shape}, {threads} thread(s)" for shape, threads in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("forward + backward, times faster than torch BatchNorm + leaky_relu(inplace=True)")
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = command_line(__doc__, None)
    parser.add_argument("--name", default="layers_cpu", help="results/NAME.csv")
    options = parser.parse_args()
    rows = read_csv(options.name, options.out)
    text = (sync_table if "world" in rows[0] else vit_ops_table if "direction" in rows[0] else table)(rows)
    if "layer" in rows[0]:
        picture(rows, options.out / f"{options.name}.png")
    (options.out / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
