"""Results are measured once for each code and machine, and pages quote nothing but results."""

import sys
from pathlib import Path

import bench_batches
import conditions
import harness
import page_results
import pytest
import run_benchmarks


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
    monkeypatch.setattr(page_results.model_tables, "models", lambda: "| new |\n|---|\n\nOn a machine.")
    return page


def run_page_results(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["page_results.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        page_results.main()
    return str(ended.value.code or "")


def test_a_page_with_old_results_fails_the_check_and_is_written(page, monkeypatch):
    message = run_page_results(monkeypatch, "--check")
    assert "-old" in message and "+| new |" in message and "python benchmarks/page_results.py" in message
    assert run_page_results(monkeypatch) == ""
    assert page.read_text().endswith("<!-- models -->\n\n| new |\n|---|\n\nOn a machine.\n<!-- /models -->\n")
    assert run_page_results(monkeypatch, "--check") == ""
    page.write_text(page.read_text() + "It takes 2.00x.\n")
    assert "README.md has numbers in no place: 2.00x" in run_page_results(monkeypatch, "--check")
    page.write_text("<!-- nothing -->\n<!-- /nothing -->\n")
    assert "no function of layer_tables.py or model_tables.py makes the place nothing" in run_page_results(
        monkeypatch
    )


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
    monkeypatch.setattr(run_benchmarks, "is_current", lambda name: False)
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
        "torch": run_benchmarks.torch.__version__,
        "sources": conditions.checksum_sources("host_cpu"),
    }
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "host_cpu"])
    monkeypatch.setattr(run_benchmarks, "measure", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(run_benchmarks, "read_csv", lambda name: [row])
    with pytest.raises(SystemExit) as ended:
        run_benchmarks.main()
    assert not ended.value.code and "host_cpu: measured before" in capsys.readouterr().out
    for other in ({"torch": "2.11"}, {"sources": ""}, {"device": "another"}):
        monkeypatch.setattr(run_benchmarks, "read_csv", lambda name, other=other: [row, row | other])
        assert not run_benchmarks.is_current("host_cpu")
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "nothing"])
    with pytest.raises(SystemExit):
        run_benchmarks.main()
    assert "no benchmark measures nothing; the results are layers_cpu" in capsys.readouterr().err


@pytest.mark.parametrize("guess", [1, 20, 37, 38, 90], ids=str)
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


def test_a_search_without_an_end_is_an_error():
    with pytest.raises(RuntimeError, match="no largest batch for 1000 bytes in 9 steps"):
        bench_batches.find_largest_batch(lambda batch: 500, 1000, 8)


def test_every_benchmark_that_is_run_exists():
    for command in run_benchmarks.BENCHMARKS.values():
        assert (
            Path(run_benchmarks.__file__).parent / next(w for w in command.split() if w.endswith(".py"))
        ).exists()
