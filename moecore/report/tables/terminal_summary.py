"""The headline of reports/compare.json as a table in the terminal, and the end of a run.

python -m moecore.report.tables.terminal_summary [reports/compare.json]
"""

import math
import re
import sys
from collections.abc import Mapping
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.headline_quantities import HEADLINES
from moecore.report.tables.cells import NumberFormat, interval_from_json
from moecore.report.tables.metrics_by_method import NO_METHODS, read_comparison

# Columns of scores under attack begin so; those of each epsilon and of their mean are for claims.
MAX_LINES = 25  # of the end of a run
LOWER_IS_BETTER = ("test_mae", "ppl")
ATTACKED = re.compile(r"(accuracy|attacked_mae)_(?!.*(_at_|_mean$))")


def headline_rows(compared: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row per phase and method: headline metric → value with limits as text."""
    methods = {name: phases for name, phases in compared.items() if name not in NO_METHODS}
    measured = [cells for by_phase in methods.values() for cells in by_phase.values()]
    if not measured:
        return []
    names = [headline.name for headline in HEADLINES if headline.terminal]
    place = names.index("ece_after")
    names[place:place] = [name for name in measured[0] if ATTACKED.match(name)]
    names = [name for name in names if any(name in cells for cells in measured)]
    all_rows = []
    for phase in next(iter(methods.values())):
        rows = {method: {"phase": phase, "method": method} for method in methods}
        for name in names:
            cells = {
                method: phases[phase][name]
                for method, phases in methods.items()
                if name in phases[phase]
            }
            form = next((cell["form"] for cell in cells.values()), "number")
            number_format = NumberFormat.of(form, map(interval_from_json, cells.values()))
            for method, row in rows.items():
                row[name] = "–"
                if method in cells:
                    row[name] = number_format.value_with_limits(interval_from_json(cells[method]))
        all_rows += rows.values()
    return all_rows


def best_rows(
    compared: Mapping[str, Any], rows: list[dict[str, str]], limit: int
) -> list[dict[str, str]]:
    """Return all rows if at most ``limit``, else the best ⌊limit / phases⌋ (≥ 1) of each phase."""
    # The best have the best first score, and come first.
    if len(rows) <= limit:
        return rows
    score = next((name for name in rows[0] if name not in ("phase", "method")), "")
    sign = 1 if score in LOWER_IS_BETTER else -1

    def rank(row: Mapping[str, str]) -> float:
        cell = compared[row["method"]][row["phase"]].get(score)
        return math.inf if cell is None else sign * cell["mean"]

    by_phase = [list(group) for _, group in groupby(rows, lambda row: row["phase"])]
    rows_per_phase = max(1, limit // len(by_phase))
    return [row for group in by_phase for row in sorted(group, key=rank)[:rows_per_phase]]


def claim_lines(
    claims: Mapping[str, Mapping[str, Any]], texts: Mapping[str, str] | None = None
) -> list[str]:
    """Return a line per claim in compare.json; texts: verdict → its text, if not its name."""
    texts = texts or {}
    lines = []
    for name, entry in claims.items():
        row = build_claim_row(entry)
        limits = "(no interval)"
        notes = [row.holm_note(texts), row.detectable, row.excludes]
        if row.difference_limits:
            limits = f"[{row.difference_limits}]"
            notes.insert(0, f"over {row.over}")
        verdict = texts.get(row.verdict, row.verdict)
        line = f"{verdict:<13} {name.partition(': ')[2]}: {row.difference} {limits}"
        if any(notes):
            line += f" ({'; '.join(filter(None, notes))})"
        lines.append(line)
    return lines


def main(path: str = "reports/compare.json") -> None:
    """Print a compare.json's headline numbers and claims; UserError if it is damaged or old."""
    print_end(Path(path), has_claims=True)


def print_end(path: Path, has_claims: bool = False) -> None:
    """Print a compare.json: headline numbers, first sentence, page, in at most MAX_LINES lines."""
    # has_claims: all rows, and the claims' verdicts instead of the page. Columns that do not fit
    # into the terminal are left out. UserError for a damaged or old file.
    compared = read_comparison(path)
    try:
        _print_summary(compared, "" if has_claims else f"Page: {path.with_name('index.html')}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        older = f"was written by an older version of moecore ({type(error).__name__}: {error})"
        raise UserError(f"{path}: {older}; run `dvc repro compare` again") from error


def _print_summary(compared: Mapping[str, Any], page: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)
    after = [
        f"{phase}: {facts['name']} is SIMULATED data"
        for phase, facts in compared.get("data", {}).items()
        if facts["simulated"]
    ]
    if "first_sentence" in compared:
        after.append(compared["first_sentence"]["text"])
    for name, values in compared.get("calculations", {}).items():
        after.append(f"{name}: {len(values)} values, on reports/index.html")
    all_rows = rows = headline_rows(compared)
    if page:  # two lines are the table's head, and the number of rows left out
        after.append(page)
        lines = sum(len(Text(line).wrap(console, console.width)) for line in after)
        rows = best_rows(compared, all_rows, MAX_LINES - 2 - lines)
    else:
        after += claim_lines(compared.get("claims", {}))
        after += claim_lines(compared.get("questions", {}), ANSWERS)
    heads = [name.replace("_", " ") for name in next(iter(rows), [])]
    cells = [list(row.values()) for row in rows]
    widths = accumulate(2 + max(map(len, column)) for column in zip(heads, *cells, strict=True))
    count = sum(width <= console.width for width in widths)
    table = Table(*heads[:count], box=None, header_style="bold", padding=(0, 1))
    for row in cells:
        table.add_row(*row[:count])
    if len(rows) < len(all_rows):
        after.insert(0, f"and {len(all_rows) - len(rows)} rows of other methods, on the page")
    console.print(table)
    for line in after:
        console.print(line, markup=False, highlight=False, soft_wrap=not page)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
