"""Tables of the page: one row per method, one column per metric of a paper."""

from collections.abc import Collection, Sequence

from moecore.report.column import Column
from moecore.report.page import page_objects
from moecore.report.tables.cells import Cells
from moecore.report.tables.paper_numbers import NOTES, PAPERS, REPORTED, SHORT, PaperModelNumbers

# Columns before those of a paper: the score, and for the cost what it is of.
OTHER_COLUMNS = {
    "cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead"),
    "moge": ("test_accuracy", "test_accuracy_top5"),
    "tgr": ("test_accuracy", "steps_to_baseline_loss"),
}
ERRORS = ("test_mae", "ppl")  # the score of ages, and of words
FEW = 3  # numbers of a paper in a head; with more, the smallest and the largest
WORDS = (
    "In italics below a column's name: the paper's own numbers. They come from other data and "
    "sizes: read them for their direction, not for their height."
)


def paper_tables_block(
    columns: Sequence[Column], cells: Cells, controls: Collection[str], papers: Collection[str]
) -> page_objects.Block:
    """Return a block with a table per paper with any of the metrics; one is shown at a time.

    papers: names of the papers whose claims the study tests: only their numbers are shown.
    """
    grids = [
        table_of_paper(paper, columns, cells, controls, papers)
        for paper in PAPERS
        if any(column.paper == paper and not column.detail for column in columns)
    ]
    texts = [WORDS] if any(grid.more for grid in grids) else []
    title = "Every method on the metrics of every paper"
    return page_objects.Block(title, texts, grids, choice=True, folded=True)


def table_of_paper(
    paper: str,
    columns: Sequence[Column],
    cells: Cells,
    controls: Collection[str],
    papers: Collection[str],
) -> page_objects.PageTable:
    """Return a paper's table: its metrics, methods that have any, numbers of ``asked`` papers."""
    of_paper = [column for column in columns if column.paper == paper and not column.detail]
    names = (*OTHER_COLUMNS.get(paper, ("test_accuracy",)), *ERRORS)
    shown = [column for column in columns if column.name in names] + of_paper
    having = {
        method: row for method, row in cells.items() if any(row[column.name] for column in of_paper)
    }
    absent = ", ".join(method for method in cells if method not in having)
    metrics = {column.name for column in shown}
    models = [
        model
        for model in REPORTED
        if model.paper == paper and model.printed_in in papers and model.values.keys() & metrics
    ]
    below = (f"Without these metrics: {absent}." if absent else "", NOTES[paper] if models else "")
    more = []
    for model in models:  # all its numbers, and their place in the paper
        values = [
            f"{column.label} {page_objects.format_paper_number(model.values[column.name], column)}"
            for column in shown
            if column.name in model.values
        ]
        head = page_objects.PageCell(model.model, note=model.source)
        more.append(
            page_objects.TableRow(head, [page_objects.PageCell("; ".join(values), look="words")])
        )
    grid = page_objects.method_rows_table(
        shown, having, controls, lambda column: paper_values(column, models)
    )
    below = " ".join(filter(None, below))
    return grid._replace(title=PAPERS[paper], short=SHORT[paper], below=below, more=more)


def paper_values(column: Column, models: Sequence[PaperModelNumbers]) -> list[str]:
    """Return the paper's numbers of one column as texts: one per model if few, else their range."""
    name = column.name
    values = {model.model: model.values[name] for model in models if name in model.values}
    printed = {
        model: page_objects.format_paper_number(value, column).replace(" ", "\u00a0")
        for model, value in sorted(values.items(), key=lambda pair: pair[1])
    }
    if len(values) <= FEW:
        return [f"{model} {printed[model]}" for model in values]
    smallest, *_, largest = printed.values()
    return [f"{len(values)} models {smallest} to {largest}"]
