"""Error by corruption and severity, a table per method."""

from collections.abc import Iterator

import numpy as np

from moecore.measure.corruptions import Corruptions, errors_of
from moecore.measure.values import Found
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.page.page_objects import Block, PageTable, percent_grid
from moecore.report.results import Figures, Pictures
from moecore.report.study_results import Phase


def figures(result: Found) -> Figures:
    """Yield a heatmap of errors by corruption and severity, with its name."""
    grid = corruption_by_severity_table(result)
    table = np.array([[item.share for item in line.items] for line in grid.lines], dtype=float)
    names = [line.head.text for line in grid.lines]
    severities = grid.columns[1:]
    labels = Labels("Error under corruption", names, severities, "Severity")
    size = (2.4 + 0.5 * len(severities), 0.9 + 0.27 * len(names))
    figure = draw_heatmap(table, percent_annotations(table), labels, size, "Percent.")
    yield "corruption_errors", figure


def corruption_by_severity_table(result: Found) -> PageTable:
    errors = errors_of(result)
    severities = sorted({severity for row in errors.values() for severity in row})
    rows = {
        str(name).replace("_", " "): [row.get(severity) for severity in severities]
        for name, row in errors.items()
    }
    grid = percent_grid("Severity", rows, [str(severity) for severity in severities])
    return grid._replace(below="Error in percent.")


def corruption_tables(phase: Phase) -> Iterator[Block]:
    tiles = [
        corruption_by_severity_table(result)._replace(title=name)
        for name, result in phase.first(Corruptions).items()
    ]
    yield Block("Each corruption", tiles=tiles)


PICTURES = Pictures("corruptions", figures, is_on_page=False, more=corruption_tables)
