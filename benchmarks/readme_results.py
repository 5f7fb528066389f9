"""Writes the results that README.md quotes, from results/*.csv.

    python benchmarks/readme_results.py [--check]

README.md has a place for each function in PLACES, between `<!-- NAME -->` and `<!-- /NAME -->`. With --check
the program writes nothing, and exits with 1 if a place has another text: `make lint`.
"""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable

from harness import ROOT, markdown_table, read_csv

README = ROOT / "README.md"
COLUMNS = 100
Row = dict[str, str]


def select_rows(*names: str, keys: tuple[str, ...], **conditions: str) -> dict[tuple[str, ...], Row]:
    """Returns the rows of some results that meet the conditions, by their values of `keys`."""
    return {
        tuple(row[key] for key in keys): row
        for name in names
        for row in read_csv(name)
        if all(row[column] == value for column, value in conditions.items())
    }


def ratio(row: Row, other: Row, column: str = "p50_us") -> float:
    return float(row[column]) / float(other[column])


def format_less(row: Row, other: Row) -> str:
    """Returns how many percent less a row's model keeps, and the time of its step."""
    return f"{1 - ratio(row, other, 'kept_MiB'):.0%} less at {ratio(row, other):.2f}x"


def convert_table(models: dict[str, str], contenders: dict[str, str]) -> str:
    rows = select_rows("convert_vits_cpu", "convert_cpu", keys=("what", "contender"), dtype="fp32")
    lines = []
    for model, title in models.items():
        eager = rows[model, "torch"]
        cells = [title, f"{float(eager['kept_MiB']):.0f} MiB"]
        for contender in contenders:
            row = rows[model, contender]
            cells += [f"{ratio(row, eager, 'kept_MiB') - 1:+.0%}", f"{ratio(row, eager):.2f}x"]
        lines.append(cells)
    titles = [title for name in contenders.values() for title in (name, "time")]
    return "\n".join(markdown_table(["model", "kept by the original", *titles], lines))


def convolutional_models() -> str:
    models = {name: f"{name} (BatchNorm)" for name in ("mobilevit_s", "resnet50")}
    return convert_table(models, {"convert": "`convert`", "fuse": "`fuse`, then `convert`"})


def vits() -> str:
    model = "vit_small_patch16_224"
    return convert_table({model: model}, {"convert": "`convert`", "matmuls": "`matmuls=True`"})


def in_place_layer() -> str:
    shape = "128x384x14x14"
    rows = select_rows("layers_cpu", keys=("contender",), shape=shape, threads="1", direction="both")
    in_place, eager, compiled = (rows[name,] for name in ("InPlaceABN", "torch", "torch.compile"))
    return (
        f"InPlaceABN at {shape} takes {ratio(in_place, eager):.2f}x the time of torch's BatchNorm2d and "
        f"LeakyReLU, and keeps {float(in_place['kept']):.2f} tensors, not {float(eager['kept']):.2f}; of "
        f"torch.compile of these two it takes {ratio(in_place, compiled):.2f}x the time."
    )


def budgets() -> str:
    rows = select_rows("curve_cpu", keys=("contender",), what="vit_small_patch16_224", dtype="bf16")
    eager = rows["torch",]
    at_half, at_least, at_checkpoint = (
        f"{ratio(row, eager, 'peak_MiB'):.0%} of the peak at {ratio(row, eager):.2f}x the time"
        for row in (rows[name,] for name in ("0.5", "least", "checkpoint"))
    )
    return (
        f'In bf16 a step with `budget=0.5` takes {at_half}, with `budget="least"` {at_least}, and with '
        f"checkpointing of blocks {at_checkpoint} ([which when](docs/converting.md#which-tool-when))."
    )


def synchronised_layer() -> str:
    world, shape = "2", "32x64x28x28"
    rows = select_rows(
        "sync_apex_cpu", keys=("contender",), world=world, shape=shape, what="step", direction="both"
    )
    other = "apex SyncBatchNorm"
    times = ratio(rows["SharedMemory",], rows[other,])
    line = (f"SyncBatchNorm, {world} ranks, {shape}", other, f"{times:.2f}x")
    return "\n".join(markdown_table(["measured on a CPU", "against", "time"], [line]))


def gpu_layers() -> str:
    rows = select_rows("layers_cuda", keys=("what", "shape", "contender"), direction="both")
    lines = []
    for title, what, contender, shape in (
        ("BatchNorm and LeakyReLU", "batch norm", "InPlaceABN", "128x256x56x56 channels_last"),
        ("BatchNorm and LeakyReLU", "batch norm", "InPlaceABN", "128x256x56x56"),
        ("BatchNorm and LeakyReLU", "batch norm", "InPlaceABN", "16x256x28x28 channels_last"),
        ("LayerNorm", "layer_norm", "fastvit", "50432x768"),
        ("GELU", "gelu", "fastvit", "50432x768"),
        ("SwiGLU", "swiglu", "fastvit", "50432x768"),
    ):
        times = (rows[what, shape, name]["p50_us"] for name in ("torch", "torch.compile", contender))
        lines.append((f"{title}, {shape}", *(f"{float(us):.0f} us" for us in times)))
    return "\n".join(markdown_table(["a step on an H200, bf16", "torch", "torch.compile", "fastvit"], lines))


def gpu_models() -> str:
    rows = select_rows("convert_vits_cuda", "convert_cuda", keys=("what", "contender"), dtype="bf16")
    vit, resnet = "vit_small_patch16_224", "resnet50"
    savings = {
        (model, name): format_less(rows[model, name], rows[model, "torch"])
        for model, name in ((vit, "convert"), (vit, "matmuls"), (resnet, "convert"))
    }
    return (
        f"`convert` of {vit} with 512 images keeps {savings[vit, 'convert']} the time, with `matmuls=True` "
        f"{savings[vit, 'products']}, on a [slow host](docs/benchmarks.md#on-a-gpu); of {resnet} "
        f"{savings[resnet, 'convert']}."
    )


def host_time() -> str:
    shares = {}
    for device in ("cpu", "cuda"):
        rows = select_rows(f"host_{device}", keys=("what", "contender"), direction="both")
        shares[device] = {key: 1 / float(row["times"]) for key, row in rows.items()}
    vit = ("vit_tiny, 32 pixels, fp32", "convert")
    layers = [times for (_, contender), times in shares["cpu"].items() if contender == "fastvit"]
    return (
        f"On tiny tensors a ViT's step takes {shares['cpu'][vit]:.2f}x the time of the original, and a "
        f"layer's {min(layers):.1f}x to {max(layers):.1f}x; beside a GPU a ViT's step costs the host "
        f"{shares['cuda'][vit]:.1f}x (`benchmarks/bench_host.py`)."
    )


PLACES: tuple[Callable[[], str], ...] = (
    convolutional_models,
    vits,
    in_place_layer,
    budgets,
    synchronised_layer,
    gpu_layers,
    gpu_models,
    host_time,
)


def fill_places(text: str) -> str:
    """Returns README's text with the results of today. Raises SystemExit if it lacks a place."""
    for place in PLACES:
        name = place.__name__.replace("_", "-")
        pattern = rf"(?m)^( *)<!-- {name} -->\n(?s:.*?)^ *<!-- /{name} -->$"
        if not (match := re.search(pattern, text)):
            sys.exit(f"readme_results: README.md has no place <!-- {name} --> ... <!-- /{name} -->")
        result = place()
        if result.startswith("|"):
            result = f"\n{result}\n"  # some renderers find a table only between empty lines
        else:
            result = textwrap.fill(
                result, COLUMNS - len(match[1]), break_long_words=False, break_on_hyphens=False
            )
        lines = textwrap.indent(f"<!-- {name} -->\n{result}\n<!-- /{name} -->", match[1])
        text = text.replace(match[0], lines)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if README.md has other results")
    options = parser.parse_args()
    old = README.read_text()
    new = fill_places(old)
    if not options.check:
        README.write_text(new)
    elif new != old:
        difference = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "README.md", "results", lineterm=""
        )
        sys.exit("\n".join([*difference, "readme_results: run `python benchmarks/readme_results.py`"]))


if __name__ == "__main__":
    main()
