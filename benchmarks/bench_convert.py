"""Real models before and after `fastvit.convert`: bytes kept for backward, peak of a step, and its time.

Contenders: the eager model; converted; converted with memory="gemm"; with bf16, converted with
weight_casts=True; with each block checkpointed, where the model has that option; and the partitioner of
torch.compile, which chooses what to recompute. Kept bytes are the allocator's live bytes after one training
forward minus those before. The peak is that of a whole step, above the bytes before it and without the
gradients of weights. Gradients are compared with the eager model's, bit by bit.

    python benchmarks/bench_convert.py [--models vits|norms|vit_small_patch16_224,torchvision:vit_b_16]
                                       [--precision fp32|bf16] [--batch 8] [--threads 2] [--repeats 7]

Needs timm, torchvision and transformers (`pip install '.[models]'`). Writes results/convert_vits_cpu.csv (of
ViTs) and convert_cpu.csv (of models with BatchNorm), in which rows of models that were not measured remain,
and writes each as .md and .png.
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
from real_models import create  # noqa: E402

import fastvit  # noqa: E402
from fastvit.memory import live_bytes, peak_bytes  # noqa: E402

MODELS = {
    "convert_vits": (
        "vit_small_patch16_224", "torchvision:vit_b_16", "transformers:vit", "transformers:siglip",
        "transformers:clip", "deit3_small_patch16_224", "vit_small_patch14_dinov2",
        "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3", "eva02_small_patch14_224",
        "convnext_tiny", "convnextv2_tiny", "mixer_s16_224", "swin_tiny_patch4_window7_224",
        "torchvision:swin_t", "beit_base_patch16_224", "swinv2_tiny_window8_256", "pvt_v2_b1",
        "maxvit_tiny_rw_224",
    ),
    "convert": (
        "mobilevit_s", "efficientformer_l1", "efficientvit_b1", "levit_256", "tresnet_m", "resnet50",
    ),
}  # fmt: skip
GROUPS = {"vits": "convert_vits", "norms": "convert"}
SHOWN = {"eager": "#c9d1d9", "converted": "#1f77b4", "gemm": "#2ca02c", "checkpoint": "#d6a419"}
MIB = 2**20


class Contender:
    def __init__(self, model, precision: str, cache: bool = True):
        self.model, self.precision, self.cache = model, precision, cache
        self.ms, self.busy_ms = [], []

    def forward(self, x):
        torch.manual_seed(0)  # of drop path and the like
        is_bf16 = self.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16, cache_enabled=self.cache):
            return self.model(x)

    def step(self, x) -> None:
        self.forward(x).float().square().mean().backward()

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self, x) -> dict:
        """Runs a first step, which allocates one-time buffers."""
        self.zero()
        self.step(x)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.zero()
        return gradients

    def kept(self, x) -> float:
        """MiB that a training forward leaves allocated."""
        return live_bytes(lambda: self.forward(x))[0] / MIB

    def peak(self, x) -> float:
        """Peak MiB of a step; gradients of weights, which are no activations, are freed at once."""
        hooks = [p.register_post_accumulate_grad_hook(_forget) for p in self.model.parameters()]
        peak = peak_bytes(lambda: self.step(x)) / MIB
        for hook in hooks:
            hook.remove()
        return peak

    def timed(self, x) -> None:
        start, start_busy = time.perf_counter(), time.process_time()
        self.step(x)
        self.ms.append((time.perf_counter() - start) * 1e3)
        self.busy_ms.append((time.process_time() - start_busy) * 1e3)
        self.zero()


def _forget(parameter) -> None:
    parameter.grad = None


def contenders(eager, x, precision: str) -> dict[str, Contender]:
    found = {"eager": Contender(eager, precision)}
    for name, memory in (("converted", "auto"), ("gemm", "gemm")):
        found[name] = Contender(fastvit.convert(copy.deepcopy(eager), memory)[0], precision)
    if precision == "bf16":
        recast, _ = fastvit.convert(copy.deepcopy(eager), weight_casts=True)
        found["weight_casts"] = Contender(recast, precision, cache=False)
    if hasattr(eager, "set_grad_checkpointing"):
        checkpointed = copy.deepcopy(eager)
        checkpointed.set_grad_checkpointing()
        found["checkpoint"] = Contender(checkpointed, precision)
    return found


def partitioned(eager, x, precision: str) -> float | None:
    """MiB kept under the partitioner of torch.compile, without code generation."""
    torch._dynamo.reset()
    try:
        contender = Contender(torch.compile(eager, backend="aot_eager_decomp_partition"), precision)
        contender.gradients(x)
        return contender.kept(x)
    except Exception as error:  # a model may not compile; other rows are still measured
        print(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def measure(name: str, arguments, where: dict) -> dict:
    torch.manual_seed(0)
    eager, size = create(name)
    x = torch.randn(arguments.batch, 3, size, size)
    found = contenders(eager, x, arguments.precision)
    row = {
        "model": name,
        "precision": arguments.precision,
        "batch": arguments.batch,
        "image": size,
        "threads": torch.get_num_threads(),
    }
    want = found["eager"].gradients(x)
    for contender, by in found.items():
        got = by.gradients(x)
        row[f"{contender}_same_bits"] = sum(torch.equal(got[name], want[name]) for name in want) / len(want)
        row[f"{contender}_kept_MiB"], row[f"{contender}_peak_MiB"] = by.kept(x), by.peak(x)
    if arguments.compile and (kept := partitioned(copy.deepcopy(eager), x, arguments.precision)) is not None:
        row["partitioner_kept_MiB"] = kept
    for _ in range(arguments.repeats):  # in turn, so that a slow minute hits all
        for by in found.values():
            by.timed(x)
    for contender, by in found.items():
        row[f"{contender}_ms"] = harness.percentiles(by.ms)["p50_ms"]
        row[f"{contender}_cpu_ms"] = harness.percentiles(by.busy_ms)["p50_ms"]
    return row | where


def merged(name: str, group: str, new: dict) -> list[dict]:
    """`new` and the rows that results/NAME.csv has of other models, in the order of MODELS."""
    path = harness.RESULTS / f"{name}.csv"
    old = list(csv.DictReader(path.open())) if path.exists() else []
    rows = [row for row in old if (row["model"], row["precision"]) != (new["model"], new["precision"])]
    order = {model: i for i, model in enumerate(MODELS[group])}
    return sorted([*rows, new], key=lambda r: (r["precision"] != "fp32", order.get(r["model"], len(order))))


def less(row: dict, contender: str, what: str) -> str:
    value = row.get(f"{contender}_{what}_MiB")
    if value in (None, ""):
        return ""
    return f"{float(value) / float(row[f'eager_{what}_MiB']) - 1:+.1%}"


def times(row: dict, contender: str) -> str:
    value = row.get(f"{contender}_cpu_ms")
    return f"{float(value) / float(row['eager_cpu_ms']):.2f}x" if value not in (None, "") else ""


def table(rows: list[dict]) -> str:
    lines = [
        '| model | eager: kept, peak | converted: kept, peak | time | memory="gemm": kept, peak | time '
        "| weight_casts=True: kept, peak | time | checkpoint: kept, peak | time | partitioner: kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r['model']}{', bf16' if r['precision'] == 'bf16' else ''}"]
        cells.append(f"{float(r['eager_kept_MiB']):.0f}, {float(r['eager_peak_MiB']):.0f} MiB")
        for contender in ("converted", "gemm", "weight_casts", "checkpoint"):
            both = f"{less(r, contender, 'kept')}, {less(r, contender, 'peak')}"
            cells += ["" if both == ", " else f"**{both}**" if contender == "converted" else both]
            cells += [times(r, contender)]
        lines.append(f"| {' | '.join([*cells, less(r, 'partitioner', 'kept')])} |")
    first = rows[0]
    where = {f"{r['precision']} on {r['device']}, torch {r['torch']}, {r['date']}": None for r in rows}
    same = all(float(r[f"{c}_same_bits"]) == 1 for r in rows for c in ("converted", "gemm"))
    lines += [
        "",
        "Kept: bytes that one training forward leaves alive; peak: of a whole step, without the gradients of "
        f"weights. Batch {first['batch']}, fp32 or autocast to bf16.",
        "Every gradient of every converted model has the eager model's bits."
        if same
        else "Gradients differ where conversion fuses BatchNorm, by roundings.",
        f"Time is CPU time of a step on {first['threads']} threads, medians of one run, contenders in turn:",
        f"{'; '.join(where)}. With weight_casts=True autocast has cache_enabled=False.",
        "",
        "![bytes](IMAGE)",
        "",
    ]
    return "\n".join(lines)


def picture(rows: list[dict], path) -> None:
    """The kept bytes of a training forward, relative to the eager model's."""
    figure, axis = plt.subplots(figsize=(9, 1 + 0.55 * len(rows)), layout="constrained")
    labels = [f"{r['model']}{', bf16' if r['precision'] == 'bf16' else ''}" for r in rows]
    height = 0.8 / len(SHOWN)
    for i, (contender, colour) in enumerate(SHOWN.items()):
        found = [(y, r) for y, r in enumerate(rows) if r.get(f"{contender}_kept_MiB") not in (None, "")]
        shares = [float(r[f"{contender}_kept_MiB"]) / float(r["eager_kept_MiB"]) for _, r in found]
        axis.barh([y + i * height for y, _ in found], shares, height, color=colour, label=contender)
    axis.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("kept for backward, eager = 1", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="vits,norms", help="vits, norms, or names of models, by commas")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    harness.reuse_memory()
    torch.set_num_threads(arguments.threads)
    where = harness.provenance("cpu")
    for given in arguments.models.split(","):
        for name in MODELS[GROUPS[given]] if given in GROUPS else (given,):
            group = "convert" if name in MODELS["convert"] else "convert_vits"
            row = measure(name, arguments, where)
            rows = merged(f"{group}_cpu", group, row)
            harness.write_csv(f"{group}_cpu", rows)
            picture(rows, harness.RESULTS / f"{group}_cpu.png")
            text = table(rows).replace("IMAGE", f"{group}_cpu.png")
            (harness.RESULTS / f"{group}_cpu.md").write_text(text)
            print(
                f"{name} {arguments.precision}: kept {less(row, 'converted', 'kept')}, peak "
                f"{less(row, 'converted', 'peak')}, CPU time {times(row, 'converted')}, same bits "
                f"{row['converted_same_bits']:.0%}; gemm: kept {less(row, 'gemm', 'kept')}, CPU time "
                f"{times(row, 'gemm')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
