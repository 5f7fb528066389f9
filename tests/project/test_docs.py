"""README and docs: their Python runs, and what they name exists."""

import contextlib
import io
import re
import runpy
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastvit
from fastvit import ops
from fastvit.training.command_line import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FRAGMENTS = {"in-your-trainer.md"}  # tests/conversion/stacks runs its lines in each trainer
RUN = [page for page in PAGES if "```python" in page.read_text() and page.name not in FRAGMENTS]
SUMMARY = re.compile(r"a training forward keeps .*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def find_anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def find_shown_lines(language: str, block: str) -> list[str]:
    """Returns the lines that a block of a page says are printed: those of a text, or of comments in code."""
    lines = block.splitlines() if language == "text" else SUMMARY.findall(block)
    return [" ".join(line.split()) for line in lines if line.strip(" .")]


def is_printed(shown: str, printed: list[str]) -> bool:
    """Returns whether a line was printed, with numbers that differ by 5 % at most."""
    numbers = [float(number) for number in NUMBER.findall(shown)]
    return any(
        all(
            abs(float(one) - other) <= 0.05 * other
            for one, other in zip(NUMBER.findall(line), numbers, strict=True)
        )
        for line in printed
        if NUMBER.sub("#", line) == NUMBER.sub("#", shown)
    )


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    """A text that is the next block after code is what this code prints."""
    monkeypatch.chdir(tmp_path)
    if "matplotlib" in page.read_text() or "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    text, names = page.read_text(), {"__name__": "__main__"}
    assert text.count("```") % 2 == 0
    fences = [*re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S), re.match("()()", "")]
    for fence, next_fence in pairwise(fences):
        if fence[1] != "python":
            continue
        lines_before = text[: fence.start(2)].count("\n")  # A traceback has the lines of the page.
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile("\n" * lines_before + fence[2], str(page), "exec"), names)
        printed = [" ".join(line.split()) for line in output.getvalue().splitlines()]
        shown = find_shown_lines("python", fence[2])
        shown += find_shown_lines("text", next_fence[2]) if next_fence[1] == "text" else []
        assert not [line for line in shown if not is_printed(line, printed)], printed


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


@pytest.mark.parametrize("page", [*(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name)
def test_the_first_line_of_a_page_says_for_whom_it_is(page):
    first_line = page.read_text().split("\n\n")[1]
    kinds = "(Tutorial|How-to|Reference|Explanation).* for " if page.name != "index.md" else "For "
    assert re.match(f"{kinds}(people|users)", first_line, re.S), first_line


def test_command_lines_of_the_trainer_are_understood():
    pattern = r"^(?:fastvit-train|torchrun .*-m fastvit\.training)\b([^#\n]*)"
    commands = [line for page in PAGES for line in re.findall(pattern, page.read_text(), re.M)]
    assert len(commands) >= 3
    for command in commands:
        parse_arguments(command.split())  # SystemExit for an option that does not exist


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
