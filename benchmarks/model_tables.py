"""The tables of models that pages quote; page_results.py calls these functions."""

from collections.abc import Iterable

from harness import markdown_table
from quoting import Rows, describe_conditions, format_range, format_saving, make_table, ratio, select_rows
from result_tables import format_cell

MODELS = {  # a model of the curve -> its title
    "vit_small_patch16_224": "ViT-S/16",
    "resnet50": "ResNet-50",
    "mobilevit_s": "MobileViT-S",
    "transformers:llama": "a Llama of 8 blocks",
}
GPU_MODELS = ("vit_small_patch16_224", "resnet50")  # which were measured on a GPU
CONTENDERS = {  # a contender -> its title
    "convert": "`convert(model)`",
    "0.5": "`convert(model, budget=0.5)`",
    "least": '`convert(model, budget="least")`',
    "matmuls": "`convert(model, matmuls=True)`",
    "checkpoint": "`torch.utils.checkpoint` of each block",
    "sac": "selective checkpointing: keeps matmuls, convolutions, attention",
    "sac_half": "the same, every second matmul recomputed",
    "accumulate": "two half batches, gradients accumulated",
    "compiled_eager": "`torch.compile`",
    "compiled_convert": "`torch.compile(convert(model))`",
}
HEADLINE = ("convert", "0.5", "least", "checkpoint", "compiled_eager")


def select_curve(dtype: str) -> Rows:
    return select_rows("curve_cpu", keys=("what", "contender"), dtype=dtype)


def select_gpu_models() -> Rows:
    return select_rows("convert_vits_cuda", "convert_cuda", keys=("what", "contender"), dtype="bf16")


def models() -> str:
    """The peak and the time of a step in bf16, beside checkpointing and torch.compile; then on a GPU."""
    lines = []
    for place, rows, names in (
        ("CPU", select_curve("bf16"), MODELS),
        ("H200", select_gpu_models(), GPU_MODELS),
    ):
        for model in names:
            batch = rows[model, "torch"]["shape"].split("x")[0]
            title = f"{place}, {MODELS[model]}, batch {batch}"
            lines.append([title, *_model_cells(rows, model, HEADLINE)])
    header = ["bf16", "original", "`convert`", "`budget=0.5`", '`budget="least"`']
    return "\n".join(markdown_table([*header, "checkpoint each block", "`torch.compile`"], lines))


def _model_cells(rows: Rows, model: str, contenders: Iterable[str]) -> list[str]:
    """Returns the peak and time of a model, and the savings of contenders."""
    eager = rows[model, "torch"]
    peak, ms = float(eager["peak_MiB"]), float(eager["p50_us"]) / 1e3
    size = f"{peak:.0f} MiB" if peak < 1024 else f"{peak / 1024:.1f} GiB"
    return [f"{size}, {ms:.0f} ms", *(_format_cell(rows, model, name, "not run") for name in contenders)]


def _format_cell(rows: Rows, model: str, contender: str, missing: str) -> str:
    """Returns the saving of a contender, or `missing` if the contender was not measured."""
    row = rows.get((model, contender))
    return format_saving(row, rows[model, "torch"]) if row else missing


def _choices(dtype: str) -> str:
    """Every contender of the curve, with a column for each model."""
    rows, lines = select_curve(dtype), []
    for contender, title in CONTENDERS.items():
        lines.append((title, *(_format_cell(rows, model, contender, "") for model in MODELS)))
    return make_table(["", *MODELS.values()], lines, "curve_cpu")


def choices_fp32() -> str:
    """Every contender of the curve in fp32."""
    return _choices("fp32")


def choices_bf16() -> str:
    """Every contender of the curve under bf16 autocast."""
    return _choices("bf16")


def largest_batches() -> str:
    """The largest batch of each tool, and what a report says of it."""
    rows = select_rows("batches_cpu", keys=("what", "contender"))
    titles = {
        "torch": "original",
        "convert": "`convert`",
        "least": '`budget="least"`',
        "checkpoint": "checkpoint",
    }
    lines = []
    for model in dict.fromkeys(model for model, _ in rows):
        lines.append((MODELS[model], *(format_cell(rows[model, name], {}) for name in titles)))
    memory = next(iter(rows.values()))["memory_MiB"]
    return make_table([f"images in {int(memory) / 1024:g} GiB, bf16", *titles.values()], lines, "batches_cpu")


def wants() -> str:
    """One row for each of the four people whom README names."""
    batches = select_rows("batches_cpu", keys=("what", "contender"))
    hybrid, memory = batches["mobilevit_s", "convert"], int(batches["mobilevit_s", "torch"]["memory_MiB"])
    curve = select_curve("bf16")
    half, eager = (curve["vit_small_patch16_224", name] for name in ("0.5", "torch"))
    sync = select_rows("sync_cpu", keys=("shape", "contender"), world="2", what="step", direction="both")
    shapes = dict.fromkeys(shape for shape, _ in sync)
    of_local = [ratio(sync[shape, "SharedMemory"], sync[shape, "local"]) for shape in shapes]
    lines = [
        (
            "out of memory with a convolutional or hybrid model",
            "`fastvit.convert(model)`",
            f"MobileViT-S trains with batch {hybrid['batch']}, not "
            f"{batches['mobilevit_s', 'torch']['batch']}, in {memory / 1024:g} GiB (AdamW, bf16, CPU)",
            "[choosing](docs/choosing.md)",
        ),
        (
            "out of memory with a ViT",
            "`fastvit.convert(vit, budget=0.5)`",
            f"ViT-S/16 has {ratio(half, eager, 'peak_MiB'):.0%} of the peak at {ratio(half, eager):.2f}x the "
            "time of a step (bf16, CPU)",
            "[converting](docs/converting.md)",
        ),
        (
            "a small batch per device",
            "`model = fastvit.convert_syncbn_model(model)`",
            f"a synchronised layer's step takes {format_range(of_local)} that of a local one (2 CPU ranks)",
            "[statistics](docs/sharing-statistics.md)",
        ),
        (
            "a script with `from apex import amp`",
            "`python -m fastvit.compat train.py`",
            "O0 to O3, DDP, SyncBatchNorm and fused optimizers run unchanged, over torch's",
            "[from apex](docs/migrating-from-apex.md)",
        ),
    ]
    return "\n".join(markdown_table(["problem", "use", "result", "read"], lines))


def cpu_conditions() -> str:
    """The machine and the commit of README's results on a CPU."""
    return describe_conditions("batches_cpu", "curve_cpu", "layers_cpu", "sync_cpu", "host_cpu")


def gpu_models() -> str:
    """Converted models on a GPU."""
    rows, contenders = select_gpu_models(), ("convert", "matmuls", "checkpoint")
    header = ["a step in bf16, 512 images", "original", "`convert`", "`matmuls=True`", "checkpoint"]
    lines = [[MODELS[model], *_model_cells(rows, model, contenders)] for model in GPU_MODELS]
    return make_table(header, lines, "convert_vits_cuda", "convert_cuda")


def frozen_models() -> str:
    """Frozen networks behind a trained layer."""
    rows = select_rows("convert_vits_cpu", keys=("what", "contender"), dtype="fp32")
    names = {"frozen:mobilenet_v2": "MobileNetV2", "frozen:vgg16": "VGG-16"}
    phrases = []
    for name, title in names.items():
        converted, eager = rows[name, "convert"], rows[name, "torch"]
        saving = f"{1 - ratio(converted, eager, 'kept_MiB'):.1%} less"
        phrases.append(f"a frozen {title} keeps {saving} at {ratio(converted, eager):.2f}x the time")
    return f"Behind a trained layer {' and '.join(phrases)}. {describe_conditions('convert_vits_cpu')}"
