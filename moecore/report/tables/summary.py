"""The headline of reports/compare.json as a table in the terminal.

python -m moecore.report.tables.summary [reports/compare.json]
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, read_json
from moecore.report.measures import sizes
from moecore.report.quantities import COHORT_CHECKS
from moecore.report.tables.number_format import between, decimals, shown
from moecore.statistics.intervals import Interval

NO_METHODS = ("claims", "questions", "data", "sizes")  # entries of compare.json that are none
OLDER = "written by other code, over seeds alone: run the study again"
ANSWERS = {"holds": "yes", "differs": "no"}  # to a question
AGES = ("mae_of_median", "mae_pooled", *COHORT_CHECKS)
COLUMNS = {
    "ece_after": "number",
    "load_cv2": "number",
    "entropy": "number",
    "active_parameters": "count",
    "images_per_second": "count",
}


def rows(compared: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per phase and method: every headline value that any method has, with its limits."""
    methods = {name: found for name, found in compared.items() if name not in NO_METHODS}
    if not methods:
        return []
    phases = list(next(iter(methods.values())))
    cells = [found[phase] for phase in phases for found in methods.values()]
    shares = [name for name in cells[0] if name.startswith("accuracy_")]
    errors = [name for name in cells[0] if name.startswith("attacked_mae_")]
    columns = {
        "test_accuracy": "share",
        "test_mae": "number",
        "ppl": "number",
        "swapped_ppl_15": "number",
        **dict.fromkeys(AGES, "number"),
        "monotone": "share",
    }
    columns |= {**dict.fromkeys(shares, "share"), **dict.fromkeys(errors, "number"), **COLUMNS}
    columns = {
        name: form for name, form in columns.items() if any(name in found for found in cells)
    }
    printed = []
    for phase in phases:
        places = {
            name: decimals(_intervals(name, (found[phase] for found in methods.values())), form)
            for name, form in columns.items()
        }
        for method, found in methods.items():
            row = {"phase": phase, "method": method}
            for name, form in columns.items():
                row[name] = _shown(found[phase].get(name), form, places[name])
            printed.append(row)
    return printed


def claim_lines(
    claims: Mapping[str, Mapping[str, Any]], words: Mapping[str, str] | None = None
) -> list[str]:
    """One line a claim: verdict, what is claimed, the difference with its 95 % interval.

    words: how a verdict is printed, where it is not by its own name.
    """
    lines = []
    for name, found in claims.items():
        difference = found["difference"]
        limits = "(no interval)"
        if "low" in difference:
            limits = f"[{difference['low']:+.4f}, {difference['high']:+.4f}]"
        verdict = (words or {}).get(found["verdict"], found["verdict"])
        said = f"{name.partition(': ')[2]}: {difference['mean']:+.4f} {limits}"
        lines.append(f"{verdict:<13} {said}{_beside(found)}")
    return lines


def _beside(found: Mapping[str, Any]) -> str:
    """What the interval is over, Holm's verdict where it is another, and what could be seen."""
    if "asked" not in found:
        return f" ({OLDER})"
    notes = [f"over {found['difference']['interval']}" if "low" in found["difference"] else ""]
    if found.get("verdict_holm", found["verdict"]) != found["verdict"]:
        notes.append(f"{found['verdict_holm']} after Holm's correction")
    if "smallest" in found:
        notes.append(f"could have seen {found['smallest']:.4f}")
    told = "; ".join(note for note in notes if note)
    return f" ({told})" if told else ""


def _intervals(name: str, cells: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """The values of one column of a phase."""
    having = [found[name] for found in cells if name in found]
    return [Interval(found["mean"], found.get("low"), found.get("high")) for found in having]


def _shown(cell: Mapping[str, Any] | None, form: str, places: int) -> str:
    """The digits are those of the page."""
    if cell is None:
        return "–"
    text = shown(cell["mean"], form, places)
    low = cell.get("low")
    high = cell.get("high")
    if low is None or high is None or (form == "count" and low == high):
        return text  # parameters are the same in every seed
    return f"{text} [{between(low, high, form, places)}]"


def compared_in(path: Path) -> dict[str, dict[str, Any]]:
    """What the stage ``compare`` wrote. Raises UserError where it is something else."""
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UserError(f"{path}: found no tables of a study; run `dvc repro compare` again")
    return found


def main(path: str = "reports/compare.json") -> None:
    compared = compared_in(Path(path))
    try:
        show(compared)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        again = "run `dvc repro compare` again"
        raise UserError(f"{path}: written by other code ({reason}); {again}") from error


def show(compared: Mapping[str, Any]) -> None:
    """Print the headline, the data that are simulated, and the claims."""
    from rich.console import Console
    from rich.table import Table

    printed = rows(compared)
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
