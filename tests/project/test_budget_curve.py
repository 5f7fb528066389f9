"""The budget curve's faults are found, its picture is drawn, and bench_convert measures and resumes it."""

import sys
from types import SimpleNamespace

import bench_convert
import harness
import pytest
import result_tables
import torch
from budget_curve import BUDGETS, check_curve, draw_curve, order_contenders
from torch import nn

EAGER = (100.0, 80.0, 1000.0)
GOOD = {  # contender -> peak, kept, time: convex, monotone, within every budget
    "torch": EAGER,
    "convert": (70.0, 56.0, 1050.0),
    "0.8": (80.0, 64.0, 1030.0),
    "0.5": (50.0, 40.0, 1100.0),
    "0.3": (30.0, 24.0, 1200.0),
    "least": (20.0, 16.0, 1300.0),
}


def curve_rows(model="vit", dtype="fp32", **measured):
    """Rows of the good curve, and of other contenders in its place or beside it."""
    named = {name.replace("budget_", "0."): values for name, values in measured.items()}
    return [
        {
            "what": model,
            "shape": "2x3x8x8",
            "dtype": dtype,
            "threads": "1",
            "contender": contender,
            "same_bits": "1",
            "peak_MiB": f"{peak:.4g}",
            "kept_MiB": f"{kept:.4g}",
            "p50_us": f"{us:.4g}",
            "device": "CPU",
            "torch": "2",
            "commit": "abc1234",
            "date": "2026-01-01",
        }
        for contender, (peak, kept, us) in {**GOOD, **named}.items()
    ]


def faults_of(**measured):
    lines, has_faults = check_curve(curve_rows(**measured))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [(kind, contender.split()[0]) for _, _, kind, contender, _ in cells], has_faults


@pytest.mark.parametrize(
    "peak, kept, time, expected",
    [
        pytest.param(40.0, 32.0, 1155.0, [], id="on_the_line"),
        pytest.param(40.0, 32.0, 1120.0, [], id="within_the_margin_of_the_line"),  # which is at 1150
        pytest.param(40.0, 32.0, 1110.0, ["peak: dominated", "kept: dominated"], id="below_the_line"),
        pytest.param(40.0, 60.0, 1110.0, ["peak: dominated"], id="peak_alone"),
        pytest.param(90.0, 32.0, 1110.0, ["kept: dominated"], id="kept_alone"),
        pytest.param(120.0, 90.0, 800.0, [], id="more_bytes_than_any_budget"),
        pytest.param(10.0, 8.0, 1290.0, ["peak: dominated", "kept: dominated"], id="faster_than_the_least"),
        pytest.param(
            10.0, 8.0, 1310.0, ["peak: below the least", "kept: below the least"], id="slower_than_the_least"
        ),
        pytest.param(19.6, 15.7, 1290.0, [], id="the_least_within_both_margins"),
        pytest.param(19.6, 15.7, 1250.0, ["peak: dominated", "kept: dominated"], id="beyond_the_margin"),
    ],
)
def test_a_contender_dominates_where_the_line_takes_more_time(peak, kept, time, expected):
    found, has_faults = faults_of(checkpoint=(peak, kept, time))
    assert found == [(kind, "checkpoint") for kind in expected]
    assert has_faults == any("dominated" in kind for kind in expected)


@pytest.mark.parametrize(
    "budget, measured, expected",
    [
        pytest.param("0.4", (40.0, 32.0, 1180.0), [], id="convex"),  # the mix of 0.5 and 0.3 takes 1150
        pytest.param("0.4", (40.0, 32.0, 1190.0), ["not convex"], id="not_convex"),
        pytest.param("0.4", (28.0, 22.0, 1290.0), ["not convex", "not monotone"], id="below_a_slower_one"),
        pytest.param("0.4", (40.0, 32.0, 1099.0), [], id="faster_than_a_larger_one"),
        pytest.param("0.2", (20.5, 16.0, 1305.0), [], id="each_within_its_margin"),
        pytest.param("0.2", (35.0, 16.0, 1160.0), ["not monotone", "over budget"], id="over_budget_and_fast"),
        pytest.param("0.2", (15.0, 12.0, 1400.0), ["not monotone"], id="below_the_least"),
        pytest.param("0.4", (43.0, 32.0, 1130.0), ["over budget"], id="over_budget"),
    ],
)
def test_a_budget_keeps_the_properties_of_the_curve(budget, measured, expected):
    found, has_faults = faults_of(**{budget.replace("0.", "budget_"): measured})
    assert [kind for kind, _ in found] == expected and has_faults == bool(expected)


def test_a_budget_that_another_point_dominates_is_named_with_it():
    lines, _ = check_curve(curve_rows(budget_4=(32.0, 26.0, 1350.0)))
    (fault,) = lines[2:]
    assert "| not convex | 0.4 (peak 0.320, kept 0.325, 1.35x) | " in fault
    assert fault.endswith("| 1.19x: mix of 0.3 and 0.5 |")


def test_accumulation_is_no_rival():
    """It computes with other batches. A contender that is not listed is a rival."""
    assert faults_of(accumulate=(40.0, 32.0, 1000.0)) == ([], False)
    assert faults_of(fuse=(40.0, 32.0, 1000.0))[1]


def test_models_precisions_and_compiled_code_are_apart():
    rows = [*curve_rows("a"), *curve_rows("a", "bf16", budget_4=(40.0, 32.0, 1300.0))]
    rows += curve_rows("b", compiled_convert=(30.0, 20.0, 900.0), compiled_eager=(90.0, 20.0, 1900.0))
    lines, has_faults = check_curve(rows)
    assert has_faults and len(lines) == 3 and lines[2].startswith("| a | bf16 | not convex | 0.4 ")
    lines, has_faults = check_curve(curve_rows())
    assert not has_faults and lines == ["No fault in the curve, with a margin of 3%."]


def test_the_check_ends_with_a_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_convert.py", "--check-curve", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="found no rows in .*curve_cpu.csv; run --curve first"):
        bench_convert.main()
    for measured, status in (({}, 0), ({"sac": (40.0, 32.0, 1000.0)}, 1)):
        harness.write_csv("curve_cpu", curve_rows(**measured), tmp_path)
        with pytest.raises(SystemExit) as ended:
            bench_convert.main()
        assert ended.value.code == status
        assert ("| peak: dominated | sac (" in capsys.readouterr().out) == bool(status)


def test_the_table_has_the_peak_first_budgets_in_order_and_the_faults():
    rows = [*curve_rows("a"), *curve_rows("b", sac=(40.0, 32.0, 1000.0), budget_6=(60.0, 48.0, 1075.0))]
    lines = result_tables.format_table("curve_cpu", rows).splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert head[4:] == ["torch", "convert", "0.8", "0.6", "0.5", "0.3", "least", "sac"]
    assert "| peak 100 MiB, kept 80, 1 ms | peak -30.0%, kept -30.0%, 1.05x |" in lines[2]
    assert any(line.startswith("| b | fp32 | peak: dominated | sac ") for line in lines)
    assert order_contenders(["torch", "apex"]) == ["torch", "apex"]


def test_the_picture_has_a_panel_for_each_model(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*curve_rows("a"), *curve_rows("a", "bf16"), *curve_rows("b", checkpoint=(10.0, 8.0, 1400.0))]
    rows += curve_rows("c", compiled_eager=(90.0, 70.0, 900.0), compiled_convert=(60.0, 50.0, 950.0))
    draw_curve(rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the benchmark with a small model; returns the rows that it wrote, and what it printed."""
    monkeypatch.setattr(bench_convert, "create_model", lambda name: (Tokens().train(), 40))
    monkeypatch.setattr(
        bench_convert, "random_inputs", lambda name, batch, size: torch.randn(batch, size, 16)
    )
    monkeypatch.setattr(bench_convert, "restart_with_reused_memory", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("FASTVIT_COMMIT", "abc1234")

    def run(*arguments):
        command = ["bench_convert.py", "--out", str(tmp_path), "--repeats", "1", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        bench_convert.main()
        return harness.read_csv("curve_cpu", tmp_path), capsys.readouterr().out

    return run


@pytest.mark.nightly
def test_a_curve_is_measured_in_both_precisions_and_resumed(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    contenders = ["convert", "0.8", "least", "sac", "checkpoint"]
    options = ("--curve", "--batch", "2", "--contenders", ",".join(contenders))
    rows, printed = run(*options, "--models", "resnet26,resnet50")
    assert "1/4 resnet26 fp32, " in printed and "4/4 resnet50 bf16, " in printed
    for model in ("resnet26", "resnet50"):
        for precision in ("fp32", "bf16"):
            found = {r["contender"]: r for r in rows if (r["what"], r["dtype"]) == (model, precision)}
            assert list(found) == ["torch", *contenders]
            assert all(float(r["same_bits"]) == 1 and float(r["p50_us"]) > 0 for r in found.values())
    assert (tmp_path / "curve_cpu.png").exists()
    again, printed = run(*options, "--models", "resnet26,xcit", "--resume")
    assert "1/4 resnet26 fp32: measured before" in printed and "2/4 xcit fp32, " in printed
    assert [row for row in again if row["what"] == "resnet26"] == [r for r in rows if r["what"] == "resnet26"]
    monkeypatch.setattr(bench_convert, "identify_measurement", lambda *_: ("CPU", "2.0", "0ther"))
    command = ("--curve", "--models", "resnet26", "--precision", "fp32", "--contenders", "convert")
    assert "1/1 resnet26 fp32, " in run(*command, "--batch", "2", "--resume")[1]


def test_resuming_compares_with_the_code_that_the_result_measures(monkeypatch):
    """A result on a GPU measures other kernels than one on a CPU."""
    names = []
    monkeypatch.setattr(bench_convert, "identify_measurement", lambda *args: names.append(args) or args)
    options = SimpleNamespace(device="cuda", threads=1, batch=4, curve=False)
    assert not bench_convert.is_measured([], "convert_cuda", "resnet50", "bf16", options)
    assert names == [("convert_cuda", "cuda")]


def test_other_options_are_measured_again(run):
    command = (
        "--curve",
        "--models",
        "resnet26",
        "--precision",
        "fp32",
        "--contenders",
        "convert",
        "--resume",
    )
    assert "1/1 resnet26 fp32, " in run(*command)[1]
    assert "measured before" in run(*command)[1]
    assert "1/1 resnet26 fp32, " in run(*command, "--batch", "3")[1]
    rows, _ = run(*command, "--batch", "3", "--threads", "2")
    assert {(row["shape"], row["threads"]) for row in rows} == {("3x40x16", "2")}


def test_budgets_below_one_that_cannot_be_met_are_left_out(run, monkeypatch):
    made = []

    def make(contender, eager, x):
        made.append(contender)
        if contender == "0.4":
            raise ValueError("convert: a budget of 0.4\ncannot be met; the least is 0.5")
        return Tokens()

    monkeypatch.setattr(bench_convert, "make_contender", make)
    rows, printed = run("--curve", "--models", "resnet26", "--precision", "fp32")
    assert [name for name in made if name in BUDGETS] == ["0.8", "0.6", "0.5", "0.4", "least"]
    assert "resnet26: 0.4: ValueError: convert: a budget of 0.4 cannot be met; the least is 0.5\n" in printed
    assert "0.4" not in {row["contender"] for row in rows}


def test_precisions_are_checked(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_convert.py", "--precision", "fp16"])
    with pytest.raises(SystemExit):
        bench_convert.main()
    assert "--precision takes fp32, bf16 or fp32,bf16, got fp16" in capsys.readouterr().err
