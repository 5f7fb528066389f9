"""Results are measured once for each code and machine, and pages quote nothing but results."""

import sys
from pathlib import Path
from types import SimpleNamespace

import bench_batches
import bench_convert
import conditions
import harness
import page_results
import pytest
import quoting
import result_tables
import run_benchmarks
import torch
from budget_curve import BUDGETS
from convert_contenders import COMPILED_CONTENDERS, CONTENDER_FACTORIES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("A step takes 1.10x the time.", ["1.10x"], id="ratio"),
        pytest.param("It keeps 38 % less, or 23.2 MiB, in 0.9 to 4.2 ms.", 3, id="units"),
        pytest.param("`budget=50%` and\n```sh\nmake  # 5 GiB\n```\n", [], id="code"),
        pytest.param("<!-- models -->\n\n| -23%, 1.07x |\n<!-- /models -->\n", [], id="place"),
        pytest.param("Python >= 3.10, 2 ranks, compute capability 7.5", [], id="no_unit"),
    ],
)
def test_measured_numbers_outside_of_places_are_found(text, expected):
    found = page_results.find_measured_numbers(text)
    assert len(found) == expected if isinstance(expected, int) else found == expected


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page whose one place has an old table, in place of all pages."""
    page = tmp_path / "README.md"
    page.write_text("# A page\n\n<!-- models -->\nold\n<!-- /models -->\n")
    monkeypatch.setattr(page_results, "PAGES", [page])
    monkeypatch.setattr(page_results, "RESULTS", tmp_path)

    def models():
        return "| new |\n|---|\n\nOn a machine."

    models.__module__ = "model_tables"  # A name that a module imports is no place.
    monkeypatch.setattr(page_results.model_tables, "models", models)
    return page


def run_page_results(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["page_results.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        page_results.main()
    return ended.value.code


def test_a_page_with_old_results_fails_the_check_and_is_written(page, monkeypatch):
    message = run_page_results(monkeypatch, "--check")
    assert "-old" in message and "+| new |" in message and "python benchmarks/page_results.py" in message
    assert run_page_results(monkeypatch) is None  # The exit status is 0.
    assert page.read_text().endswith("<!-- models -->\n| new |\n|---|\n\nOn a machine.\n<!-- /models -->\n")
    assert run_page_results(monkeypatch, "--check") is None
    page.write_text(page.read_text() + "It takes 2.00x.\n")
    assert "README.md has numbers in no place: 2.00x" in run_page_results(monkeypatch, "--check")
    page.write_text("<!-- nothing -->\n<!-- /nothing -->\n")
    message = "no function of layer_tables.py or model_tables.py makes the place nothing"
    assert message in run_page_results(monkeypatch)
    page.write_text("<!-- models -->\nold\n<!-- /model -->\n")
    assert "README.md has a place without an end" in run_page_results(monkeypatch)


def test_a_table_beside_its_csv_is_written_again(page, tmp_path, monkeypatch):
    """The code that it measures has changed since its benchmark wrote it."""
    row = {
        "what": "bn_stats",
        "contender": "torch",
        "p50_us": 1.0,
        "commit": "abc",
        "date": "2026",
        "sources": "0",
    }
    harness.write_csv("ops_cpu", [row | {"device": "CPU", "torch": "2"}], tmp_path)
    assert "+CPU, torch 2, commit abc, 2026. The code that this" in run_page_results(monkeypatch, "--check")
    assert run_page_results(monkeypatch) is None
    assert "The code that this measures has changed since." in (tmp_path / "ops_cpu.md").read_text()


def test_a_missing_result_or_row_is_named(page, monkeypatch):
    monkeypatch.setattr(page_results.model_tables, "models", page_results.model_tables.gpu_models)
    monkeypatch.setattr(quoting, "read_csv", lambda name: [])
    assert (
        run_page_results(monkeypatch)
        == "results/convert_vits_cuda.csv is missing; `make results ARGS=convert_vits_cuda` measures it"
    )
    monkeypatch.setattr(quoting, "read_csv", lambda name: [{"what": "a", "contender": "b", "dtype": "bf16"}])
    assert "models: no row ('vit_small_patch16_224', 'torch') in a result" in run_page_results(monkeypatch)


def test_each_table_stands_in_a_page():
    names = {
        match[2] for page in page_results.PAGES for match in page_results.PLACE.finditer(page.read_text())
    }
    for module in (page_results.layer_tables, page_results.model_tables):
        own = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        }
        functions = {name.replace("_", "-") for name in own if not name.startswith(("_", "select", "make"))}
        assert functions <= names, functions - names


def test_a_table_says_that_its_code_has_changed(tmp_path):
    harness.write_csv("ops_cpu", [{"commit": "abc"}], tmp_path)
    rows = harness.read_csv("ops_cpu", tmp_path)
    assert rows[0]["sources"] == conditions.checksum_sources("ops_cpu")
    assert conditions.describe_changes("ops_cpu", rows) == ""
    assert "has changed since" in conditions.describe_changes("ops_cpu", [*rows, {"sources": "0"}])
    assert conditions.checksum_sources("ops_cpu") != conditions.checksum_sources("ops_cuda")


def test_a_result_replaces_the_old_one_only_when_its_benchmark_has_ended(tmp_path, monkeypatch, capsys):
    results, program = tmp_path / "results", tmp_path / "bench.py"
    results.mkdir()
    (results / "ops_cpu.csv").write_text("old")
    monkeypatch.setattr(run_benchmarks, "RESULTS", results)
    monkeypatch.setattr(run_benchmarks, "is_current", lambda name, folder=None: folder is not None)
    monkeypatch.setattr(
        run_benchmarks, "BENCHMARKS", {"ops_cpu": f"NAME=ops_cpu {program}", "host_cpu": "gone.py"}
    )
    program.write_text(
        "import os, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "(folder / (os.environ['NAME'] + '.csv')).write_text(os.environ['FASTVIT_COMMIT'])\n"
        "sys.exit((folder / 'fail').exists())\n"
    )
    (tmp_path / "work/ops_cpu").mkdir(parents=True)
    (tmp_path / "work/ops_cpu/fail").touch()
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit) as ended:
        run_benchmarks.main()
    printed = capsys.readouterr().out
    assert (
        ended.value.code == 1 and "ops_cpu: failed, see " in printed and "host_cpu: failed, see " in printed
    )
    assert (results / "ops_cpu.csv").read_text() == "old"
    (tmp_path / "work/ops_cpu/fail").unlink()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "ops_cpu"])
    with pytest.raises(SystemExit) as ended:
        run_benchmarks.main()
    assert not ended.value.code and (results / "ops_cpu.csv").read_text() == conditions.current_commit()


def test_a_result_of_this_code_is_not_measured_again(monkeypatch, capsys):
    row = {
        "device": conditions.device_name("cpu"),
        "torch": torch.__version__,
        "sources": conditions.checksum_sources("host_cpu"),
    }
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "host_cpu"])
    monkeypatch.setattr(run_benchmarks, "measure", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(run_benchmarks, "read_csv", lambda name, folder: [row])
    with pytest.raises(SystemExit) as ended:
        run_benchmarks.main()
    assert not ended.value.code and "host_cpu: measured before" in capsys.readouterr().out
    for other in ({"torch": "2.11"}, {"sources": ""}, {"device": "another"}):
        monkeypatch.setattr(run_benchmarks, "read_csv", lambda name, folder, other=other: [row, row | other])
        assert not run_benchmarks.is_current("host_cpu")
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "nothing"])
    with pytest.raises(SystemExit):
        run_benchmarks.main()
    assert "no benchmark measures nothing; the results are layers_cpu" in capsys.readouterr().err


@pytest.mark.parametrize("guess", [0, 1, 20, 37, 38, 90, 5000], ids=str)
@pytest.mark.parametrize(
    "measure_peak",
    [
        pytest.param(lambda batch: 100 + 24 * batch, id="affine"),
        pytest.param(lambda batch: 100 + 24 * batch + 10 * (batch % 2), id="rough"),
        pytest.param(lambda batch: max(500 + 10 * batch, 24 * batch + 100), id="bent"),
    ],
)
def test_the_largest_batch_is_one_below_the_first_that_does_not_fit(measure_peak, guess):
    batch, peak = bench_batches.find_largest_batch(measure_peak, 1000, guess)
    assert peak == measure_peak(batch) <= 1000 < measure_peak(batch + 1)


def test_no_batch_fits_into_little_memory():
    assert bench_batches.find_largest_batch(lambda batch: 100 + 24 * batch, 123, 20) == (0, 0)


def test_a_search_without_an_end_is_an_error():
    with pytest.raises(RuntimeError, match="no largest batch for 1000 bytes in 9 steps"):
        bench_batches.find_largest_batch(lambda batch: 500, 1000, 8)


def test_results_have_a_program_a_note_and_code_that_exists():
    for name, command in run_benchmarks.BENCHMARKS.items():
        program = next(word for word in command.split() if word.endswith(".py"))
        assert (Path(run_benchmarks.__file__).parent / program).exists()
        assert name.startswith((*result_tables.TABLE_NOTES, "train")) and conditions.checksum_sources(name)
    for globs in conditions.MEASURED_CODE.values():
        assert all(any(conditions.ROOT.glob(pattern)) for pattern in globs), globs
    with pytest.raises(ValueError, match="a result's name begins with batches, .*, got nothing"):
        conditions.checksum_sources("nothing")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("curve", [True, False], ids=["curve", "models"])
def test_contenders_exist(precision, curve):
    options = SimpleNamespace(contenders="", curve=curve)
    known = {*CONTENDER_FACTORIES, *COMPILED_CONTENDERS, *BUDGETS}
    for models in bench_convert.MODELS.values():
        for model in models:
            assert {*bench_convert.select_contenders(model, precision, options)} <= known
