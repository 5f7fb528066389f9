"""Selects rows of results, and formats them for the pages that quote results (page_results.py)."""

import sys
from collections.abc import Iterable, Sequence

from conditions import describe_changes
from harness import markdown_table, read_csv

Row = dict[str, str]
Rows = dict[tuple[str, ...], Row]


def read_result(name: str) -> list[Row]:
    """Returns the rows of a result. Raises SystemExit if it was not measured."""
    return read_csv(name) or sys.exit(
        f"results/{name}.csv is missing; `make results ARGS={name}` measures it"
    )


def select_rows(*names: str, keys: tuple[str, ...], **conditions: str) -> Rows:
    """Returns the rows of some results that meet the conditions, by their values of `keys`."""
    return {
        tuple(row[key] for key in keys): row
        for name in names
        for row in read_result(name)
        if all(row[column] == value for column, value in conditions.items())
    }


def ratio(row: Row, other: Row, column: str = "p50_us") -> float:
    return float(row[column]) / float(other[column])


def format_range(values: Iterable[float], form: str = "{:.2f}", unit: str = "x") -> str:
    """Returns the least and the largest value, or one of them if both read the same."""
    texts = [form.format(value) for value in sorted(values)]
    return f"{texts[0]}{unit}" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}{unit}"


def format_ms(rows: Iterable[Row]) -> str:
    return format_range([float(row["p50_us"]) / 1e3 for row in rows], "{:.1f}", " ms")


def format_saving(row: Row, eager: Row, column: str = "peak_MiB") -> str:
    """Returns the change of a model's bytes and the time of its step, relative to the eager model's."""
    return f"{ratio(row, eager, column) - 1:+.0%}, {ratio(row, eager):.2f}x"


def make_table(header: Sequence[str], rows: Iterable[Sequence[object]], *names: str) -> str:
    """Returns a table of some results and the line of conditions under it."""
    return "\n".join([*markdown_table(header, rows), "", describe_conditions(*names)])


def describe_conditions(*names: str) -> str:
    """Returns a sentence on each machine that measured the results, and whether the code has changed."""
    facts: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for name in names:
        rows = read_result(name)
        change = describe_changes(name, rows)
        for row in rows:
            machine = facts.setdefault(
                (row["device"], row["torch"]), {"commit": {}, "date": {}, "change": {}}
            )
            machine["commit"][row["commit"]] = machine["date"][row["date"]] = None
            machine["change"][change] = None
    return " ".join(
        f"{device}, torch {torch}, commit {', '.join(fact['commit'])}, {', '.join(fact['date'])}. "
        f"{' '.join(fact['change'])}".rstrip()
        for (device, torch), fact in facts.items()
    )
