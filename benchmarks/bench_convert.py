"""Real models by `fastvit.convert` and by what else reduces kept bytes: bytes, peak of a step, and its time.

Contenders, each from the eager model:

    convert, products   fastvit.convert, and with products=True
    budget              with budget=0.57
    least               with budget="least"
    weight_casts        with weight_casts=True (bf16 only)
    fuse                fastvit.fuse, then fastvit.convert (models with BatchNorm only): other roundings
    sac                 selective checkpointing of each block: products, convolutions and attention are kept
    sac_half            torchtitan's: every second matrix product is repeated too
    checkpoint          each block is checkpointed as a whole

Kept bytes are the allocator's live bytes after one training forward minus those before. The peak is that of a
whole step, above the bytes before it and without the gradients of weights. Gradients are compared with the
eager model's, bit by bit. Time is the processor's, on a GPU that until its work is done.

`--curve` measures budgets from 0.8 down beside the others (`--compiled`: and torch.compile of the model, of
selective checkpointing, and of converted models), and draws bytes against time to curve_DEVICE.png;
curve_DEVICE.md has our time at the bytes of each other contender.

    python benchmarks/bench_convert.py [--models vits|norms|vit_small_patch16_224,torchvision:vit_b_16]
                                       [--precision fp32|bf16] [--batch 8] [--threads 1] [--repeats 5]
                                       [--contenders convert,products] [--device cpu|cuda]
                                       [--curve [--compiled]]

Needs timm, torchvision and transformers (`pip install '.[models]'`). Writes results/convert_vits_DEVICE.csv
(of ViTs and two language models) and convert_DEVICE.csv (of models with BatchNorm), in which rows of models
that were not measured remain, and writes each as .md and .png.
"""

import copy
import functools
import time
from pathlib import Path

import harness
import matplotlib
import numpy

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from real_models import create, inputs  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  # noqa: E402

import fastvit  # noqa: E402
from fastvit.conversion.convert import blocks  # noqa: E402
from fastvit.memory import live_bytes, peak_bytes  # noqa: E402

MODELS = {
    "convert_vits": (
        "vit_small_patch16_224", "torchvision:vit_b_16", "transformers:vit", "transformers:siglip",
        "transformers:clip", "deit3_small_patch16_224", "vit_small_patch14_dinov2",
        "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3", "eva02_small_patch14_224",
        "convnext_tiny", "convnextv2_tiny", "mixer_s16_224", "swin_tiny_patch4_window7_224",
        "torchvision:swin_t", "beit_base_patch16_224", "swinv2_tiny_window8_256", "pvt_v2_b1",
        "maxvit_tiny_rw_224", "transformers:llama", "transformers:gpt2",
        "frozen:vit_small_patch16_224", "frozen:vgg16", "frozen:mobilenet_v2",
    ),
    "convert": (
        "mobilevit_s", "efficientformer_l1", "efficientvit_b1", "levit_256", "tresnet_m", "resnet50",
        "repvit_m1_1", "mobilenetv4_hybrid_medium", "densenet121", "tiny_vit_11m_224", "coatnet_0_rw_224",
        "efficientformerv2_s1",
    ),
}  # fmt: skip
GROUPS = {"vits": "convert_vits", "norms": "convert"}
SHOWN = {"eager": "#c9d1d9", "convert": "#1f77b4", "products": "#2ca02c", "sac": "#d6a419"}
CLOCK = {"cpu": "cpu_ms", "cuda": "ms"}  # the processors' time, or that until a GPU's work is done
MIB = 2**20


class Contender:
    def __init__(self, model, arguments, cache: bool = True):
        self.model, self.device, self.cache = model, arguments.device, cache
        self.is_bf16 = arguments.precision == "bf16"
        self.ms = []

    def forward(self, x):
        torch.manual_seed(0)  # of drop path and the like
        with torch.autocast(self.device, torch.bfloat16, enabled=self.is_bf16, cache_enabled=self.cache):
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
        return live_bytes(lambda: self.forward(x), self.device)[0] / MIB

    def peak(self, x) -> float:
        """Peak MiB of a step; gradients of weights, which are no activations, are freed at once."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(_forget) for p in trained]
        peak = peak_bytes(lambda: self.step(x), self.device) / MIB
        for hook in hooks:
            hook.remove()
        return peak

    def timed(self, x) -> None:
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        self.step(x)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ms.append((clock() - start) * 1e3)
        self.zero()


def _forget(parameter) -> None:
    parameter.grad = None


def _innermost_blocks(model) -> set:
    found = set(blocks(model))
    return {block for block in found if not any(m in found for m in block.modules() if m is not block)}


def checkpointed(eager, context_fn=None):
    model = copy.deepcopy(eager)
    options = {} if context_fn is None else {"context_fn": context_fn}
    found = _innermost_blocks(model)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **options),
        check_fn=lambda module: module in found,
    )
    return model


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
KEPT = PRODUCTS | {
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def selective(repeats_second: bool):
    """Keeps products, convolutions and attention, or of the products every first of two."""

    def context_fn():
        count = {False: 0, True: 0}

        def policy(context, op, *args, **kwargs):
            if op in PRODUCTS:
                count[context.is_recompute] += 1
                if repeats_second and count[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return context_fn


MAKERS = {  # name -> (eager model, inputs) -> model
    "convert": lambda eager, x: fastvit.convert(copy.deepcopy(eager)),
    "products": lambda eager, x: fastvit.convert(copy.deepcopy(eager), products=True),
    "budget": lambda eager, x: fastvit.convert(copy.deepcopy(eager), budget=0.57, example_inputs=x),
    "least": lambda eager, x: fastvit.convert(copy.deepcopy(eager), budget="least"),
    "weight_casts": lambda eager, x: fastvit.convert(copy.deepcopy(eager), weight_casts=True),
    "fuse": lambda eager, x: fastvit.convert(fastvit.fuse(copy.deepcopy(eager))),
    "sac": lambda eager, x: checkpointed(eager, selective(False)),
    "sac_half": lambda eager, x: checkpointed(eager, selective(True)),
    "checkpoint": lambda eager, x: checkpointed(eager),
}
EXACT = ("convert", "products", "budget", "least", "weight_casts")
BUDGETS = ("0.8", "0.6", "0.5", "0.4", "0.3", "0.2", "0.15", "0.1", "0.05")
CURVE = ("convert", "products", *BUDGETS, "least", "sac", "sac_half", "checkpoint")


COMPILED = tuple(f"compiled_{c}" for c in ("eager", "sac", "convert", "0.4", "0.2", "0.1"))


def make(contender: str, eager, x):
    if contender in COMPILED:
        model = copy.deepcopy(eager) if contender == "compiled_eager" else None
        return torch.compile(model or make(contender.removeprefix("compiled_"), eager, x))
    if contender in BUDGETS:
        return fastvit.convert(copy.deepcopy(eager), budget=float(contender), example_inputs=x)
    return MAKERS[contender](eager, x)


def chosen(name: str, arguments) -> list[str]:
    """The contenders that are measured for a model."""
    if arguments.contenders:
        return arguments.contenders.split(",")
    if arguments.curve:
        return [*CURVE, *(COMPILED if arguments.compiled else ())]
    left_out = set() if name in MODELS["convert"] else {"fuse"}
    left_out |= set() if arguments.precision == "bf16" else {"weight_casts"}
    return [contender for contender in MAKERS if contender not in left_out]


def _plain(name: str) -> str:
    """A parameter's name without that of a wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("_orig_mod.")


def measure(name: str, arguments, where: dict) -> dict:
    torch.manual_seed(0)
    eager, size = create(name)
    eager, x = eager.to(arguments.device), inputs(name, arguments.batch, size).to(arguments.device)
    row = {
        "model": name,
        "precision": arguments.precision,
        "batch": arguments.batch,
        "image": size,
        "threads": torch.get_num_threads(),
    }
    by = {"eager": Contender(eager, arguments)}
    want = by["eager"].gradients(x)
    for contender in ["eager", *chosen(name, arguments)]:
        try:
            if contender != "eager":
                with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.precision == "bf16"):
                    model = make(contender, eager, x)
                by[contender] = Contender(model, arguments, cache=contender != "weight_casts")
            got = {_plain(n): g for n, g in by[contender].gradients(x).items()}
            row[f"{contender}_same_bits"] = sum(torch.equal(got[n], want[n]) for n in want) / len(want)
            row[f"{contender}_kept_MiB"] = by[contender].kept(x)
            row[f"{contender}_peak_MiB"] = by[contender].peak(x)
        except Exception as error:  # a contender may not take a model; the rest is still measured
            print(f"{name}: {contender}: {type(error).__name__}: {str(error)[:150]}")
            by.pop(contender, None)
    for _ in range(arguments.repeats):  # in turn, so that a slow minute hits all
        for one in by.values():
            one.timed(x)
    for contender, one in by.items():
        row[f"{contender}_{CLOCK[arguments.device]}"] = harness.percentiles(one.ms)["p50_ms"]
    return row | where


def merged(name: str, out: Path, new: dict) -> list[dict]:
    """`new` and the rows that NAME.csv has of other models, in the order of MODELS."""
    old = harness.read_csv(name, out)
    rows = [row for row in old if (row["model"], row["precision"]) != (new["model"], new["precision"])]
    order = {model: i for i, model in enumerate(sum(MODELS.values(), ()))}
    return sorted([*rows, new], key=lambda r: (r["precision"] != "fp32", order.get(r["model"], len(order))))


def less(row: dict, contender: str, what: str) -> str:
    value = row.get(f"{contender}_{what}_MiB")
    if value in (None, ""):
        return ""
    return f"{float(value) / float(row[f'eager_{what}_MiB']) - 1:+.1%}"


def times(row: dict, contender: str) -> str:
    clock = CLOCK["cuda" if row.get("driver") else "cpu"]
    value = row.get(f"{contender}_{clock}")
    return f"{float(value) / float(row[f'eager_{clock}']):.2f}x" if value not in (None, "") else ""


TITLES = {
    "convert": "convert", "products": "products=True", "budget": "budget=0.57", "least": 'budget="least"',
    "weight_casts": "weight_casts=True", "fuse": "fuse, then convert", "sac": "selective checkpointing",
    "sac_half": "every second product", "checkpoint": "block checkpointing",
    "compiled_eager": "torch.compile", "compiled_sac": "torch.compile of selective checkpointing",
}  # fmt: skip


def table(rows: list[dict]) -> str:
    """A cell: kept bytes and peak over the eager model's, and the time over its time."""
    shown = [c for c in TITLES if any(r.get(f"{c}_kept_MiB") not in (None, "") for r in rows)]
    found = []
    for r in rows:
        cells = [f"{r['model']}{', bf16' if r['precision'] == 'bf16' else ''}"]
        cells.append(f"{float(r['eager_kept_MiB']):.0f}, {float(r['eager_peak_MiB']):.0f} MiB")
        cells.append(str(r["batch"]))
        for contender in shown:
            parts = [less(r, contender, "kept"), less(r, contender, "peak"), times(r, contender)]
            cells.append(", ".join(parts) if parts[0] else "")
        found.append(cells)
    first = rows[0]
    where = {f"{r['precision']} on {r['device']}, torch {r['torch']}, {r['date']}": None for r in rows}
    exact = [r[f"{c}_same_bits"] for r in rows for c in EXACT if r.get(f"{c}_same_bits") not in (None, "")]
    lines = [
        *harness.markdown(["model", "eager: kept, peak", "batch", *(TITLES[c] for c in shown)], found),
        "",
        "A cell: kept bytes that one training forward leaves alive, peak of a whole step without the "
        f"gradients of weights, and {'' if first.get('driver') else 'CPU '}time of a step, "
        "over the eager model's. "
        "In fp32, or under autocast to bf16.",
        "Every gradient by convert has the eager model's bits."
        if all(float(share) == 1 for share in exact)
        else "Gradients by convert that have the eager model's bits: see the same_bits columns of the CSV.",
        f"Medians of one run on {first['threads']} thread(s), contenders in turn:",
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


OWN = ("eager", "convert", "products", *BUDGETS, "least")
OWN_COMPILED = tuple(c for c in COMPILED if c not in ("compiled_eager", "compiled_sac"))
OTHERS = ("sac", "sac_half", "checkpoint", "compiled_eager", "compiled_sac")


def points(row: dict) -> dict[str, tuple[float, float]]:
    """Kept bytes and time of each contender over the eager model's."""
    clock = CLOCK["cuda" if row.get("driver") else "cpu"]
    kept, time_ = float(row["eager_kept_MiB"]), float(row[f"eager_{clock}"])
    return {
        c: (float(row[f"{c}_kept_MiB"]) / kept, float(row[f"{c}_{clock}"]) / time_)
        for c in (*OWN, *OWN_COMPILED, *OTHERS)
        if row.get(f"{c}_{clock}") not in (None, "")
    }


def against(rows: list[dict]) -> str:
    """Each other contender, and the time of our line at the same bytes."""
    found = []
    for row in rows:
        at, cells = points(row), [f"{row['model']}, {row['precision']}, batch {row['batch']}"]
        for contender in OTHERS:
            if contender not in at:
                cells += ["", ""]
                continue
            kept, time_ = at[contender]
            line = ("compiled_eager", *OWN_COMPILED) if contender in COMPILED else OWN
            own = numpy.interp(
                kept, *zip(*sorted(at[c] for c in line if c in at), strict=True), left=numpy.inf
            )
            cells += [f"{kept - 1:+.1%}, {time_:.2f}x", f"{own:.2f}x" if own < numpy.inf else "none"]
            if own > time_ + 0.02:
                cells[-2] = f"**{cells[-2]}**"
        found.append(cells)
    first = rows[0]
    where = {f"{r['commit']}, {r['device']}, torch {r['torch']}, {r['date']}": None for r in rows}
    header = ["model", *(title for c in OTHERS for title in (TITLES[c], "convert there"))]
    lines = [
        *harness.markdown(header, found),
        "",
        "Kept bytes and time of a step over the eager model's; behind each contender the time of the line "
        "through the points of fastvit.convert at the same bytes. Bold: it is above by more than 0.02. "
        f"{first['threads']} thread(s), medians of one run with the "
        f"contenders in turn: {'; '.join(where)}.",
        "",
        "![bytes against time](IMAGE)",
        "",
    ]
    return "\n".join(lines)


def curve(rows: list[dict], path) -> None:
    """Bytes against time, for each model: our budgets as a line, other contenders as points."""
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), layout="constrained", squeeze=False
    )
    for row, axis in zip(rows, axes.flat, strict=False):
        at = points(row)
        own = sorted(at[c] for c in OWN if c in at)
        axis.plot(
            *zip(*own, strict=True),
            "o-",
            color=SHOWN["convert"],
            label="fastvit.convert, by budget",
            markersize=4,
        )
        if "compiled_eager" in at:
            own = sorted(at[c] for c in ("compiled_eager", *OWN_COMPILED) if c in at)
            axis.plot(*zip(*own, strict=True), "o--", color=SHOWN["products"], label="compiled", markersize=4)
        for contender, marker in (
            ("sac", "s"),
            ("sac_half", "D"),
            ("checkpoint", "^"),
            ("compiled_sac", "x"),
        ):
            if contender in at:
                axis.plot(*at[contender], marker, color=SHOWN["sac"], label=TITLES[contender])
        axis.set_title(f"{row['model']}, {row['precision']}", fontsize=9)
        axis.set_xlabel("kept for backward, eager = 1", fontsize=8)
        axis.set_ylabel("time of a step, eager = 1", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(rows) :]:
        axis.remove()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--models", default="vits,norms", help="vits, norms, or names of models, by commas")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contenders", help="names from the list above, by commas")
    parser.add_argument("--compiled", action="store_true", help="with --curve: under torch.compile too")
    parser.add_argument("--curve", action="store_true", help="bytes against time, from budget to budget")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        harness.reuse_memory()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 32  # of the contenders' common forward
    where = harness.provenance(arguments.device)
    for given in arguments.models.split(","):
        for name in MODELS[GROUPS[given]] if given in GROUPS else (given,):
            group = "convert" if name in MODELS["convert"] else "convert_vits"
            table_name = f"{'curve' if arguments.curve else group}_{arguments.device}"
            row = measure(name, arguments, where)
            rows = merged(table_name, arguments.out, row)
            path = harness.write_csv(table_name, rows, arguments.out)
            if arguments.curve:
                curve(rows, path.with_suffix(".png"))
            else:
                picture(rows, path.with_suffix(".png"))
            text = (against if arguments.curve else table)(rows)
            path.with_suffix(".md").write_text(text.replace("IMAGE", f"{table_name}.png"))
            measured = [c for c in (*TITLES, *BUDGETS) if row.get(f"{c}_kept_MiB")]
            cells = [f"{c} {less(row, c, 'kept')} {times(row, c)}" for c in measured]
            print(f"{name} {arguments.precision}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
