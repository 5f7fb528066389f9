"""Writes the results that README.md and the pages of docs/ quote, from results/*.csv.

    python benchmarks/page_results.py [--check]

A page has a place for a table or a sentence between `<!-- NAME -->` and `<!-- /NAME -->`, where NAME is that
of a function in layer_tables.py or model_tables.py, with hyphens. With --check the program writes nothing. It
exits with 1 if a place has another text, or if README.md has a measured number outside of places and code
(`make lint`).
"""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable

import layer_tables
import model_tables
from conditions import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 110
PLACE = re.compile(r"^( *)<!-- ([a-z0-9-]+) -->\n.*?^ *<!-- /\2 -->$", re.M | re.S)
MEASURED_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?: to \d[\d.,]*)? ?(?:%|x\b|ms\b|us\b|µs\b|[KMG]i?B\b|GB/s)")


def find_function(name: str) -> Callable[[], str]:
    """Returns the function of a place. Raises SystemExit if there is none."""
    for module in (layer_tables, model_tables):
        if function := vars(module).get(name.replace("-", "_")):
            return function
    sys.exit(f"page_results: no function of layer_tables.py or model_tables.py makes the place {name}")


def fill_place(match: re.Match) -> str:
    """Returns a place with the results of today."""
    indent, name = match[1], match[2]
    options = {"width": COLUMNS - len(indent), "break_long_words": False, "break_on_hyphens": False}
    blocks = find_function(name)().split("\n\n")
    blocks = [block if block.startswith("|") else textwrap.fill(block, **options) for block in blocks]
    # Some renderers find a table only behind an empty line.
    result = "\n" * blocks[0].startswith("|") + "\n\n".join(blocks)
    return textwrap.indent(f"<!-- {name} -->\n{result}\n<!-- /{name} -->", indent)


def find_measured_numbers(text: str) -> list[str]:
    """Returns the numbers with a unit of a measurement that stand in no place and in no code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", PLACE.sub("", text), flags=re.M | re.S)
    return MEASURED_NUMBER.findall(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page has other results")
    options = parser.parse_args()
    faults = []
    for page in PAGES:
        old = page.read_text()
        new = PLACE.sub(fill_place, old)
        if not options.check:
            page.write_text(new)
        elif new != old:
            lines = old.splitlines(), new.splitlines()
            faults += difflib.unified_diff(*lines, page.name, "results", lineterm="")
            faults.append("page_results: run `python benchmarks/page_results.py`")
    if numbers := find_measured_numbers(PAGES[0].read_text()):
        faults.append(f"page_results: README.md has numbers in no place: {', '.join(numbers)}")
    sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
