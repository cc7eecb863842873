"""One row per method, one column per headline metric of each paper, as Markdown.

python -m moecore.report.tables.methods_by_paper [reports/compare.json]
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.report.column import Column
from moecore.report.headline_quantities import HEADLINES
from moecore.report.page.view import (
    Block,
    PageCell,
    PageTable,
    TableRow,
    format_paper_number,
    method_rows_table,
)
from moecore.report.tables.cells import Cells, markdown_table
from moecore.report.tables.metrics_by_method import NO_METHODS, read_comparison
from moecore.report.tables.paper_numbers import (
    NOTES,
    PAPERS,
    SHORT,
    PaperModelNumbers,
    paper_models_with_numbers,
)

# What stands beside a table's own columns: the score, and for the cost what it is of.
BESIDE = {
    "cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead"),
    "moge": ("test_accuracy", "test_accuracy_top5"),
    "tgr": ("test_accuracy", "steps_to_baseline_loss"),
}
ERRORS = ("test_mae", "ppl")  # the score of ages, and of words
FEW = 3  # numbers of a paper that a head has room for; of more the least and the largest
WORDS = (
    "In italics below a column's name: the paper's own numbers. They come from other data and "
    "sizes: read them for their direction, not for their height."
)


def paper_tables_block(
    columns: Sequence[Column], cells: Cells, controls: Collection[str] = ()
) -> Block:
    """One small table for each paper whose metrics any method has; one is shown at a time."""
    grids = [
        table_of_paper(paper, columns, cells, controls)
        for paper in PAPERS
        if any(column.paper == paper and not column.detail for column in columns)
    ]
    return Block("Every method on the metrics of every paper", [WORDS], grids, choice=True)


def table_of_paper(
    paper: str, columns: Sequence[Column], cells: Cells, controls: Collection[str] = ()
) -> PageTable:
    """One paper's columns, of the methods that have any of them."""
    own = [column for column in columns if column.paper == paper and not column.detail]
    names = (*BESIDE.get(paper, ("test_accuracy",)), *ERRORS)
    shown = [column for column in columns if column.name in names] + own
    having = {
        method: row for method, row in cells.items() if any(row[column.name] for column in own)
    }
    absent = ", ".join(method for method in cells if method not in having)
    below = (f"Without these metrics: {absent}." if absent else "", NOTES[paper])
    papers = paper_models_with_numbers(paper, frozenset(column.name for column in shown))
    grid = method_rows_table(shown, having, controls, lambda column: paper_values(column, papers))
    return grid._replace(
        title=PAPERS[paper],
        short=SHORT[paper],
        below=" ".join(filter(None, below)),
        more=[paper_model_line(model, shown) for model in papers],
    )


def paper_values(column: Column, papers: Sequence[PaperModelNumbers]) -> list[str]:
    """Return the paper's numbers of one column: per model if they are few, else their range."""
    values = {one.model: one.values[column.name] for one in papers if column.name in one.values}
    printed = {
        model: format_paper_number(value, column).replace(" ", "\u00a0")
        for model, value in sorted(values.items(), key=lambda one: one[1])
    }
    if len(values) <= FEW:
        return [f"{model} {printed[model]}" for model in values]
    least, *_, largest = printed.values()
    return [f"{len(values)} models {least} to {largest}"]


def paper_model_line(model: PaperModelNumbers, columns: Sequence[Column]) -> TableRow:
    """All numbers of one model of the paper, and where in it they stand."""
    values = [
        f"{column.label} {format_paper_number(model.values[column.name], column)}"
        for column in columns
        if column.name in model.values
    ]
    return TableRow(
        PageCell(model.model, note=model.source), [PageCell("; ".join(values), look="words")]
    )


def headline_tables_as_markdown(compared: Mapping[str, Any]) -> list[str]:
    """Return the lines of a Markdown table for each phase: means over seeds.

    A metric that no method has is left out, one that a method lacks is a dash.
    compared: reports/compare.json as ``moecore.stages.compare`` writes it.
    """
    methods = {name: entry for name, entry in compared.items() if name not in NO_METHODS}
    lines: list[str] = []
    for phase in next(iter(methods.values())):
        rows = {method: [f"`{method}`"] for method in methods}
        head = ["method"]
        for column in HEADLINES:
            cells = {method: one[phase].get(column.name) for method, one in methods.items()}
            if column.short and any(cells.values()):
                head.append(column.short)
                for method, cell in cells.items():
                    rows[method].append(f"{cell['mean']:{column.digits}}" if cell else "–")
        lines += ["", f"**{phase}**", "", *markdown_table(head, rows.values(), "---:")]
    return lines


if __name__ == "__main__":
    try:
        path = next(iter(sys.argv[1:]), "reports/compare.json")
        print("\n".join(headline_tables_as_markdown(read_comparison(Path(path)))))
    except UserError as error:
        sys.exit(str(error))
