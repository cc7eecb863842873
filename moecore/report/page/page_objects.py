"""Objects that the page's templates lay out: cells, tables, pictures, blocks and sections."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from moecore.report.column import Column
from moecore.report.figures.drawing import Figure
from moecore.report.result_types import Models
from moecore.report.tables.cells import TITLES, Cell, Cells, NumberFormat, method_cells_over_seeds

# Beginnings and ends of column names → the term that explains them.
TERM_BY_BEGINNING = {
    "agreement_": "agreement",
    "teacher_agreement": "agreement",
    "imed": "IMED",
    "load_cv2": "load CV²",
    "mce": "mCE",
}
TERM_BY_ENDING = {"_worst_case": "worst case"}
MIN_WIDE_INCHES = 7.0  # inches; a wider figure takes the whole width of the page


def find_glossary_term(column: str) -> str:
    """Return the term that explains a column on the page (from parts.html.jinja), or ""."""
    terms = [term for beginning, term in TERM_BY_BEGINNING.items() if column.startswith(beginning)]
    terms += [term for ending, term in TERM_BY_ENDING.items() if column.endswith(ending)]
    return next(iter(terms), "")


class PageCell(NamedTuple):
    text: str
    small: str = ""  # limits, below the value
    note: str = ""
    look: str = ""  # a class of the style sheet
    share: float | None = None  # depth of the cell's colour, from 0 to 1
    value: float | None = None  # to sort by; None for texts


DASH = PageCell("–", look="quiet")
EMPTY = PageCell("")


class TableRow(NamedTuple):
    """A row of a table; a row without items is a heading across all columns."""

    head: PageCell
    items: Sequence[PageCell] = ()
    look: str = ""


class ColumnHead(NamedTuple):
    title: str = ""  # shown while the pointer is on it
    better: str = ""  # "higher", "lower", or "" where neither is better
    word: str = ""  # a term of parts.html.jinja that explains it
    notes: Sequence[str] = ()  # lines below the name


class PageTable(NamedTuple):
    columns: Sequence[str]  # the first is above the rows' heads; () for none
    lines: Sequence[TableRow]
    title: str = ""
    below: str = ""
    small: bool = False  # many narrow columns
    heads: Sequence[ColumnHead] = ()  # one per column, or () for names only
    sortable: bool = False  # by any column
    short: str = ""  # title in a choice of tables
    more: Sequence[TableRow] = ()  # rows of text that are folded below it
    foot: Sequence[TableRow] = ()  # rows that are compared with, and not sorted

    @property
    def columns_with_heads(self) -> Sequence[tuple[str, ColumnHead]]:
        """(name, head) of each column; empty heads if the table has none."""
        heads = self.heads or [ColumnHead()] * len(self.columns)
        return list(zip(self.columns, heads, strict=True))

    @property
    def has_many_rows(self) -> bool:
        return len(self.lines) > 8

    @property
    def has_upright_names(self) -> bool:
        """True if column names are printed vertically: in small tables with words as names."""
        return self.small and any(len(name) > 2 for name in self.columns[1:])


class Picture(NamedTuple):
    figure: Figure
    label: str  # for screen readers; unique in the page
    caption: str = ""

    @property
    def raster(self) -> bool:
        """True if the figure is smaller as PNG than as SVG."""
        return getattr(self.figure, "raster", False)

    @property
    def wide(self) -> bool:
        """True if the figure needs the page's full width for its texts to be legible."""
        return self.figure.get_figwidth() > MIN_WIDE_INCHES


class PageBlock(NamedTuple):
    """A titled part of a page section: texts, tables, pictures, remarks."""

    title: str
    words: Sequence[str] = ()
    grids: Sequence[PageTable] = ()
    pictures: Sequence[Picture] = ()
    tiles: Sequence[PageTable] = ()  # small tables side by side
    below: Sequence[str] = ()
    folded: bool = False  # shown when the reader opens it
    marks: str = ""  # what the marks of its tables mean
    finding: str = ""  # the result in a line, visible while the block is folded
    about: str = ""  # name of the column to describe if there is no finding
    choice: bool = False  # one of the tables, or of the pictures, is shown at a time
    id: str = ""  # in the page, which sets it

    @property
    def empty(self) -> bool:
        return not (self.grids or self.pictures or self.tiles or self.below)


class PageSection(NamedTuple):
    id: str
    title: str
    short: str  # in the bar
    blocks: Sequence[PageBlock]


class Page(NamedTuple):
    simulated: str  # names of simulated data; "" where there are none
    title: str  # what was compared, and who is better by how much
    answer: str  # further findings
    overviews: Sequence[PageBlock]  # of a phase: pictures of its methods, and what was not measured
    sections: Sequence[PageSection]
    facts: Sequence[PageTable]  # about the data
    settings: str  # the text of params.yaml
    explorer: str = ""  # address of the routing explorer, if there is one


def method_rows_table(
    columns: Sequence[Column],
    cells: Cells,
    controls: Collection[str] = (),
    notes: Callable[[Column], Sequence[str]] = lambda column: (),
) -> PageTable:
    """Return a table with one row per method and one column per metric."""
    rows = cells.values()
    items = [format_column_cells(column, [row[column.name] for row in rows]) for column in columns]
    lines = []
    for row, method in enumerate(cells):
        head = PageCell(method, note="control" if method in controls else "")
        lines.append(TableRow(head, [column_cells[row] for column_cells in items]))
    heads = [
        ColumnHead(column.note, column.better, find_glossary_term(column.name), notes(column))
        for column in columns
    ]
    names = ["Method", *(column.label for column in columns)]
    return PageTable(names, lines, heads=[ColumnHead(), *heads], sortable=len(lines) > 1)


def metric_rows_table(columns: Sequence[Column], cells: Cells) -> PageTable:
    lines = []
    paper = ""
    for column in columns:
        if column.paper != paper:
            paper = column.paper
            lines.append(TableRow(PageCell(TITLES[paper]), look="group"))
        items = format_column_cells(column, [row[column.name] for row in cells.values()])
        lines.append(TableRow(PageCell(column.label, note=column.note), items))
    return PageTable(["Metric", *cells], lines)


def format_column_cells(column: Column, cells: Sequence[Cell | None]) -> list[PageCell]:
    """Return one table cell per value, all with equal decimals; a dash for a missing value."""
    number_format = NumberFormat.of(column.form, (cell.interval for cell in cells if cell))
    items = []
    for cell in cells:
        if cell is None:
            items.append(DASH)
            continue
        value = cell.interval.value
        look = "best" if cell.marked else ""
        limits = number_format.limits(cell.interval)
        items.append(PageCell(number_format.value(value), limits, look=look, value=value))
    return items


def format_method_cells(column: Column, models: Models) -> list[PageCell]:
    return format_column_cells(column, list(method_cells_over_seeds(column, models).values()))


def percent_table(
    corner: str, rows: Mapping[str, Sequence[float | None]], columns: Sequence[str]
) -> PageTable:
    """Return a table of coloured percentages; rows: name → share per column, None: empty cell."""
    lines = []
    for name, shares in rows.items():
        cells = [
            EMPTY if share is None else PageCell(f"{share * 100:.0f}", share=share)
            for share in shares
        ]
        lines.append(TableRow(PageCell(name), cells))
    return PageTable([corner, *columns], lines, small=True)


def format_paper_number(value: float, column: Column) -> str:
    """Return a number of a paper as text, in the column's unit, with up to four digits."""
    if column.form == "share":
        return f"{100 * value:.4g} %"
    if column.form == "count" and value >= 1e6:
        return f"{value / 1e6:.4g} million"
    return f"{value:,.0f}" if column.form == "count" else f"{value:.4g}"
