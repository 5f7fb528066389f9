"""README and docs: their Python runs, links are valid, numbers equal those of the results."""

import contextlib
import csv
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import fastvit

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FRAGMENTS = {  # lines to put into a loop of one's own; those of trainers are run by test_stacks.py
    "deadlocks-and-time-outs.md",
    "in-your-trainer.md",
}
RUN = [page for page in PAGES if "```python" in page.read_text() and page.name not in FRAGMENTS]
SUMMARY = re.compile(r"a training forward keeps .*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
README = (ROOT / "README.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_says_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "matplotlib" in page.read_text() or "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    said, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(said):
        for i, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page.name}, block {i}", "exec"), names)
    shown = [line for text in blocks(page, "text") for line in SUMMARY.findall(text)]
    got = SUMMARY.findall(said.getvalue())
    assert len(got) == len(shown)
    for one, other in zip(got, shown, strict=True):
        assert NUMBER.sub("#", one) == NUMBER.sub("#", other)
        numbers = [torch.tensor([float(n) for n in NUMBER.findall(line)]) for line in (one, other)]
        torch.testing.assert_close(*numbers, rtol=0.05, atol=0)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    """Links between files of the repository; `make docs` checks those of the site."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" in target:
            continue
        found = (page.parent / target) if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.suffix == ".md" and "api" not in found.parts:
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def test_the_table_of_the_readme_is_that_of_the_results():
    results = {}
    for name in ("convert_vits_cpu", "convert_cpu"):
        with (ROOT / f"benchmarks/results/{name}.csv").open() as file:
            results |= {row["model"]: row for row in csv.DictReader(file) if row["precision"] == "fp32"}
    rows = re.findall(r"^\| ([\w:]+)( \(BatchNorm\))? \| (\d+) MiB \|(.*)\|$", README, re.M)
    assert rows
    for name, with_batch_norm, kept, rest in rows:
        row = {key: float(value) for key, value in results[name].items() if re.fullmatch(r"[\d.e+]+", value)}
        before, expected = row["eager_kept_MiB"], []
        for mode in ("convert", "fuse" if with_batch_norm else "products"):
            expected += [100 * (row[f"{mode}_kept_MiB"] / before - 1)]
            expected += [row[f"{mode}_cpu_ms"] / row["eager_cpu_ms"]]
        shown = [float(cell.strip(" %x")) for cell in rest.split("|") if cell.strip()]
        assert float(kept) == pytest.approx(before, abs=0.51), name
        for got, want in zip(shown, expected, strict=True):
            assert got == pytest.approx(want, abs=0.51 if want < 0 else 0.0051), name


def test_the_layers_of_the_readme_are_those_of_the_results():
    def rows(name):
        with (ROOT / f"benchmarks/results/{name}.csv").open() as file:
            return list(csv.DictReader(file))

    measured = {(r["shape"], r["layer"]): r for r in rows("layers_cpu") if r["threads"] == "1"}
    shown = re.findall(
        r"^\| InPlaceABN, (.*?) \|.*\| ([\d.]+)x \| ([\d.]+) tensors, not ([\d.]+) \|", README, re.M
    )
    for shape, times, kept, before in shown:
        ours, torchs = (measured[shape, layer] for layer in ("InPlaceABN", "torch"))
        assert float(times) == pytest.approx(1 / float(ours["speedup"]), abs=0.0051), shape
        assert (kept, before) == tuple(f"{float(r['saved_activations']):.2f}" for r in (ours, torchs)), shape
    measured = {
        (r["world"], r["shape"], r["contender"]): float(r["p50_us"])
        for r in rows("sync_apex_cpu")
        if r["what"] == "step" and r["direction"] == "both"
    }
    others = {"apex SyncBatchNorm": "apex SyncBatchNorm", "itself over gloo's collectives": "Collective"}
    synced = re.findall(r"^\| SyncBatchNorm, (\d) ranks, (.*?) \| (.*?) \| ([\d.]+)x \|", README, re.M)
    for world, shape, other, times in synced:
        want = measured[world, shape, "SharedMemory"] / measured[world, shape, others[other]]
        assert float(times) == pytest.approx(want, abs=0.0051), other
    assert shown and synced


def test_the_hosts_share_in_the_readme_is_that_of_the_results():
    lines = (ROOT / "benchmarks/results/host_cpu.md").read_text().splitlines()
    ratios = {
        tuple(c.strip() for c in r.split("|")[1:3]): r.split("|")[-2].strip()
        for r in lines
        if "| f" in r or "| c" in r
    }
    layers = sorted(float(ratio[:-1]) for (_, who), ratio in ratios.items() if who == "fastvit")
    step, least, most = re.search(
        r"step\s+takes ([\d.]+)x and a layer's ([\d.]+)x to ([\d.]+)x", README
    ).groups()
    assert ratios["vit_tiny, 32 pixels, fp32", "convert"] == f"{step}x"
    assert [float(least), float(most)] == pytest.approx([layers[0], layers[-1]], abs=0.051)


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        for named in re.findall(r"(?:`|run: |^)make ([a-z-]+)", page.read_text(), re.M):
            assert named in targets, f"{page.name} names make {named}"


def test_public_modules_have_all_and_what_is_in_it():
    public = [name for _, name, _ in pkgutil.iter_modules(fastvit.__path__) if not name.startswith("_")]
    assert "functional" in public and "sync" in public
    for name in public:
        if name in ("reference", "adapters"):  # for tests; and each with a framework of its own
            continue
        module = importlib.import_module(f"fastvit.{name}")
        if name != "training":  # a program
            assert module.__all__ and all(hasattr(module, one) for one in module.__all__), name


def test_the_reference_has_everything_public():
    reference = " ".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    for name in fastvit.__all__:
        assert re.search(rf"::: fastvit\.([\w.]+\.)?{name}\b", reference), name
