"""Real models by `fastvit.convert` and by what else reduces kept bytes: bytes, peak of a step, and its time.

Contenders, each from the eager model:

    convert, products   fastvit.convert, and with matmuls=True
    0.8, least          fastvit.convert with budget=0.8, or any other share, and budget="least"
    weight_casts        with recompute_weight_casts=True (bf16 only)
    fuse                fastvit.fuse, then fastvit.convert (models with BatchNorm only): other roundings
    sac                 selective checkpointing of each block: products, convolutions and attention are kept
    sac_half            torchtitan's: every second matrix product is repeated too
    checkpoint          each block is checkpointed as a whole

Kept bytes are the allocator's live bytes after one training forward minus those before. The peak is that of a
whole step, above the bytes before it and without the gradients of weights. Gradients are compared with the
eager model's, bit by bit. Time is processor time, on a GPU wall time until its work is done; contenders take
turns, and the median counts.

    python benchmarks/bench_convert.py [--models vits|norms|vit_small_patch16_224,torchvision:vit_b_16]
                                       [--precision fp32|bf16|fp32,bf16] [--batch 8] [--threads 1]
                                       [--repeats 5] [--contenders convert,products] [--device cpu|cuda]
                                       [--resume]

This writes results/convert_vits_DEVICE.csv (of ViTs and two language models) and convert_DEVICE.csv (of
models with BatchNorm), in which rows of models that were not measured remain, and their tables. `--resume`
skips models whose rows are of this commit, batch and number of threads.

    python benchmarks/bench_convert.py --curve [--compiled] [the options above]

This measures budgets from 0.8 to "least", shares of the peak, beside convert, products and checkpointing. It
writes curve_DEVICE.csv and its table, and draws peak against time to curve_DEVICE.png. The default is the
models and batches of CURVE, both precisions, and 7 repeats: about an hour of one core. A budget that
cannot be met is left out. `--compiled` adds torch.compile of the model, of selective checkpointing, and of
converted models.

    python benchmarks/bench_convert.py --check-curve

This reads curve_DEVICE.csv and prints which contender dominates the curve, and which budget is not convex,
not monotone or exceeded (budget_curve.py). The exit status is 1 if there is one.

Needs timm, torchvision and transformers (`pip install '.[models]'`).
"""

import sys
import time

import torch
from budget_curve import BUDGETS, check_curve, draw_curve, is_budget
from convert_contenders import COMPILED, MAKERS, MIB, Contender, make, select_autocast
from harness import command_line, commit, percentiles, provenance, read_csv, reuse_memory, write_csv
from real_models import create, inputs
from report import write_table

VITS = """
    vit_small_patch16_224 torchvision:vit_b_16 transformers:vit transformers:siglip transformers:clip
    deit3_small_patch16_224 vit_small_patch14_dinov2 vit_small_patch16_dinov3 vit_small_plus_patch16_dinov3
    eva02_small_patch14_224 convnext_tiny convnextv2_tiny mixer_s16_224 swin_tiny_patch4_window7_224
    torchvision:swin_t beit_base_patch16_224 swinv2_tiny_window8_256 pvt_v2_b1 maxvit_tiny_rw_224
    transformers:llama transformers:gpt2 frozen:vit_small_patch16_224 frozen:vgg16 frozen:mobilenet_v2
"""
NORMS = """
    mobilevit_s efficientformer_l1 efficientvit_b1 levit_256 tresnet_m resnet50 repvit_m1_1
    mobilenetv4_hybrid_medium densenet121 tiny_vit_11m_224 coatnet_0_rw_224 efficientformerv2_s1
"""
# A model of the curve -> its batch in fp32, and under bf16 autocast, where copies of weights take less than a
# quarter of the peak. A step takes at most about a second on one core.
CURVE = {
    "vit_small_patch16_224": (2, 4),
    "deit3_small_patch16_224": (2, 4),
    "vit_relpos_small_patch16_224": (2, 3),
    "xcit_nano_12_p16_224": (4, 8),
    "resnet26": (2, 4),
    "resnet50": (2, 4),
    "convnext_tiny": (2, 3),
    "swin_tiny_patch4_window7_224": (2, 3),
    "mobilevit_s": (2, 2),
    "transformers:clip": (2, 4),
    "transformers:llama": (1, 2),
    "transformers:gpt2": (1, 2),
}
MODELS = {"convert_vits": VITS.split(), "convert": NORMS.split(), "curve": list(CURVE)}
GROUPS = {"vits": "convert_vits", "norms": "convert", "curve": "curve"}
PRECISIONS = ("fp32", "bf16")


def chosen(name: str, precision: str, arguments) -> list[str]:
    """The contenders that are measured for a model."""
    if arguments.contenders:
        return arguments.contenders.split(",")
    if arguments.curve:
        some = [contender for contender in MAKERS if contender not in ("fuse", "weight_casts")]
        return [*some, *BUDGETS, *(COMPILED if arguments.compiled else ())]
    some = ["fuse"] if name in MODELS["convert"] else []
    some += ["weight_casts"] if precision == "bf16" else []
    return ["convert", "products", *some, "sac", "sac_half", "checkpoint"]


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("_orig_mod.")


def select_batch(name: str, precision: str, arguments) -> int:
    """Returns --batch, or the default of the model and precision."""
    if arguments.batch or not arguments.curve:
        return arguments.batch or 8
    return CURVE.get(name, (1, 4))[PRECISIONS.index(precision)]


def measure(name: str, precision: str, arguments) -> list[dict]:
    """A row for each contender. Budgets below one that cannot be met are not tried."""
    torch.manual_seed(0)
    eager, size = create(name)
    x = inputs(name, select_batch(name, precision, arguments), size).to(arguments.device)
    eager = eager.to(arguments.device)
    by = {"torch": Contender(eager, select_autocast("torch", precision, arguments))}
    expected = by["torch"].gradients(x)
    rows: dict[str, dict] = {}
    is_met = True
    for contender in ["torch", *chosen(name, precision, arguments)]:
        is_share = is_budget(contender) and contender != "least"
        if is_share and not is_met:
            continue
        try:
            if contender != "torch":
                autocast = select_autocast(contender, precision, arguments)
                with autocast():
                    model = make(contender, eager, x)
                by[contender] = Contender(model, autocast)
            actual = {_plain(n): g for n, g in by[contender].gradients(x).items()}
            same_bits = sum(torch.equal(actual[n], expected[n]) for n in expected) / len(expected)
            rows[contender] = {
                "what": name,
                "shape": "x".join(map(str, x.shape)),
                "dtype": precision,
                "threads": arguments.threads,
                "contender": contender,
                "same_bits": same_bits,
                "kept_MiB": by[contender].kept(x),
                "peak_MiB": by[contender].peak(x),
            }
        except Exception as error:  # a contender may not take a model; the rest is still measured
            is_met = is_met and not (is_share and isinstance(error, ValueError))
            print(f"{name}: {contender}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
            by.pop(contender, None)
    if precision == "bf16":
        _print_weight_share(name, eager, rows["torch"]["peak_MiB"])
    for _ in range(arguments.repeats):  # contenders take turns, so that a slow minute hits all
        for one in by.values():
            one.timed(x)
    where = provenance(arguments.device)
    return [row | percentiles(by[contender].us) | where for contender, row in rows.items()]


def _print_weight_share(name: str, model, peak_mib: float) -> None:
    """Says where autocast's copies of weights are much of the peak: pick a larger batch there."""
    copied = sum(2 * p.numel() for p in model.parameters() if p.ndim > 1) / MIB
    if copied > peak_mib / 4:
        print(f"{name}: copies of weights take {copied / peak_mib:.0%} of the peak")


def is_measured(rows: list[dict], name: str, precision: str, arguments) -> bool:
    """Returns whether the rows of a model are of this commit, without changes, and of these options."""
    head = commit()
    if head == "unknown" or head.endswith("+changes"):
        return False
    expected = (head, str(arguments.threads), str(select_batch(name, precision, arguments)))
    found = [
        (row["commit"], row["threads"], row["shape"].split("x")[0])
        for row in rows
        if (row["what"], row["dtype"]) == (name, precision)
    ]
    return set(found) == {expected}


def merged(old: list[dict], new: list[dict], models: list[str]) -> list[dict]:
    """`new`, and the rows of other models, in the order of `models`."""
    first = new[0]
    rows = [row for row in old if (row["what"], row["dtype"]) != (first["what"], first["dtype"])]
    order = {model: i for i, model in enumerate(models)}
    return sorted([*rows, *new], key=lambda r: (r["dtype"] != "fp32", order.get(r["what"], len(order))))


def parse_arguments():
    parser = command_line(__doc__)
    parser.add_argument("--models", help="vits, norms, curve, or names of models, by commas")
    parser.add_argument("--precision", help="fp32, bf16 or fp32,bf16 (default: fp32; with --curve both)")
    parser.add_argument("--batch", type=int, help="default: 8; with --curve by model and precision")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, help="default: 5; with --curve 7")
    parser.add_argument("--contenders", help="names from the list above, by commas")
    parser.add_argument("--curve", action="store_true", help="peak against time, from budget to budget")
    parser.add_argument("--compiled", action="store_true", help="with --curve: under torch.compile too")
    parser.add_argument("--resume", action="store_true", help="skip what was measured on this commit")
    parser.add_argument(
        "--check-curve", action="store_true", help="measure nothing; find faults of the curve"
    )
    arguments = parser.parse_args()
    arguments.models = arguments.models or ("curve" if arguments.curve else "vits,norms")
    precisions = (arguments.precision or ("fp32,bf16" if arguments.curve else "fp32")).split(",")
    if not set(precisions) <= set(PRECISIONS):
        parser.error(f"--precision takes fp32, bf16 or fp32,bf16, got {arguments.precision}")
    arguments.precisions = precisions
    arguments.repeats = arguments.repeats or (7 if arguments.curve else 5)
    return arguments


def check(arguments) -> None:
    """Prints the faults of the curve that was measured, and ends the program with status 1 if it has some."""
    name = f"curve_{arguments.device}"
    rows = read_csv(name, arguments.out)
    if not rows:
        sys.exit(
            f"bench_convert: --check-curve found no rows in {arguments.out / name}.csv; run --curve before"
        )
    lines, has_faults = check_curve(rows)
    print(*lines, sep="\n")
    sys.exit(int(has_faults))


def main() -> None:
    arguments = parse_arguments()
    if arguments.check_curve:
        check(arguments)
    if arguments.device == "cpu":
        reuse_memory()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 32  # the contenders share one forward
    given = arguments.models.split(",")
    names = [name for one in given for name in (MODELS[GROUPS[one]] if one in GROUPS else (one,))]
    runs = [(name, precision) for precision in arguments.precisions for name in names]
    begin = time.monotonic()
    for i, (name, precision) in enumerate(runs, 1):
        group = "curve" if arguments.curve else "convert" if name in MODELS["convert"] else "convert_vits"
        results = f"{group}_{arguments.device}"
        rows = read_csv(results, arguments.out)
        if arguments.resume and is_measured(rows, name, precision, arguments):
            print(f"{i}/{len(runs)} {name} {precision}: measured before", flush=True)
            continue
        rows = merged(rows, measure(name, precision, arguments), MODELS[group])
        path = write_table(write_csv(results, rows, arguments.out))
        minutes = (time.monotonic() - begin) / 60
        print(f"{i}/{len(runs)} {name} {precision}, {minutes:.1f} minutes: {path}", flush=True)
    if arguments.curve:
        results = f"curve_{arguments.device}"
        draw_curve(read_csv(results, arguments.out), arguments.out / f"{results}.png")


if __name__ == "__main__":
    main()
