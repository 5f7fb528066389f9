"""Real models before and after `fastvit.convert`: bytes kept for backward, and time of a step.

Live bytes are the allocator's, before and after one training forward. Three contenders, batch 8 at 224, fp32:
the model as it is; the same under torch.compile's partitioner, which may recompute what it likes; converted.

    python benchmarks/bench_convert.py [--models levit_256,resnet50] [--threads 2] [--repeats 7]

Needs timm (`pip install '.[models]'`). Writes results/convert_cpu.csv and convert_cpu_layers.csv, in which
rows of models that were not measured this time stay, and draws both to convert_cpu.md and .png.
"""

import argparse
import copy
import csv
import time

import harness
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

import fastvit  # noqa: E402
from fastvit.memory import live_bytes  # noqa: E402

MODELS = ("mobilevit_s", "efficientformer_l1", "efficientvit_b1", "levit_256", "tresnet_m", "resnet50")
MIB = 2**20


def kept(model, x) -> float:
    """MiB that a training forward leaves alive, once buffers made on first use exist."""
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    count, _ = live_bytes(lambda: model(x))
    return count / MIB


def step(model, x):
    model(x).square().mean().backward()
    model.zero_grad(set_to_none=True)


def compiled_kept(model, x) -> float | None:
    """The same under the partitioner that torch.compile uses, without generating code for what it chose."""
    torch._dynamo.reset()
    try:
        return kept(torch.compile(model, backend="aot_eager_decomp_partition"), x)
    except Exception as error:  # a model that does not compile is no reason to lose the other rows
        print(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def measure(name: str, arguments, where: dict) -> tuple[dict, list[dict]]:
    """A row of the table, and one per layer."""
    import timm

    torch.manual_seed(0)
    eager = timm.create_model(name).train()
    x = torch.randn(arguments.batch, 3, 224, 224)
    converted, report = fastvit.convert(copy.deepcopy(eager), example_inputs=x)
    before, after = kept(eager, x), kept(converted, x)
    partitioner = compiled_kept(copy.deepcopy(eager), x) if arguments.compile else None
    times, busy = {"eager": [], "converted": []}, {"eager": [], "converted": []}
    for _ in range(arguments.repeats):  # in turn, so that a slow minute hits both
        for contender, model in (("eager", eager), ("converted", converted)):
            start, start_busy = time.perf_counter(), time.process_time()
            step(model, x)
            times[contender].append((time.perf_counter() - start) * 1e3)
            busy[contender].append((time.process_time() - start_busy) * 1e3)
    eager_ms, converted_ms = (harness.percentiles(times[c])["p50_ms"] for c in times)
    eager_cpu, converted_cpu = (harness.percentiles(busy[c])["p50_ms"] for c in busy)
    modes = [layer.mode for layer in report]
    row = {
        "model": name,
        "batch": arguments.batch,
        "threads": torch.get_num_threads(),
        "bn_layers": len(report),
        "recompute": modes.count("recompute"),
        "inplace": modes.count("inplace"),
        "left": modes.count("left"),
        "eager_MiB": before,
        "partitioner_MiB": partitioner if partitioner is not None else "",
        "converted_MiB": after,
        "saved": 1 - after / before,
        "partitioner_saved": 1 - partitioner / before if partitioner is not None else "",
        "predicted_MiB": sum(layer.saved_bytes for layer in report) / MIB,
        "eager_ms": eager_ms,
        "converted_ms": converted_ms,
        "step_ratio": converted_ms / eager_ms,
        "cpu_ratio": converted_cpu / eager_cpu,
    }
    layers = [
        {"model": name, "layer": layer.name, "memory": layer.mode, "before_MiB": before, "after_MiB": after}
        for layer in report
        for before, after in [((layer.kept_bytes + layer.saved_bytes) / MIB, layer.kept_bytes / MIB)]
    ]
    return row | where, layers


def merged(name: str, new: list[dict]) -> list[dict]:
    """`new` and the rows that results/NAME.csv has of other models, in the order of MODELS."""
    path = harness.RESULTS / f"{name}.csv"
    old = list(csv.DictReader(path.open())) if path.exists() else []
    measured = {row["model"] for row in new}
    rows = [row for row in old if row["model"] not in measured] + new
    return sorted(rows, key=lambda row: MODELS.index(row["model"]) if row["model"] in MODELS else len(MODELS))


def table(rows: list[dict]) -> str:
    lines = [
        "| model | BN layers: rebuilt, in place, left | eager MiB | partitioner | converted | saved "
        "| step against eager | CPU time against eager |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        other = "?"
        if r["partitioner_MiB"] != "":
            other = f"{float(r['partitioner_MiB']):.0f} (-{float(r['partitioner_saved']):.1%})"
        counts = f"{r['recompute']}, {r['inplace']}, {r['left']}"
        lines.append(
            f"| {r['model']} | {counts} | {float(r['eager_MiB']):.0f} | {other} "
            f"| {float(r['converted_MiB']):.0f} | **-{float(r['saved']):.1%}** "
            f"| {float(r['step_ratio']):.2f}x | {float(r['cpu_ratio']):.2f}x |"
        )
    first = rows[0]
    lines += [
        "",
        "Bytes that one training forward leaves alive, by the allocator; "
        f"batch {first['batch']} at 224, fp32.",
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, commit {first['commit']},",
        f"{first['date']}. Steps are medians of one run, contenders in turn; CPU time is the process's,",
        "which other work on the machine disturbs less.",
        "",
        "![bytes per layer](convert_cpu.png)",
        "",
    ]
    return "\n".join(lines)


def picture(layers: list[dict], path) -> None:
    """What each BatchNorm and its activation keep, in the order of the model: before, and after."""
    models = list(dict.fromkeys(row["model"] for row in layers))
    columns = 2 if len(models) > 1 else 1
    height = -(-len(models) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(11, 2.5 * height), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    for axis, model in zip(axes.flat, models, strict=False):
        rows = [row for row in layers if row["model"] == model]
        for key, colour, label in (
            ("before_MiB", "#c9d1d9", "before"),
            ("after_MiB", "#1f77b4", "converted"),
        ):
            axis.bar(range(len(rows)), [float(r[key]) for r in rows], width=1.0, color=colour, label=label)
        axis.set_title(model, fontsize=9)
        axis.set_ylabel("MiB kept", fontsize=8)
        axis.set_xlabel("BatchNorm layer, input side first", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="names of timm models, by commas")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--name", default="convert_cpu", help="results/NAME.csv, .md, .png")
    arguments = parser.parse_args()
    harness.reuse_memory()
    torch.set_num_threads(arguments.threads)
    where = harness.provenance("cpu")
    for name in arguments.models.split(","):
        row, layers = measure(name, arguments, where)
        rows = merged(arguments.name, [row])
        layers = merged(f"{arguments.name}_layers", layers)
        harness.write_csv(arguments.name, rows)
        harness.write_csv(f"{arguments.name}_layers", layers)
        picture(layers, harness.RESULTS / f"{arguments.name}.png")
        (harness.RESULTS / f"{arguments.name}.md").write_text(table(rows))
        print(
            f"{name}: {row['eager_MiB']:.0f} -> {row['converted_MiB']:.0f} MiB (-{row['saved']:.1%}), "
            f"step {row['step_ratio']:.2f}x, CPU time {row['cpu_ratio']:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
