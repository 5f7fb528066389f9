"""Writes the results that README.md and the pages of docs/ quote, and the tables beside results/*.csv.

    python benchmarks/page_results.py [--check]

A page has a place for a table or a sentence between `<!-- NAME -->` and `<!-- /NAME -->`, where NAME is that
of a function in layer_tables.py or model_tables.py, with hyphens. With --check the program writes nothing. It
exits with 1 if a file has another text, or if README.md has a measured number outside of places and code
(`make lint`).
"""

import argparse
import difflib
import re
import sys
import textwrap
from functools import partial

import bench_train
import layer_tables
import model_tables
from conditions import ROOT
from harness import RESULTS, read_csv
from result_tables import format_table

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 110
PLACE = re.compile(r"^( *)<!-- ([a-z0-9-]+) -->\n.*?^ *<!-- /\2 -->$", re.M | re.S)
MEASURED_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?: to \d[\d.,]*)? ?(?:%|x\b|ms\b|us\b|µs\b|[KMG]i?B\b|GB/s)")


def make_result(name: str) -> str:
    """Returns the Markdown of a place. Raises SystemExit if there is no such place or no such result."""
    for module in (layer_tables, model_tables):
        function = vars(module).get(name.replace("-", "_"))
        if getattr(function, "__module__", "") == module.__name__:
            try:
                return function()
            except KeyError as error:
                sys.exit(f"page_results: {name}: no row {error} in a result; `make results` measures")
    sys.exit(f"page_results: no function of layer_tables.py or model_tables.py makes the place {name}")


def fill_place(match: re.Match) -> str:
    """Returns a place with the results of today."""
    indent, name = match[1], match[2]
    options = {"width": COLUMNS - len(indent), "break_long_words": False, "break_on_hyphens": False}
    blocks = make_result(name).split("\n\n")
    blocks = [block if block.startswith("|") else textwrap.fill(block, **options) for block in blocks]
    result = "\n\n".join(blocks)
    return textwrap.indent(f"<!-- {name} -->\n{result}\n<!-- /{name} -->", indent)


def find_measured_numbers(text: str) -> list[str]:
    """Returns the numbers with a unit of a measurement that stand in no place and in no code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", PLACE.sub("", text), flags=re.M | re.S)
    return MEASURED_NUMBER.findall(text)


def make_result_tables() -> dict[str, str]:
    """Returns the table of each results/*.csv, by the result's name."""
    tables = {}
    for name in sorted(path.stem for path in RESULTS.glob("*.csv")):
        format_rows = bench_train.format_table if name == "train_accuracy" else partial(format_table, name)
        tables[name] = format_rows(read_csv(name, RESULTS))
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page has other results")
    options = parser.parse_args()
    texts = {page: PLACE.sub(fill_place, page.read_text()) for page in PAGES}
    for page, text in texts.items():
        if len(PLACE.findall(text)) != len(re.findall(r"^ *<!-- [a-z0-9-]+ -->$", text, re.M)):
            sys.exit(f"page_results: {page.name} has a place without an end")
    texts |= {RESULTS / f"{name}.md": text for name, text in make_result_tables().items()}
    faults = []
    for path, new in texts.items():
        old = path.read_text() if path.exists() else ""
        if not options.check:
            path.write_text(new)
        elif new != old:
            lines = old.splitlines(), new.splitlines()
            faults += difflib.unified_diff(*lines, path.name, "results", lineterm="")
            faults.append("page_results: run `python benchmarks/page_results.py`")
    if numbers := find_measured_numbers(texts[PAGES[0]]):
        faults.append(f"page_results: README.md has numbers in no place: {', '.join(numbers)}")
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
