"""One row a method, one column a headline metric of each paper, as Markdown.

python -m moecore.report.cross_table [reports/compare.json]
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError, read_json
from moecore.report.summary import NO_METHODS


class Column(NamedTuple):
    """A metric's name in compare.json, its title, and how its mean is printed."""

    name: str
    title: str
    form: str


COLUMNS = (
    Column("test_accuracy", "accuracy", "{:.1%}"),
    Column("ece_after", "ECE", "{:.3f}"),
    Column("accuracy_worst_case", "attacked", "{:.1%}"),
    Column("routing_change_pgd-10", "routing change", "{:.3f}"),
    Column("match_top1", "match top-1", "{:.1%}"),
    Column("confidence_highest", "confidence", "{:.3f}"),
    Column("agreement_with_final", "agreement", "{:.1%}"),
    Column("entropy", "entropy", "{:.3f}"),
    Column("load_cv2", "load CV²", "{:.3f}"),
    Column("fallback", "fallback", "{:.1%}"),
    Column("imed", "IMED", "{:.4f}"),
    Column("noise_selection_change", "change by noise", "{:.3f}"),
    Column("jumps", "jumps", "{:.2f}"),
    Column("mce", "mCE", "{:.3f}"),
    Column("lipschitz_margin_mean", "margin slope", "{:.0f}"),
    Column("active_parameters", "active parameters", "{:,.0f}"),
    Column("gflops", "GFLOPs", "{:.4f}"),
    Column("latency_ms", "latency (ms)", "{:.2f}"),
    Column("training_overhead", "training time", "{:.2f}"),
)


def cross_table(compared: Mapping[str, Any]) -> list[str]:
    """The lines of a Markdown table for each phase: means over seeds.

    A metric that no method has is left out, one that a method lacks is a dash.

    compared: reports/compare.json as ``stages.compare`` writes it.
    """
    methods = {name: found for name, found in compared.items() if name not in NO_METHODS}
    lines: list[str] = []
    for phase in next(iter(methods.values())):
        columns = [
            column
            for column in COLUMNS
            if any(found[phase].get(column.name) for found in methods.values())
        ]
        lines += [
            "",
            f"**{phase}**",
            "",
            _row("method", [column.title for column in columns]),
            _row("---", ["---:"] * len(columns)),
        ]
        lines += [
            _row(
                f"`{method}`", [_cell(found[phase].get(column.name), column) for column in columns]
            )
            for method, found in methods.items()
        ]
    return lines


def _cell(found: Mapping[str, Any] | None, column: Column) -> str:
    return "–" if found is None else column.form.format(found["mean"])


def _row(first: str, cells: list[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


if __name__ == "__main__":
    try:
        print(
            "\n".join(
                cross_table(
                    read_json(Path(sys.argv[1] if len(sys.argv) > 1 else "reports/compare.json"))
                )
            )
        )
    except UserError as error:
        sys.exit(str(error))
