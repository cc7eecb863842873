"""Metrics and cells as the rows of a page's tables."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from moecore.report.cells import Cell, Cells, cell
from moecore.report.column import Column, Metric
from moecore.report.measured import Measured
from moecore.report.paper_figures import PAPERS, Reported
from moecore.report.view import EMPTY, NONE, Grid, Item, Line
from moecore.report.words import limits_of, shown


def by_method(
    columns: Sequence[Column],
    cells: Cells,
    papers: Iterable[Reported] = (),
    controls: Collection[str] = (),
) -> Grid:
    """Methods as rows, metrics as columns; below them what the papers report of their models."""
    lines = [
        Line(
            Item(method, note="control" if method in controls else ""),
            [item(row[column.name], column) for column in columns],
        )
        for method, row in cells.items()
    ]
    for model in papers:
        values = [reported(model.values.get(column.name), column) for column in columns]
        lines.append(Line(Item(f"Paper: {model.model}", note=model.source), values, "paper"))
    return Grid(["Method", *(column.label for column in columns)], lines)


def by_metric(columns: Sequence[Column], cells: Cells) -> Grid:
    """Metrics as rows, methods as columns: everything, the metrics of a paper under its name."""
    lines = []
    paper = ""
    for column in columns:
        if column.paper != paper:
            paper = column.paper
            lines.append(Line(Item(PAPERS[paper]), look="group"))
        head = Item(column.label, note=column.note)
        lines.append(Line(head, [item(row[column.name], column) for row in cells.values()]))
    return Grid(["Metric", *cells], lines)


def item(found: Cell | None, column: Column) -> Item:
    """A value with its limits, marked where it is the best; a dash where there is none."""
    if found is None:
        return NONE
    form = column.form
    look = "best" if found.marked else ""
    return Item(shown(found.interval.value, form), limits_of(found, form), look=look)


def item_of(metric: Metric, seeds: Sequence[Measured]) -> Item:
    """The value of one method."""
    return item(cell(metric, seeds), metric.column)


def percents(
    corner: str, rows: Mapping[str, Sequence[float | None]], columns: Sequence[str]
) -> Grid:
    """Shares as percents in colour; rows: name → a share for each column, None where unknown."""
    lines = [
        Line(
            Item(name),
            [
                EMPTY if share is None else Item(f"{share * 100:.0f}", share=share)
                for share in shares
            ],
        )
        for name, shares in rows.items()
    ]
    return Grid([corner, *columns], lines, small=True)


def reported(value: float | None, column: Column) -> Item:
    """A paper's number with the digits that the paper prints."""
    if value is None:
        return EMPTY
    match column.form:
        case "share":
            return Item(f"{100 * value:.4g} %")
        case "count":
            return Item(f"{value:,.0f}")
    return Item(f"{value:.4g}")
