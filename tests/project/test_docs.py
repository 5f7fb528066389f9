"""README and docs: their Python runs, and what they name exists."""

import contextlib
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
FRAGMENTS = {  # lines to put into a loop of one's own; those of trainers are run by test_trainers.py
    "deadlocks-and-time-outs.md",
    "in-your-trainer.md",
}
RUN = [page for page in PAGES if "```python" in page.read_text() and page.name not in FRAGMENTS]
SUMMARY = re.compile(r"a training forward keeps .*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
NAMED_FILE = re.compile(r"\b(?:tests|tools|benchmarks|csrc|examples)/[\w/]*\w\.\w+")


def find_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def find_anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_says_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "matplotlib" in page.read_text() or "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    text, said, names = page.read_text(), io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(said):
        for block in find_blocks(page, "python"):
            lines_before = text[: text.index(block)].count("\n")  # a traceback has the lines of the page
            exec(compile("\n" * lines_before + block, str(page), "exec"), names)
    examples = find_blocks(page, "python") + find_blocks(page, "text")
    shown = [line for example in examples for line in SUMMARY.findall(example)]
    got = SUMMARY.findall(said.getvalue())
    assert len(got) == len(shown)
    for one, other in zip(got, shown, strict=True):
        assert NUMBER.sub("#", one) == NUMBER.sub("#", other)
        numbers = [torch.tensor([float(n) for n in NUMBER.findall(line)]) for line in (one, other)]
        torch.testing.assert_close(*numbers, rtol=0.05, atol=0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    """Links between files of the repository; `make docs` checks those of the site."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" in target:
            continue
        found = (page.parent / target) if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.suffix == ".md" and "api" not in found.parts:
            assert anchor in find_anchors(found), f"{page.name} links to {target}#{anchor}"


def test_make_targets_and_ci_steps_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        for named in re.findall(r"(?:`|run: |^)make ([a-z-]+)", page.read_text(), re.M):
            assert named in targets, f"{page.name} names make {named}"
    steps = set(re.findall(r"^run_([a-z0-9]+)\(\)", (ROOT / ".ci/run").read_text(), re.M))
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        for named in re.findall(r"(?:`\.ci/run|run: \.ci/run|{ step:) ([a-z0-9]+)\b", page.read_text()):
            assert named in steps, f"{page.name} names the step {named} of .ci/run"


def test_files_that_are_named_exist():
    for page in PAGES:
        for named in re.findall(
            r"\b(?:tests|tools|benchmarks|csrc|examples)/[\w/]*\w\.\w+", page.read_text()
        ):
            assert (ROOT / named).exists(), f"{page.name} names {named}"


def test_the_places_of_an_activation_are_those_of_the_last_one():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an activation")[1].split("\n## ")[0]
    sources = [path for suffix in ("py", "h", "cpp", "cu") for path in ROOT.glob(f"[cf]*/**/*.{suffix}")]
    places = {str(path.relative_to(ROOT)) for path in sources if "hardswish" in path.read_text().lower()}
    assert places and places <= set(re.findall(r"`([\w/]+\.\w+)`", section))
    for name in re.findall(r"`(_?[A-Z]+(?:_[A-Z]+)*|k?[A-Z]\w+|is_\w+|dispatch_\w+)`", section):
        assert any(name in path.read_text() for path in [*sources, *ROOT.glob("tests/**/*.py")]), name


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
