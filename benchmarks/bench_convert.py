"""Real models by `fastvit.convert` and by what else reduces kept bytes: bytes, peak of a step, and its time.

Contenders, each from the eager model:

    convert, products   fastvit.convert, and with products=True
    0.8, least          fastvit.convert with budget=0.8 and budget="least"
    weight_casts        with weight_casts=True (bf16 only)
    fuse                fastvit.fuse, then fastvit.convert (models with BatchNorm only): other roundings
    sac                 selective checkpointing of each block: products, convolutions and attention are kept
    sac_half            torchtitan's: every second matrix product is repeated too
    checkpoint          each block is checkpointed as a whole

Kept bytes are the allocator's live bytes after one training forward minus those before. The peak is that of a
whole step, above the bytes before it and without the gradients of weights. Gradients are compared with the
eager model's, bit by bit. Time is processor time, on a GPU wall time until its work is done.

`--curve` measures budgets from 0.8 down beside the others (`--compiled`: and torch.compile of the model, of
selective checkpointing, and of converted models), and draws bytes against time to curve_DEVICE.png.

    python benchmarks/bench_convert.py [--models vits|norms|vit_small_patch16_224,torchvision:vit_b_16]
                                       [--precision fp32|bf16] [--batch 8] [--threads 1] [--repeats 5]
                                       [--contenders convert,products] [--device cpu|cuda]
                                       [--curve [--compiled]]

Needs timm, torchvision and transformers (`pip install '.[models]'`). Writes results/convert_vits_DEVICE.csv
(of ViTs and two language models) and convert_DEVICE.csv (of models with BatchNorm), in which rows of models
that were not measured remain, and their tables.
"""

import copy
import functools
import time
from pathlib import Path

import torch
from harness import command_line, percentiles, provenance, read_csv, reuse_memory, timed_us, write_csv
from real_models import create, inputs
from report import write_table
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fastvit
from fastvit.conversion.blocks import find_blocks
from fastvit.memory import live_bytes, peak_bytes

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
MODELS = {"convert_vits": VITS.split(), "convert": NORMS.split()}
GROUPS = {"vits": "convert_vits", "norms": "convert"}
MIB = 2**20


class Contender:
    def __init__(self, model, arguments, cache: bool = True):
        self.model, self.device, self.cache = model, arguments.device, cache
        self.is_bf16 = arguments.precision == "bf16"
        self.us = []

    def forward(self, x):
        torch.manual_seed(0)  # drop path and dropout draw the same
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
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
        peak = peak_bytes(lambda: self.step(x), self.device) / MIB
        for hook in hooks:
            hook.remove()
        return peak

    def timed(self, x) -> None:
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        timed_us(lambda: None, x.device)  # waits until a GPU has finished earlier work
        self.us.append(timed_us(lambda: self.step(x), x.device, clock))
        self.zero()


def _innermost_blocks(model) -> set:
    found = set(find_blocks(model))
    return {block for block in found if not any(m in found for m in block.modules() if m is not block)}


def checkpointed(model, context_fn=None):
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
    """Keeps convolutions, attention and products; with repeats_second every second product is repeated."""

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


MAKERS = {  # a contender's name -> what makes it of a copy of the eager model
    "convert": fastvit.convert,
    "products": lambda model: fastvit.convert(model, products=True),
    "weight_casts": lambda model: fastvit.convert(model, weight_casts=True),
    "fuse": lambda model: fastvit.convert(fastvit.fuse(model)),
    "sac": lambda model: checkpointed(model, selective(False)),
    "sac_half": lambda model: checkpointed(model, selective(True)),
    "checkpoint": checkpointed,
}
BUDGETS = ("0.8", "0.6", "0.5", "0.4", "0.3", "0.2", "0.15", "0.1", "0.05", "least")
OTHERS = {  # name and mark in the picture
    "sac": ("selective checkpointing", "s"),
    "sac_half": ("every second product", "D"),
    "checkpoint": ("block checkpointing", "^"),
    "compiled_sac": ("selective checkpointing, compiled", "x"),
}
COMPILED = tuple(f"compiled_{name}" for name in ("eager", "sac", "convert", "0.4", "0.2", "0.1"))


def make(contender: str, eager, x):
    model, plain = copy.deepcopy(eager), contender.removeprefix("compiled_")
    if plain in BUDGETS:
        given = {"budget": "least"} if plain == "least" else {"budget": float(plain), "example_inputs": x}
        model = fastvit.convert(model, weight_casts=torch.is_autocast_enabled(x.device.type), **given)
    elif plain != "eager":
        model = MAKERS[plain](model)
    return torch.compile(model) if contender in COMPILED else model


def chosen(name: str, arguments) -> list[str]:
    """The contenders that are measured for a model."""
    if arguments.contenders:
        return arguments.contenders.split(",")
    if arguments.curve:
        some = [contender for contender in MAKERS if contender not in ("fuse", "weight_casts")]
        return [*some, *BUDGETS, *(COMPILED if arguments.compiled else ())]
    some = ["fuse"] if name in MODELS["convert"] else []
    some += ["weight_casts"] if arguments.precision == "bf16" else []
    return ["convert", "products", *some, "sac", "sac_half", "checkpoint"]


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("_orig_mod.")


def measure(name: str, arguments) -> list[dict]:
    """A row for each contender."""
    torch.manual_seed(0)
    eager, size = create(name)
    eager, x = eager.to(arguments.device), inputs(name, arguments.batch, size).to(arguments.device)
    by, rows = {"torch": Contender(eager, arguments)}, {}
    want = by["torch"].gradients(x)
    for contender in ["torch", *chosen(name, arguments)]:
        try:
            if contender != "torch":
                with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.precision == "bf16"):
                    model = make(contender, eager, x)
                by[contender] = Contender(model, arguments, cache=contender not in ("weight_casts", *BUDGETS))
            got = {_plain(n): g for n, g in by[contender].gradients(x).items()}
            rows[contender] = {
                "what": name,
                "shape": "x".join(map(str, x.shape)),
                "dtype": arguments.precision,
                "threads": arguments.threads,
                "contender": contender,
                "same_bits": sum(torch.equal(got[n], want[n]) for n in want) / len(want),
                "kept_MiB": by[contender].kept(x),
                "peak_MiB": by[contender].peak(x),
            }
        except Exception as error:  # a contender may not take a model; the rest is still measured
            print(f"{name}: {contender}: {type(error).__name__}: {str(error)[:150]}")
            by.pop(contender, None)
    for _ in range(arguments.repeats):  # contenders take turns, so that a slow minute hits all
        for one in by.values():
            one.timed(x)
    where = provenance(arguments.device)
    return [row | percentiles(by[contender].us, (50,)) | where for contender, row in rows.items()]


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """`new`, and the rows of other models, in the order of MODELS."""
    first = new[0]
    rows = [row for row in old if (row["what"], row["dtype"]) != (first["what"], first["dtype"])]
    order = {model: i for i, model in enumerate(sum(MODELS.values(), []))}
    return sorted([*rows, *new], key=lambda r: (r["dtype"] != "fp32", order.get(r["what"], len(order))))


def curve(rows: list[dict], path: Path) -> None:
    """Bytes against time, for each model: our budgets as a line, other contenders as points."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys((row["what"], row["dtype"]) for row in rows))
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), layout="constrained", squeeze=False
    )
    for model, axis in zip(models, axes.flat, strict=False):
        found = {row["contender"]: row for row in rows if (row["what"], row["dtype"]) == model}
        at = {
            contender: tuple(float(r[key]) / float(found["torch"][key]) for key in ("kept_MiB", "p50_us"))
            for contender, r in found.items()
        }
        eager = [point for contender, point in at.items() if contender not in (*OTHERS, *COMPILED)]
        axis.plot(*zip(*sorted(eager), strict=True), "o-", label="fastvit.convert, by budget", markersize=4)
        compiled = [at[contender] for contender in COMPILED if contender in at and contender not in OTHERS]
        if compiled:
            axis.plot(*zip(*sorted(compiled), strict=True), "o--", label="the same, compiled", markersize=4)
        for contender, (label, marker) in OTHERS.items():
            if contender in at:
                axis.plot(*at[contender], marker, color="#d6a419", label=label)
        axis.set_title(", ".join(model), fontsize=9)
        axis.set_xlabel("kept for backward, eager = 1", fontsize=8)
        axis.set_ylabel("time of a step, eager = 1", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(models) :]:
        axis.remove()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", default="vits,norms", help="vits, norms, or names of models, by commas")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contenders", help="names from the list above, by commas")
    parser.add_argument("--curve", action="store_true", help="bytes against time, from budget to budget")
    parser.add_argument("--compiled", action="store_true", help="with --curve: under torch.compile too")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        reuse_memory()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 32  # the contenders share one forward
    for given in arguments.models.split(","):
        for name in MODELS[GROUPS[given]] if given in GROUPS else (given,):
            group = "convert" if name in MODELS["convert"] else "convert_vits"
            results = f"{'curve' if arguments.curve else group}_{arguments.device}"
            rows = merged(read_csv(results, arguments.out), measure(name, arguments))
            path = write_table(write_csv(results, rows, arguments.out))
            if arguments.curve:
                curve(rows, path.with_suffix(".png"))
            print(f"{name} {arguments.precision}: {path}", flush=True)


if __name__ == "__main__":
    main()
