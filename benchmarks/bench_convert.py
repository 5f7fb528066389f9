"""Measures real models under `fastvit.convert` and its rivals: kept bytes, and peak and time of a step.

Each contender is made from a copy of the eager model, whose rows are named torch:

    convert             fastvit.convert
    matmuls             fastvit.convert with matmuls=True
    0.8, least          fastvit.convert with budget=0.8, another share, or "least"
    weight_casts        fastvit.convert with recompute_weight_casts=True (bf16 only)
    fuse                fastvit.fuse, then fastvit.convert (only models with BatchNorm); it rounds otherwise
    sac                 selective checkpointing of blocks: keeps matmuls, convolutions and attention
    sac_half            torchtitan's selective checkpointing, which recomputes every second matmul too
    checkpoint          each block is checkpointed as a whole
    accumulate          the eager model takes two halves of the batch, and adds their gradients (--curve only)
    compiled_eager      torch.compile of the eager model (--curve only, models of COMPILED_MODELS)
    compiled_convert    torch.compile of a converted model (likewise)

Kept bytes are the allocator's live bytes after one training forward minus those before. The peak is that of a
whole step, above the bytes before the step and without the gradients of weights. Gradients are compared with
the eager model's, bit by bit. Time is processor time; with a GPU, wall time until the GPU's work is done.
Contenders take turns, and the median counts.

    python benchmarks/bench_convert.py [--models vits|norms|vit_small_patch16_224,torchvision:vit_b_16]
                                       [--precision fp32|bf16|fp32,bf16] [--batch 4] [--threads 1]
                                       [--repeats 3] [--contenders convert,matmuls] [--device cpu|cuda]
                                       [--resume]

This writes results/convert_vits_DEVICE.csv (of ViTs and two language models) and convert_DEVICE.csv (of
models with BatchNorm), in which rows of models that were not measured remain, and their tables. `--resume`
skips models whose rows are of this code, batch and number of threads.

    python benchmarks/bench_convert.py --curve [the options above]

This measures budgets from 0.8 of the peak to "least", beside convert, matmuls and checkpointing. It
writes curve_DEVICE.csv and its table, and draws peak against time to curve_DEVICE.png. The default is the
models and batches of CURVE, both precisions, and 7 repeats: an hour of one core. A budget that
cannot be met is left out.

    python benchmarks/bench_convert.py --check-curve

This reads curve_DEVICE.csv and prints which contender dominates the curve, and which budget is not convex,
not monotone or exceeded (budget_curve.py). The exit status is 1 if there is such a fault.

Needs timm, torchvision and transformers (`pip install '.[models]'`).
"""

import sys
import time

import torch
from budget_curve import BUDGETS, check_curve, draw_curve, is_budget
from conditions import identify_measurement, provenance
from convert_contenders import (
    COMPILED_CONTENDERS,
    CONTENDER_FACTORIES,
    MIB,
    NUM_PARTS,
    Contender,
    make_contender,
    select_autocast,
)
from harness import make_parser, percentiles, read_csv, restart_with_reused_memory, write_csv
from real_models import create_model, random_inputs
from result_tables import write_table

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
# A model of the curve -> its batches in fp32 and under bf16 autocast. The second is so large that copies of
# weights take less than a quarter of the peak. A step takes at most about a second on one core.
CURVE = {
    "vit_small_patch16_224": (2, 4),
    "resnet50": (2, 4),
    "convnext_tiny": (2, 3),
    "swin_tiny_patch4_window7_224": (2, 3),
    "mobilevit_s": (2, 2),
    "transformers:clip": (2, 4),
    "transformers:llama": (2, 2),
    "transformers:gpt2": (2, 2),
}
# A compilation takes a minute, so one model of each kind is compiled.
COMPILED_MODELS = ("vit_small_patch16_224", "resnet50", "mobilevit_s", "transformers:llama")
# The name of a file of results -> its models.
MODELS = {"convert_vits": VITS.split(), "convert": NORMS.split(), "curve": list(CURVE)}
# A word of --models -> a key of MODELS.
MODEL_GROUPS = {"vits": "convert_vits", "norms": "convert", "curve": "curve"}
PRECISIONS = ("fp32", "bf16")


def select_contenders(name: str, precision: str, arguments) -> list[str]:
    """Returns the names of the contenders that are measured for a model, besides torch."""
    if arguments.contenders:
        return arguments.contenders.split(",")
    if arguments.curve:
        uncompiled = [name for name in CONTENDER_FACTORIES if name not in ("fuse", "weight_casts")]
        return [*uncompiled, *BUDGETS, *(COMPILED_CONTENDERS if name in COMPILED_MODELS else ())]
    extra = ["fuse"] if name in MODELS["convert"] else []
    extra += ["weight_casts"] if precision == "bf16" else []
    return ["convert", "matmuls", *extra, "sac", "sac_half", "checkpoint"]


def _strip_wrapper_prefixes(name: str) -> str:
    """Returns a parameter's name without the names of the wrappers around its module."""
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("_orig_mod.")


def select_batch(name: str, precision: str, arguments) -> int:
    """Returns --batch, or the default of the model and precision."""
    if arguments.batch or not arguments.curve:
        return arguments.batch or 4
    fp32_and_bf16_batch = CURVE.get(name, (1, 4))
    return fp32_and_bf16_batch[PRECISIONS.index(precision)]


def measure_model(name: str, precision: str, arguments) -> list[dict]:
    """Returns a row for each contender. After a budget that cannot be met, smaller budgets are not tried."""
    torch.manual_seed(0)
    eager, size = create_model(name)
    x = random_inputs(name, select_batch(name, precision, arguments), size).to(arguments.device)
    eager = eager.to(arguments.device)
    contenders = {"torch": Contender(eager, select_autocast("torch", precision, arguments))}
    expected = contenders["torch"].compute_gradients(x)
    rows: dict[str, dict] = {}
    are_budgets_met = True
    for contender in ["torch", *select_contenders(name, precision, arguments)]:
        is_share = is_budget(contender) and contender != "least"
        if is_share and not are_budgets_met:
            continue
        try:
            if contender != "torch":
                autocast = select_autocast(contender, precision, arguments)
                with autocast():
                    model = make_contender(contender, eager, x)
                contenders[contender] = Contender(model, autocast, NUM_PARTS.get(contender, 1))
            actual = contenders[contender].compute_gradients(x)
            rows[contender] = {
                "what": name,
                "shape": "x".join(map(str, x.shape)),
                "dtype": precision,
                "threads": arguments.threads,
                "contender": contender,
                "same_bits": _share_of_equal_gradients(actual, expected),
                "kept_MiB": contenders[contender].measure_kept(x),
                "peak_MiB": contenders[contender].measure_peak(x),
            }
        except Exception as error:  # Some contenders do not take some models; the others are still measured.
            are_budgets_met = are_budgets_met and not (is_share and isinstance(error, ValueError))
            print(f"{name}: {contender}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
            contenders.pop(contender, None)
    if precision == "bf16":
        _print_weight_share(name, eager, rows["torch"]["peak_MiB"])
    for _ in range(arguments.repeats):
        # Contenders take turns, so that a slow minute of the machine slows all of them.
        for contender in contenders.values():
            contender.time_step(x)
    conditions = provenance(arguments.device)
    return [row | percentiles(contenders[k].times_us) | conditions for k, row in rows.items()]


def _share_of_equal_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the share of gradients that have the expected bits."""
    actual = {_strip_wrapper_prefixes(name): gradient for name, gradient in actual.items()}
    return sum(torch.equal(actual[name], expected[name]) for name in expected) / len(expected)


def _print_weight_share(name: str, model, peak_mib: float) -> None:
    """Prints a note if the batch is so small that autocast's copies of weights dominate the peak."""
    copies_mib = sum(2 * p.numel() for p in model.parameters() if p.ndim > 1) / MIB  # bf16 has 2 bytes.
    if copies_mib > peak_mib / 4:
        print(f"{name}: copies of weights take {copies_mib / peak_mib:.0%} of the peak")


def is_measured(rows: list[dict], results: str, name: str, precision: str, arguments) -> bool:
    """Returns whether the rows of a model were measured by these options, on this machine with this code."""
    batch = str(select_batch(name, precision, arguments))
    expected = (*identify_measurement(results, arguments.device), str(arguments.threads), batch)
    measured = [
        (row["device"], row["torch"], row["sources"], row["threads"], row["shape"].split("x")[0])
        for row in rows
        if (row["what"], row["dtype"]) == (name, precision)
    ]
    return set(measured) == {expected}


def merge_rows(old_rows: list[dict], new_rows: list[dict], models: list[str]) -> list[dict]:
    """Returns the new rows of one model and precision, and other old rows, in the order of `models`."""
    first = new_rows[0]
    rows = [row for row in old_rows if (row["what"], row["dtype"]) != (first["what"], first["dtype"])]
    order = {model: i for i, model in enumerate(models)}
    return sorted([*rows, *new_rows], key=lambda r: (r["dtype"] != "fp32", order.get(r["what"], len(order))))


def parse_arguments():
    parser = make_parser(__doc__)
    parser.add_argument("--models", help="vits, norms, curve, or names of models, separated by commas")
    parser.add_argument("--precision", help="fp32, bf16 or fp32,bf16 (default: fp32; with --curve both)")
    parser.add_argument("--batch", type=int, help="default: 4; with --curve by model and precision")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, help="default: 3; with --curve 7")
    parser.add_argument("--contenders", help="names from the list above, separated by commas")
    parser.add_argument("--curve", action="store_true", help="measure peak against time for each budget")
    parser.add_argument("--resume", action="store_true", help="skip models that were measured with this code")
    parser.add_argument(
        "--check-curve", action="store_true", help="measure nothing; print the faults of the curve"
    )
    arguments = parser.parse_args()
    arguments.models = arguments.models or ("curve" if arguments.curve else "vits,norms")
    precisions = (arguments.precision or ("fp32,bf16" if arguments.curve else "fp32")).split(",")
    if not set(precisions) <= set(PRECISIONS):
        parser.error(f"--precision takes fp32, bf16 or fp32,bf16, got {arguments.precision}")
    contender_names = {*CONTENDER_FACTORIES, *COMPILED_CONTENDERS, *BUDGETS}
    contenders = (arguments.contenders or "convert").split(",")
    if unknown := [name for name in contenders if name not in contender_names and not is_budget(name)]:
        parser.error(f"--contenders takes {', '.join(sorted(contender_names))}, got {', '.join(unknown)}")
    arguments.precisions = precisions
    arguments.repeats = arguments.repeats or (7 if arguments.curve else 3)
    return arguments


def check_measured_curve(arguments) -> None:
    """Prints the faults of the measured curve. Exits with status 1 if there are faults, otherwise with 0."""
    name = f"curve_{arguments.device}"
    rows = read_csv(name, arguments.out)
    if not rows:
        sys.exit(
            f"bench_convert: --check-curve found no rows in {arguments.out / name}.csv; run --curve first"
        )
    lines, has_faults = check_curve(rows)
    print(*lines, sep="\n")
    sys.exit(int(has_faults))


def main() -> None:
    arguments = parse_arguments()
    if arguments.check_curve:
        check_measured_curve(arguments)
    if arguments.device == "cpu":
        restart_with_reused_memory()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = (
        32  # All contenders share the code of a forward: one compilation each.
    )
    words = arguments.models.split(",")
    models_by_word = {word: MODELS[group] for word, group in MODEL_GROUPS.items()}
    names = [name for word in words for name in models_by_word.get(word, [word])]
    runs = [(name, precision) for precision in arguments.precisions for name in names]
    begin = time.monotonic()
    for i, (name, precision) in enumerate(runs, 1):
        group = "curve" if arguments.curve else "convert" if name in MODELS["convert"] else "convert_vits"
        results = f"{group}_{arguments.device}"
        rows = read_csv(results, arguments.out)
        if arguments.resume and is_measured(rows, results, name, precision, arguments):
            print(f"{i}/{len(runs)} {name} {precision}: measured before", flush=True)
            continue
        rows = merge_rows(rows, measure_model(name, precision, arguments), MODELS[group])
        path = write_table(write_csv(results, rows, arguments.out))
        minutes = (time.monotonic() - begin) / 60
        print(f"{i}/{len(runs)} {name} {precision}, {minutes:.1f} minutes: {path}", flush=True)
    if arguments.curve:
        results = f"curve_{arguments.device}"
        draw_curve(read_csv(results, arguments.out), arguments.out / f"{results}.png")


if __name__ == "__main__":
    main()
