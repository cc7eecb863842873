"""Single images: shown by explorer.html, not by the page."""

from moecore.measure.explorer import Result
from moecore.report.column import Columns
from moecore.report.measures.shown import Figures

COLUMNS: tuple[Columns, ...] = ()


def figures(result: Result) -> Figures:
    """None."""
    yield from ()
