"""The tables of layers, ops and exchanges that pages quote; page_results.py calls these functions."""

from collections.abc import Sequence

from harness import APEX, COMPILED, markdown_table
from quoting import Row, describe_conditions, format_ms, format_range, make_table, ratio, select_rows

IN_PLACE, FUSED = "InPlaceABN", "BatchNormAct"
FUNCTIONS = {  # a case of bench_layers.py -> the call
    "layer_norm": "`LayerNorm`",
    "gelu": '`act(x, "gelu")`',
    "gelu_tanh": '`act(x, "gelu_tanh")`',
    "silu": '`act(x, "silu")`',
    "swiglu": '`gated_act(x, gate, "silu")`',
    "geglu": '`gated_act(x, gate, "gelu")`',
}
OP_GROUPS = {  # a column of the table of ops -> its ops
    "statistics": ("bn_stats",),
    "sums of the backward": ("bn_reduce",),
    "normalising, forward and backward": ("bn_forward", "bn_backward"),
    "the same in place": ("bn_forward_inplace", "bn_backward from_output"),
}


def layers() -> str:
    """Layers beside torch's, over the shapes of bench_layers.py in fp32 and bf16."""
    keys = ("what", "contender", "dtype", "shape")
    rows = select_rows("layers_cpu", keys=keys, threads="1", direction="both")
    lines = []
    for title, other, what, contender in (
        ("`InPlaceABN`", "BatchNorm2d, LeakyReLU", "batch norm", IN_PLACE),
        ("`BatchNormAct`", "BatchNorm2d, LeakyReLU", "batch norm", FUSED),
        ("`LayerNorm`", "LayerNorm", "layer_norm", "fastvit"),
        ("`functional.gated_act`", "SiLU and a product (SwiGLU)", "swiglu", "fastvit"),
    ):
        cases = [key[2:] for key in rows if key[:2] == (what, "torch") and key[2] in ("fp32", "bf16")]
        fastvit_rows, torch_rows, compiled_rows = (
            [rows[(what, name, *case)] for case in cases] for name in (contender, "torch", COMPILED)
        )
        lines.append((title, other, *_compare(fastvit_rows, torch_rows, compiled_rows)))
    header = ["layer", "in place of", "step", "relative to torch", "to torch.compile", "keeps"]
    return "\n".join(markdown_table(header, lines))


def _compare(fastvit_rows: list[Row], torch_rows: list[Row], compiled_rows: list[Row]) -> Sequence[str]:
    """Returns cells of the time, its ratios to torch's and torch.compile's, and the activations kept."""
    kept, torch_kept = (
        format_range([float(row["kept"]) for row in rows], "{:.1f}", "")
        for rows in (fastvit_rows, torch_rows)
    )
    ratios = (format_range(map(ratio, fastvit_rows, rows)) for rows in (torch_rows, compiled_rows))
    times = f"{format_ms(fastvit_rows)}, not {format_ms(torch_rows)}"
    return times, *ratios, f"{kept}, not {torch_kept}" if kept != torch_kept else kept


def layers_by_shape() -> str:
    """Steps of batch norms, each shape for itself."""
    keys = ("dtype", "shape", "contender")
    rows = select_rows("layers_cpu", keys=keys, what="batch norm", threads="1", direction="both")
    lines = []
    for dtype, shape in dict.fromkeys(key[:2] for key in rows):
        cells = [rows[dtype, shape, name] for name in ("torch", COMPILED, FUSED, IN_PLACE)]
        in_place = cells[-1]
        faster = (f"{ratio(row, in_place):.2f}x" for row in cells[:2])
        times = (format_ms([row]) for row in cells)
        lines.append((shape, dtype, *times, ", ".join(faster), f"{float(in_place['share_of_copy']):.2f}"))
    header = ["shape", "dtype", "torch", COMPILED, FUSED, IN_PLACE, f"torch, {COMPILED} / {IN_PLACE}"]
    return make_table([*header, "8 passes / time"], lines, "layers_cpu")


def functions() -> str:
    """The opt-in functions: torch's and torch.compile's time divided by fastvit's, forward and backward."""
    keys = ("what", "dtype", "contender")
    rows = select_rows("layers_cpu", keys=keys, threads="1", direction="both")
    dtypes = ("fp32", "bf16", "fp16", "fp32 to bf16")
    lines = []
    for what, title in FUNCTIONS.items():
        cells = []
        for dtype in dtypes:
            row = rows.get((what, dtype, "fastvit"))
            references = (rows[what, dtype, name] for name in ("torch", COMPILED)) if row else ()
            cells.append(", ".join(f"{ratio(other, row):.2f}" for other in references if row))
        lines.append((title, *cells))
    return make_table(["", *dtypes], lines, "layers_cpu")


def cpu_ops() -> str:
    """Bandwidths of ops divided by a copy's, least to most over the shapes, by dtype and layout."""
    rows = select_rows("ops_cpu", keys=("dtype", "shape", "what"), contender="fastvit", threads="1")
    kinds: dict[tuple[str, str], list[str]] = {}
    for dtype, shape in dict.fromkeys(key[:2] for key in rows):
        kinds.setdefault((dtype, "planes" if shape.endswith("nchw") else "rows"), []).append(shape)
    lines = [
        (f"{dtype}, {layout}", *(_format_shares(rows, dtype, shapes, ops) for ops in OP_GROUPS.values()))
        for (dtype, layout), shapes in kinds.items()
    ]
    return make_table(["", *OP_GROUPS], lines, "ops_cpu")


def _format_shares(rows, dtype: str, shapes: list[str], ops: tuple[str, ...]) -> str:
    values = [float(rows[dtype, shape, op]["share_of_copy"]) for shape in shapes for op in ops]
    return format_range(values, unit="")


def instruction_sets() -> str:
    """AVX-512's bandwidths divided by AVX2's, over all shapes and ops."""
    keys = ("dtype", "shape", "what")
    wide, narrow = (
        select_rows(name, keys=keys, contender="fastvit", threads="1") for name in ("ops_cpu", "ops_cpu_avx2")
    )
    ranges = []
    for dtype in ("fp32", "bf16"):
        shares = sorted(ratio(wide[key], narrow[key], "share_of_copy") for key in wide if key[0] == dtype)
        ranges.append(f"in {dtype} {shares[len(shares) // 2]:.2f}x ({shares[0]:.2f} to {shares[-1]:.2f})")
    name = next(iter(wide.values()))["instructions"]
    return f"{name} has {' and '.join(ranges)} AVX2's bandwidth (medians and ranges over shapes and ops)."


def synchronised_layers() -> str:
    """A step of SyncBatchNorm over two ranks, beside one without ranks and apex's."""
    keys = ("shape", "contender")
    rows = select_rows("sync_cpu", keys=keys, world="2", what="step", direction="both")
    shapes = list(dict.fromkeys(shape for shape, _ in rows))
    contenders = ("SharedMemory", "Collective", "local", APEX)
    lines = []
    for shape in shapes:
        cells = [rows[shape, name] for name in contenders]
        times = f"{ratio(cells[0], cells[2]):.2f}x", f"{ratio(cells[0], cells[3]):.2f}x"
        lines.append((shape, *(format_ms([row]) for row in cells), *times))
    header = ["activation", "fastvit", "fastvit, collectives", "no exchange", "apex 25.05"]
    return make_table([*header, "of no exchange", "of apex"], lines, "sync_cpu")


def hosts() -> str:
    """An exchange of moments and sums between simulated hosts, beside bare collectives."""
    keys = ("shape", "contender")
    rows = select_rows("sync_hosts_cpu", keys=keys, direction="both")
    lines = []
    for shape in dict.fromkeys(shape for shape, _ in rows):
        exchange, bare = rows[shape, "Collective"], rows[shape, "bare"]
        lines.append((shape, format_ms([exchange]), format_ms([bare]), f"{ratio(exchange, bare):.2f}x"))
    return make_table(["channels", "fastvit", "all_gather, all_reduce", "of these"], lines, "sync_hosts_cpu")


def _fastvit_contender(what: str) -> str:
    return IN_PLACE if what == "batch norm" else "fastvit"


def gpu_layers() -> str:
    """Layers on a GPU, beside torch's and torch.compile's."""
    rows = select_rows("layers_cuda", keys=("what", "shape", "contender"), direction="both")
    lines = []
    for what, shape in dict.fromkeys(key[:2] for key in rows):
        times = (rows[what, shape, name]["p50_us"] for name in ("torch", COMPILED, _fastvit_contender(what)))
        lines.append((what, shape, *(f"{float(us):.0f} us" for us in times)))
    return make_table(["a step in bf16", "shape", "torch", COMPILED, "fastvit"], lines, "layers_cuda")


def gpu_summary() -> str:
    """The sentence of README on a GPU."""
    rows = select_rows("layers_cuda", keys=("what", "contender", "shape"), direction="both")
    titles = {"batch norm": "BatchNorm and LeakyReLU", "layer_norm": "LayerNorm", "swiglu": "SwiGLU"}
    phrases = []
    for what, title in titles.items():
        shapes = [shape for case, name, shape in rows if (case, name) == (what, COMPILED)]
        contender = _fastvit_contender(what)
        ratios = [ratio(rows[what, contender, shape], rows[what, COMPILED, shape]) for shape in shapes]
        phrases.append(f"{title} {format_range(ratios)}")
    text = f"A layer's step in bf16 relative to torch.compile's: {'; '.join(phrases)}."
    return f"{text} {describe_conditions('layers_cuda', 'convert_vits_cuda')}"


def gpu_ops() -> str:
    """Bandwidths of ops on a GPU divided by a copy's, and those of torch's SyncBatchNorm."""
    rows = select_rows("ops_cuda", keys=("shape", "what", "contender"), dtype="bf16")
    ops = ("bn_stats", "bn_forward", "bn_reduce", "bn_backward")
    in_place = ("bn_forward_inplace", "bn_reduce from_output", "bn_backward from_output")
    lines = []
    for shape in dict.fromkeys(shape for shape, _, _ in rows):
        cells = [rows[shape, op, "fastvit"] for op in (*ops, *in_place)]
        shares = [f"{float(row['share_of_copy']):.2f}" for row in cells]
        torch_shares = (f"{float(rows[shape, op, 'torch']['share_of_copy']):.2f}" for op in ops)
        lines.append((shape, *shares[:4], ", ".join(shares[4:]), ", ".join(torch_shares)))
    header = ["activation", *ops, "the last three in place", "torch's SyncBatchNorm, the four"]
    return make_table(header, lines, "ops_cuda")


def host_time() -> str:
    """The time of a step on tiny tensors, as a multiple of torch's."""
    lines = []
    for device in ("cpu", "cuda"):
        rows = select_rows(f"host_{device}", keys=("what", "contender"), direction="both")
        lines += [
            (
                what,
                contender,
                "beside a GPU" if device == "cuda" else "CPU",
                f"{1 / float(row['times']):.2f}x",
            )
            for (what, contender), row in rows.items()
            if contender != "torch" and (device == "cpu" or what.startswith("vit"))
        ]
    return make_table(
        ["model or layer", "contender", "host", "of torch's time"], lines, "host_cpu", "host_cuda"
    )
