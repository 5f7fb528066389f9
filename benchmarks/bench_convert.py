"""Real models before and after `fastvit.convert`: bytes kept for backward, and time of a step.

Live bytes are the allocator's, before and after one training forward. Three contenders, batch 8 at 224, fp32:
the model as it is; the same under torch.compile's partitioner, which may recompute what it likes; converted.

    python benchmarks/bench_convert.py [--models levit_256,resnet50] [--threads 2] [--repeats 7]

Needs timm (`pip install '.[models]'`). Writes results/convert_cpu.csv, .md and .png.
"""

import argparse
import copy

import harness
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from memory import live_bytes  # noqa: E402

import fastvit  # noqa: E402

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


def measure(name: str, arguments, where: dict) -> tuple[dict, fastvit.conversion.Report]:
    import timm

    torch.manual_seed(0)
    eager = timm.create_model(name).train()
    x = torch.randn(arguments.batch, 3, 224, 224)
    converted, report = fastvit.convert(copy.deepcopy(eager), example_inputs=x)
    before, after = kept(eager, x), kept(converted, x)
    partitioner = compiled_kept(copy.deepcopy(eager), x) if arguments.compile else None
    timer = harness.Timer("cpu")
    times = {"eager": [], "converted": []}
    for _ in range(arguments.repeats):  # in turn, so that a slow minute hits both
        for contender, model in (("eager", eager), ("converted", converted)):
            times[contender].append(timer(lambda model=model: step(model, x)))
    eager_ms, converted_ms = (harness.percentiles(times[c])["p50_ms"] for c in times)
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
        "predicted_MiB": report.saved_bytes / MIB,
        "eager_ms": eager_ms,
        "converted_ms": converted_ms,
        "step_ratio": converted_ms / eager_ms,
    }
    return row | where, report


def table(rows: list[dict]) -> str:
    lines = [
        "| model | BN layers: rebuilt, in place, left | eager MiB | partitioner | converted | saved "
        "| step against eager |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        compiled = r["partitioner_MiB"] != ""
        other = f"{r['partitioner_MiB']:.0f} (-{r['partitioner_saved']:.1%})" if compiled else "?"
        counts = f"{r['recompute']}, {r['inplace']}, {r['left']}"
        lines.append(
            f"| {r['model']} | {counts} | {r['eager_MiB']:.0f} | {other} | {r['converted_MiB']:.0f} "
            f"| **-{r['saved']:.1%}** | {r['step_ratio']:.2f}x |"
        )
    first = rows[0]
    lines += [
        "",
        "Bytes that one training forward leaves alive, by the allocator; "
        f"batch {first['batch']} at 224, fp32.",
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, commit {first['commit']},",
        f"{first['date']}. Steps are medians of one run, contenders in turn.",
        "",
        "![bytes per layer](convert_cpu.png)",
        "",
    ]
    return "\n".join(lines)


def picture(reports: dict, path) -> None:
    """What each BatchNorm and its activation keep, in the order of the model: before, and after."""
    columns = 2 if len(reports) > 1 else 1
    rows = -(-len(reports) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.5 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(reports) :]:
        axis.set_axis_off()
    for axis, (name, report) in zip(axes.flat, reports.items(), strict=False):
        places = range(len(report))
        after = [layer.kept_bytes / MIB for layer in report]
        before = [(layer.kept_bytes + layer.saved_bytes) / MIB for layer in report]
        axis.bar(places, before, width=1.0, color="#c9d1d9", label="before")
        axis.bar(places, after, width=1.0, color="#1f77b4", label="converted")
        axis.set_title(name, fontsize=9)
        axis.set_ylabel("MiB kept", fontsize=8)
        axis.set_xlabel("BatchNorm layer, input side first", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


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
    rows, reports = [], {}
    for name in arguments.models.split(","):
        row, reports[name] = measure(name, arguments, where)
        rows.append(row)
        print(
            f"{name}: {row['eager_MiB']:.0f} -> {row['converted_MiB']:.0f} MiB (-{row['saved']:.1%}), "
            f"step {row['step_ratio']:.2f}x",
            flush=True,
        )
    harness.write_csv(arguments.name, rows)
    picture(reports, harness.RESULTS / f"{arguments.name}.png")
    (harness.RESULTS / f"{arguments.name}.md").write_text(table(rows))


if __name__ == "__main__":
    main()
