"""The cross-table: every method on every metric, one table a paper, its own numbers below ours."""

from collections.abc import Sequence

from moecore.report.cells import Cells
from moecore.report.column import Column
from moecore.report.paper_figures import NOTES, PAPERS, reported
from moecore.report.rows import by_method
from moecore.report.view import Block, Grid

# What stands beside a table's own columns: the score, and for the cost what it is of.
BESIDE = {"cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead")}
WORDS = (
    "Rows in italics are the papers' own numbers, from other data and sizes: read them for their "
    "direction, not for their height."
)


def by_paper(columns: Sequence[Column], cells: Cells) -> Block:
    """One small table for each paper whose metrics any method has."""
    grids = [
        grid_of(paper, columns, cells)
        for paper in PAPERS
        if any(column.paper == paper and not column.detail for column in columns)
    ]
    return Block("Every method on the metrics of every paper", [WORDS], grids)


def grid_of(paper: str, columns: Sequence[Column], cells: Cells) -> Grid:
    """One paper's columns, of the methods that have any of them."""
    own = [column for column in columns if column.paper == paper and not column.detail]
    names = (*BESIDE.get(paper, ("test_accuracy",)), "test_mae")
    shown = [column for column in columns if column.name in names] + own
    having = {
        method: row for method, row in cells.items() if any(row[column.name] for column in own)
    }
    absent = [method for method in cells if method not in having]
    notes = [f"Without these metrics: {', '.join(absent)}."] if absent else []
    if paper in NOTES:
        notes.append(NOTES[paper])
    papers = reported(paper, frozenset(column.name for column in shown))
    grid = by_method(shown, having, papers)
    return grid._replace(title=PAPERS[paper], below=" ".join(notes))
