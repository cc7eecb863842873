"""The cross-table: every method on every metric, one table a paper.

The paper's own numbers stand in the heads of the columns, and below the table with their sources.
"""

from collections.abc import Collection, Sequence

from moecore.report.column import Column
from moecore.report.paper_figures import NOTES, PAPERS, SHORT, Reported, reported
from moecore.report.rows import by_method
from moecore.report.rows import reported as printed
from moecore.report.view import Block, Grid, Item, Line
from moecore.report.words import Cells

# What stands beside a table's own columns: the score, and for the cost what it is of.
BESIDE = {
    "cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead"),
    "moge": ("test_accuracy", "test_accuracy_top5"),
    "tgr": ("test_accuracy", "steps_to_baseline_loss"),
}
FEW = 3  # numbers of a paper that a head has room for; of more the least and the largest
WORDS = (
    "In italics below a column's name: the paper's own numbers. They come from other data and "
    "sizes: read them for their direction, not for their height."
)


def by_paper(columns: Sequence[Column], cells: Cells, controls: Collection[str] = ()) -> Block:
    """One small table for each paper whose metrics any method has; one is shown at a time."""
    grids = [
        grid_of(paper, columns, cells, controls)
        for paper in PAPERS
        if any(column.paper == paper and not column.detail for column in columns)
    ]
    return Block("Every method on the metrics of every paper", [WORDS], grids, choice=True)


def grid_of(
    paper: str, columns: Sequence[Column], cells: Cells, controls: Collection[str] = ()
) -> Grid:
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
    grid = by_method(shown, having, controls, lambda column: beside(column, papers))
    return grid._replace(
        title=PAPERS[paper],
        short=SHORT[paper],
        below=" ".join(notes),
        more=[source(model, shown) for model in papers],
    )


def beside(column: Column, papers: Sequence[Reported]) -> list[str]:
    """The paper's numbers of one column: model by model where they are few, else their ends."""
    found = {model.model: model.values[column.name] for model in papers if has(model, column)}
    if len(found) <= FEW:
        return [f"{model} {unbroken(value, column)}" for model, value in found.items()]
    ends = [unbroken(end, column) for end in (min(found.values()), max(found.values()))]
    return [f"{len(found)} models {' to '.join(ends)}"]


def unbroken(value: float, column: Column) -> str:
    """A number whose percent sign stays on its line."""
    return printed(value, column).replace(" ", "\u00a0")


def has(model: Reported, column: Column) -> bool:
    """Whether a paper tells this of its model."""
    return column.name in model.values


def source(model: Reported, columns: Sequence[Column]) -> Line:
    """All numbers of one model of the paper, and where in it they stand."""
    values = [
        f"{column.label} {printed(model.values[column.name], column)}"
        for column in columns
        if has(model, column)
    ]
    return Line(Item(model.model, note=model.source), [Item("; ".join(values), look="words")])
