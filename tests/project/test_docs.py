"""README and docs: their Python runs, links are valid, numbers equal those of the results."""

import contextlib
import csv
import io
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import fastvit
from fastvit import ops

ROOT = Path(__file__).resolve().parents[2]
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
    examples = blocks(page, "python") + blocks(page, "text")
    shown = [line for text in examples for line in SUMMARY.findall(text)]
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


def results(*names: str) -> list[dict[str, str]]:
    rows = []
    for name in names:
        with (ROOT / f"benchmarks/results/{name}.csv").open() as file:
            rows += csv.DictReader(file)
    return rows


def test_the_models_of_the_readme_are_those_of_the_results():
    measured = {
        (row["what"], row["contender"]): (float(row["kept_MiB"]), float(row["p50_us"]))
        for row in results("convert_vits_cpu", "convert_cpu")
        if row["dtype"] == "fp32"
    }
    rows = re.findall(r"^\| ([\w:]+)( \(BatchNorm\))? \| (\d+) MiB \|(.*)\|$", README, re.M)
    assert rows
    for name, with_batch_norm, kept, rest in rows:
        before, time = measured[name, "torch"]
        shown = [float(cell.strip(" %x")) for cell in rest.split("|") if cell.strip()]
        assert float(kept) == pytest.approx(before, abs=0.51), name
        for contender in ("convert", "fuse" if with_batch_norm else "products"):
            got, of = measured[name, contender]
            assert shown.pop(0) == pytest.approx(100 * (got / before - 1), abs=0.51), name
            assert shown.pop(0) == pytest.approx(of / time, abs=0.0051), name


def test_the_layers_of_the_readme_are_those_of_the_results():
    rows = [row for row in results("layers_cpu") if (row["threads"], row["direction"]) == ("1", "both")]
    measured = {(row["shape"], row["contender"]): row for row in rows}
    shown = re.findall(
        r"InPlaceABN at (\S+)\s+takes ([\d.]+)x .*?keeps ([\d.]+) tensors, not (\d+\.\d+)", README, re.S
    )
    for shape, times, kept, before in shown:
        ours, torchs = (measured[shape, layer] for layer in ("InPlaceABN", "torch"))
        assert float(times) == pytest.approx(1 / float(ours["times"]), abs=0.0051), shape
        assert (kept, before) == tuple(f"{float(r['kept']):.2f}" for r in (ours, torchs)), shape
    measured = {
        (r["world"], r["shape"], r["contender"]): float(r["p50_us"])
        for r in results("sync_apex_cpu")
        if r["what"] == "step" and r["direction"] == "both"
    }
    synced = re.findall(r"^\| SyncBatchNorm, (\d) ranks, (.*?) \| (.*?) \| ([\d.]+)x \|", README, re.M)
    for world, shape, other, times in synced:
        want = measured[world, shape, "SharedMemory"] / measured[world, shape, other]
        assert float(times) == pytest.approx(want, abs=0.0051), other
    assert shown and synced


def test_the_steps_on_a_gpu_in_the_readme_are_those_of_the_results():
    rows = [row for row in results("layers_cuda") if row["direction"] == "both"]
    measured = {(row["what"], row["shape"], row["contender"]): float(row["p50_us"]) for row in rows}
    ours = {"BatchNorm and LeakyReLU": ("batch norm", "InPlaceABN"), "LayerNorm": ("layer_norm", "fastvit")}
    shown = re.findall(r"^\| ([\w ]+), (\d\S+(?: channels_last)?) \|((?: \d+ us \|){3})$", README, re.M)
    assert shown
    for what, shape, times in shown:
        name, own = ours.get(what, (what.lower(), "fastvit"))
        want = [measured[name, shape, contender] for contender in ("torch", "torch.compile", own)]
        assert [float(us) for us in re.findall(r"\d+", times)] == pytest.approx(want, abs=0.51), what
    said = re.search(
        r"keeps (\d+)% less at ([\d.]+)x.*?(\d+)% less at ([\d.]+)x.*?(\d+)% less at ([\d.]+)x", README, re.S
    )
    rows = {(r["what"], r["contender"]): r for r in results("convert_vits_cuda", "convert_cuda")}
    cases = [
        ("vit_small_patch16_224", "convert"),
        ("vit_small_patch16_224", "products"),
        ("resnet50", "convert"),
    ]
    for (model, contender), less, times in zip(cases, said.groups()[::2], said.groups()[1::2], strict=True):
        got, eager = rows[model, contender], rows[model, "torch"]
        kept, us = (float(got[key]) / float(eager[key]) for key in ("kept_MiB", "p50_us"))
        assert float(less) == pytest.approx(100 * (1 - kept), abs=0.51) and float(times) == pytest.approx(
            us, abs=0.0051
        )


def test_the_hosts_share_in_the_readme_is_that_of_the_results():
    shares = {
        (row["what"], row["contender"]): 1 / float(row["times"])
        for row in results("host_cpu")
        if row["direction"] == "both"
    }
    layers = [share for (_, who), share in shares.items() if who == "fastvit"]
    said = re.search(r"step\s+takes ([\d.]+)x and a layer's ([\d.]+)x to ([\d.]+)x", README).groups()
    step, least, most = map(float, said)
    assert step == pytest.approx(shares["vit_tiny, 32 pixels, fp32", "convert"], abs=0.0051)
    assert [least, most] == pytest.approx([min(layers), max(layers)], abs=0.051)


def test_make_targets_and_ci_steps_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        for named in re.findall(r"(?:`|run: |^)make ([a-z-]+)", page.read_text(), re.M):
            assert named in targets, f"{page.name} names make {named}"
    steps = set(re.findall(r"^run_([a-z0-9]+)\(\)", (ROOT / ".ci/run").read_text(), re.M))
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        for named in re.findall(r"(?:`\.ci/run|run: \.ci/run|{ step:) ([a-z0-9]+)\b", page.read_text()):
            assert named in steps, f"{page.name} names the step {named} of .ci/run"


def test_the_places_of_an_activation_are_those_of_the_last_one():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an activation")[1].split("\n## ")[0]
    sources = [path for suffix in ("py", "h", "cpp", "cu") for path in ROOT.glob(f"[cf]*/**/*.{suffix}")]
    places = {str(path.relative_to(ROOT)) for path in sources if "hardswish" in path.read_text().lower()}
    assert places and places <= set(re.findall(r"`([\w/]+\.\w+)`", section))
    for name in re.findall(r"`(_?[A-Z]+(?:_[A-Z]+)*|k?[A-Z]\w+|is_\w+|dispatch_\w+)`", section):
        assert any(name in path.read_text() for path in [*sources, *ROOT.glob("tests/*.py")]), name


def test_the_reference_has_everything_public():
    reference = " ".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    for name in fastvit.__all__:
        assert re.search(rf"::: fastvit\.([\w.]+\.)?{name}\b", reference), name


def test_the_page_of_ops_has_their_schemas(monkeypatch):
    files = types.ModuleType("mkdocs.structure.files")
    files.File = object
    for name, module in (
        ("mkdocs", types.ModuleType("mkdocs")),
        ("mkdocs.structure", files),
        (files.__name__, files),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    schemas = runpy.run_path(str(ROOT / "tools/mkdocs_hooks.py"))["read_schemas"]()
    assert sorted(schemas) == ops.__all__
    for name, schema in schemas.items():
        assert torch._C.parse_schema(f"fastvit::{schema}") == getattr(ops, name)._schema
