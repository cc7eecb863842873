"""The headline of reports/compare.json as a table in the terminal: ``python -m moecore.report.summary``."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.files import StageError, read_json

FORMS = {"share": "{:.2%}", "number": "{:.3f}", "count": "{:,.0f}"}
COLUMNS = {"test_accuracy": "share", "ece_after": "number", "load_cv2": "number", "entropy": "number", "active_parameters": "count", "images_per_second": "count"}


def rows(compared: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per phase and method: every headline value with its 95 % interval, where the method has such a thing."""
    phases = list(next(iter(compared.values())))
    attacks = [name for name in compared[next(iter(compared))][phases[0]] if name.startswith("accuracy_")]
    columns = {"test_accuracy": "share", **dict.fromkeys(attacks, "share"), **COLUMNS}
    return [
        {"phase": phase, "method": method, **{name: _shown(found[phase].get(name), form) for name, form in columns.items()}}
        for phase in phases
        for method, found in compared.items()
    ]


def _shown(cell: Mapping[str, Any] | None, form: str) -> str:
    if cell is None:
        return "–"
    text = FORMS[form].format(cell["mean"])
    return text + (f" [{FORMS[form].format(cell['low'])}, {FORMS[form].format(cell['high'])}]" if cell.get("low") is not None else "")


def main(path: str = "reports/compare.json") -> None:
    from rich.console import Console
    from rich.table import Table

    found = rows(read_json(Path(path)))
    table = Table(*(name.replace("_", " ") for name in found[0]), box=None, header_style="bold", padding=(0, 1))
    for row in found:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StageError as error:
        sys.exit(str(error))
