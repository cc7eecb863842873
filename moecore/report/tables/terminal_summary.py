"""The headline of reports/compare.json as a table in the terminal.

python -m moecore.report.tables.terminal_summary [reports/compare.json]
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.report.claims.claims_table import ANSWERS, build_claim_row
from moecore.report.headline_quantities import HEADLINES
from moecore.report.pictures import sizes
from moecore.report.tables.cells import NumberFormat, interval_from_json
from moecore.report.tables.metrics_by_method import NO_METHODS, read_comparison

# Columns of scores under attack begin so; those of each epsilon and of their mean are for claims.
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
    compared = read_comparison(Path(path))
    try:
        print_summary(compared)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        older = f"was written by an older version of moecore ({type(error).__name__}: {error})"
        raise UserError(f"{path}: {older}; run `dvc repro compare` again") from error


def print_summary(compared: Mapping[str, Any]) -> None:
    """Print the report's first sentence, which data are simulated, headline numbers and verdicts."""
    from rich.console import Console
    from rich.table import Table

    rows = headline_rows(compared)
    heads = [name.replace("_", " ") for name in next(iter(rows), [])]
    cells = [list(row.values()) for row in rows]
    if "sizes" in compared:
        heads, *cells = sizes.terminal_size_rows(compared["sizes"])
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for phase, facts in compared.get("data", {}).items():
        if facts["simulated"]:
            console.print(f"{phase}: {facts['name']} is SIMULATED data", style="bold")
    if "first_sentence" in compared:
        text = compared["first_sentence"]["text"]
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    lines = claim_lines(compared.get("claims", {}))
    lines += claim_lines(compared.get("questions", {}), ANSWERS)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
