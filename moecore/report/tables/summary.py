"""The headline of reports/compare.json as a table in the terminal.

python -m moecore.report.tables.summary [reports/compare.json]
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, read_json
from moecore.report.claims.claim_row import ANSWERS, build_claim_row
from moecore.report.headlines import HEADLINES
from moecore.report.measures import sizes
from moecore.report.tables.cells import json_interval
from moecore.report.tables.number_format import NumberFormat

NO_METHODS = ("claims", "questions", "data", "sizes")  # entries of compare.json that are none


def headline_rows(compared: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per phase and method: every headline value that any method has, with its limits."""
    methods = {name: entry for name, entry in compared.items() if name not in NO_METHODS}
    if not methods:
        return []
    phases = list(next(iter(methods.values())))
    cells = [entry[phase] for phase in phases for entry in methods.values()]
    shares = [name for name in cells[0] if name.startswith("accuracy_")]
    errors = [name for name in cells[0] if name.startswith("attacked_mae_")]
    columns = {}
    for one in HEADLINES:
        if one.name == "ece_after":
            columns |= {**dict.fromkeys(shares, "share"), **dict.fromkeys(errors, "number")}
        if one.terminal:
            columns[one.name] = one.form
    columns = {
        name: form for name, form in columns.items() if any(name in entry for entry in cells)
    }
    printed = []
    for phase in phases:
        formats = {
            name: NumberFormat.of(
                form,
                [json_interval(one[phase][name]) for one in methods.values() if name in one[phase]],
            )
            for name, form in columns.items()
        }
        for method, entry in methods.items():
            row = {"phase": phase, "method": method}
            for name, number_format in formats.items():
                cell = entry[phase].get(name)
                row[name] = number_format.value_with_limits(json_interval(cell)) if cell else "–"
            printed.append(row)
    return printed


def claim_lines(
    claims: Mapping[str, Mapping[str, Any]], words: Mapping[str, str] | None = None
) -> list[str]:
    """One line a claim: verdict, what is claimed, the difference with its 95 % interval.

    words: how a verdict is printed, where it is not by its own name.
    """
    lines = []
    for name, entry in claims.items():
        row = build_claim_row(entry)
        limits = f"[{row.difference_limits}]" if row.difference_limits else "(no interval)"
        notes = [f"over {row.over}"] if row.over else []
        if row.verdict_holm not in ("", row.verdict):
            notes.append(f"{row.verdict_holm} with Holm's correction")
        notes += [row.detectable] if row.detectable else []
        text = f"{name.partition(': ')[2]}: {row.difference} {limits}"
        verdict = (words or {}).get(row.verdict, row.verdict)
        lines.append(f"{verdict:<13} {text}" + (f" ({'; '.join(notes)})" if notes else ""))
    return lines


def compared_in(path: Path) -> dict[str, dict[str, Any]]:
    """What the stage ``compare`` wrote. Raises UserError where it is something else."""
    result = read_json(path)
    if not isinstance(result, dict) or not all(isinstance(one, dict) for one in result.values()):
        raise UserError(f"{path}: found no tables of a study; run `dvc repro compare` again")
    return result


def main(path: str = "reports/compare.json") -> None:
    compared = compared_in(Path(path))
    try:
        print_summary(compared)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        again = "run `dvc repro compare` again"
        raise UserError(
            f"{path}: was written by an older version of moecore ({reason}); {again}"
        ) from error


def print_summary(compared: Mapping[str, Any]) -> None:
    """Print the headline, the data that are simulated, and the claims."""
    from rich.console import Console
    from rich.table import Table

    printed = headline_rows(compared)
    cells = [list(row.values()) for row in printed]
    heads = [name.replace("_", " ") for name in printed[0]] if printed else []
    if "sizes" in compared:
        heads, *cells = sizes.table(compared["sizes"])
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for phase, facts in compared.get("data", {}).items():
        if facts["simulated"]:
            console.print(f"{phase}: {facts['name']} is SIMULATED data", style="bold")
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
