"""The cross-table: every method on every metric, one table a paper, the paper's own numbers below ours."""

from collections.abc import Mapping, Sequence
from html import escape

from moecore.report.markup import by_method
from moecore.report.metric import Metric
from moecore.report.paper_figures import NOTES, PAPERS, reported
from moecore.report.tables import Cell

Cells = Mapping[str, Mapping[str, Cell | None]]
BESIDE = {"cost": ("test_accuracy", "parameters", "active_parameters", "training_overhead")}  # what stands beside the own columns of a table


def by_paper(metrics: Sequence[Metric], cells: Cells) -> str:
    """One small table for each paper whose metrics any method has, each beginning with the test accuracy (the error, for ages); "" where there is none."""
    parts = [_part(paper, metrics, cells) for paper in PAPERS if any(metric.paper == paper and not metric.detail for metric in metrics)]
    if not parts:
        return ""
    words = "Rows in italics are the papers' own numbers, from other data and sizes: read them for their direction, not for their height."
    return f'<h3>Every method on the metrics of every paper</h3><p class="quiet">{words}</p>{"".join(parts)}'


def _part(paper: str, metrics: Sequence[Metric], cells: Cells) -> str:
    own = [metric for metric in metrics if metric.paper == paper and not metric.detail]
    beside = (*BESIDE.get(paper, ("test_accuracy",)), "test_mae")
    columns = [metric for metric in metrics if metric.name in beside] + own
    routed = {method: row for method, row in cells.items() if any(row[metric.name] for metric in own)}
    absent = [method for method in cells if method not in routed]
    notes = [f"Without these metrics: {', '.join(absent)}."] if absent else []
    notes += [NOTES[paper]] if paper in NOTES else []
    papers = reported(paper, frozenset(metric.name for metric in columns))
    below = f'<p class="quiet">{escape(" ".join(notes))}</p>' if notes else ""
    return f"<h4>{escape(PAPERS[paper])}</h4>{by_method(columns, routed, papers)}{below}"
