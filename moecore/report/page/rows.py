"""Metrics and cells as the rows of a page's tables."""

from collections.abc import Callable, Collection, Mapping, Sequence

from moecore.report.column import Column
from moecore.report.page.glossary import find_explaining_word
from moecore.report.page.view import EMPTY, NONE, ColumnHead, PageCell, PageTable, TableRow
from moecore.report.tables.cells import Cell, Cells, cell_over_seeds
from moecore.report.tables.number_format import NumberFormat
from moecore.report.tables.paper_numbers import PAPERS
from moecore.report.typed_results import Models


def method_rows_table(
    columns: Sequence[Column],
    cells: Cells,
    controls: Collection[str] = (),
    notes: Callable[[Column], Sequence[str]] = lambda column: (),
) -> PageTable:
    """Methods as rows, metrics as columns, whose heads have notes below them."""
    items = [
        format_column(column, [row[column.name] for row in cells.values()]) for column in columns
    ]
    lines = [
        TableRow(
            PageCell(method, note="control" if method in controls else ""),
            [one[row] for one in items],
        )
        for row, method in enumerate(cells)
    ]
    heads = [
        ColumnHead(column.note, column.better, find_explaining_word(column.name), notes(column))
        for column in columns
    ]
    names = ["Method", *(column.label for column in columns)]
    return PageTable(names, lines, heads=[ColumnHead(), *heads], sortable=len(lines) > 1)


def metric_rows_table(columns: Sequence[Column], cells: Cells) -> PageTable:
    """Metrics as rows, methods as columns: everything, the metrics of a paper under its name."""
    lines = []
    paper = ""
    for column in columns:
        if column.paper != paper:
            paper = column.paper
            lines.append(TableRow(PageCell(PAPERS[paper]), look="group"))
        items = format_column(column, [row[column.name] for row in cells.values()])
        lines.append(TableRow(PageCell(column.label, note=column.note), items))
    return PageTable(["Metric", *cells], lines)


def format_column(column: Column, cells: Sequence[Cell | None]) -> list[PageCell]:
    """Return one column's cells with the same digits; a dash where there is no value."""
    number_format = NumberFormat.of(column.form, (cell.interval for cell in cells if cell))
    items = []
    for cell in cells:
        if cell is None:
            items.append(NONE)
            continue
        value = cell.interval.value
        look = "best" if cell.marked else ""
        limits = number_format.limits(cell.interval)
        items.append(PageCell(number_format.value(value), limits, look=look, value=value))
    return items


def cells_of_methods(column: Column, models: Models) -> list[PageCell]:
    """Return the cells of one column, one per method."""
    return format_column(
        column, [cell_over_seeds(column, list(seeds.values())) for seeds in models.values()]
    )


def percent_grid(
    corner: str, rows: Mapping[str, Sequence[float | None]], columns: Sequence[str]
) -> PageTable:
    """Shares as percents in colour; rows: name → a share for each column, None where unknown."""
    lines = [
        TableRow(
            PageCell(name),
            [
                EMPTY if share is None else PageCell(f"{share * 100:.0f}", share=share)
                for share in shares
            ],
        )
        for name, shares in rows.items()
    ]
    return PageTable([corner, *columns], lines, small=True)


def format_paper_number(value: float, column: Column) -> str:
    """A paper's number with the digits that the paper prints."""
    match column.form:
        case "share":
            return f"{100 * value:.4g} %"
        case "count":
            return f"{value / 1e6:.4g} million" if value >= 1e6 else f"{value:,.0f}"
    return f"{value:.4g}"
