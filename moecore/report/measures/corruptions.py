"""Errors under common corruptions (Hendrycks & Dietterich, 2019)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import get_args

import numpy as np

from moecore.measure.corruptions import Errors, Name, Result, mean_corruption_error
from moecore.measure.values import place_slug
from moecore.report.column import (
    Column,
    ColumnContext,
    ColumnPerRow,
    ContextDependentColumns,
    mean_or_none,
)
from moecore.report.figures.charts import ChartSpec, Labels, draw_heatmap, percent_annotations
from moecore.report.measures.result_display import Figures, Shown, draw_method_curves
from moecore.report.page.rows import percent_grid
from moecore.report.page.view import Block, PageTable
from moecore.report.typed_results import Phase
from moecore.statistics.intervals import Interval


def errors_of(result: Result) -> Errors:
    errors: dict[str, dict[int, float]] = defaultdict(dict)
    for row in result.corruptions:
        errors[row.name][row.severity] = row.error
    return errors


def mce_column(seen: ColumnContext) -> list[Column]:
    """mCE; none where the dense model makes no error under a corruption: no ratio is defined."""
    if not (dense := errors_of_dense(seen)):
        return []
    return [
        Column(
            "mce",
            "mCE",
            lambda result: mean_corruption_error(errors_of(result), dense),
            "lower",
            note="mean over corruptions of error / error of dense, each summed over severities; "
            "1 is as good as dense",
            paper="corruptions",
        )
    ]


def errors_of_dense(seen: ColumnContext) -> Errors | None:
    by_seed = [errors_of(result) for result in seen.of_dense]
    if not by_seed:
        return None
    errors = {
        name: {severity: fmean(one[name][severity] for one in by_seed) for severity in row}
        for name, row in by_seed[0].items()
    }
    return errors if all(any(row.values()) for row in errors.values()) else None


COLUMNS = (
    Column(
        "corruption_error",
        "Error, mean",
        lambda result: Interval(result.mean_error, result.mean_low, result.mean_high),
        "lower",
        "share",
        "over corruptions and severities",
        "corruptions",
    ),
    ContextDependentColumns(mce_column, lambda ahead: ["mce"], better="lower"),
    ColumnPerRow(
        lambda result: {place_slug(name): row for name, row in errors_of(result).items()},
        Column(
            "error_{}",
            "Error, {}",
            lambda errors: mean_or_none(list(errors.values())),
            "lower",
            "share",
            "mean over severities",
            "corruptions",
            detail=True,
        ),
        lambda ahead: map(place_slug, ahead.study.corruptions.names or get_args(Name)),
        lambda slug, errors: [slug.replace("_", " ")],
    ),
)


def figures(result: Result) -> Figures:
    grid = corruption_by_severity_table(result)
    table = np.array([[item.share for item in line.items] for line in grid.lines], dtype=float)
    names = [line.head.text for line in grid.lines]
    severities = grid.columns[1:]
    labels = Labels("Error under corruption", names, severities, "Severity")
    size = (2.4 + 0.5 * len(severities), 0.9 + 0.27 * len(names))
    caption = "Percent."
    yield (
        "corruption_errors",
        draw_heatmap(table, percent_annotations(table), labels, size, caption),
    )


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Error over severity for all methods, and each method's table."""
    first = phase.first(Result)
    look = ChartSpec("Error under corruption", "Severity", "Error", share=True, height=3.2)
    corruptions = len(errors_of(phase.results(Result)[0]))
    words = f"Mean over {corruptions} corruptions."
    drawn = draw_method_curves(phase, Result, mean_errors_by_severity, look, words, "corruptions")
    yield Block("Common corruptions", pictures=drawn, about="corruption_error")
    tiles = [
        corruption_by_severity_table(result)._replace(title=name) for name, result in first.items()
    ]
    yield Block(
        "Each corruption", tiles=tiles, finding=describe_extreme_corruptions(first.values())
    )


def describe_extreme_corruptions(results: Iterable[Result]) -> str:
    """The corruption with the largest error, and that with the smallest, over the methods."""
    errors = defaultdict(list)
    for result in results:
        for row in result.corruptions:
            errors[row.name.replace("_", " ")].append(row.error)
    means = {name: fmean(values) for name, values in errors.items()}
    worst = max(means, key=means.__getitem__)
    least = min(means, key=means.__getitem__)
    ends = [f"{name} ({100 * means[name]:.0f} %)" for name in (worst, least)]
    return f"the largest error is under {ends[0]}, the smallest under {ends[1]}"


def corruption_by_severity_table(result: Result) -> PageTable:
    severities = sorted({row.severity for row in result.corruptions})
    rows = {
        name.replace("_", " "): [row.get(severity) for severity in severities]
        for name, row in errors_of(result).items()
    }
    names = [str(severity) for severity in severities]
    return percent_grid("Severity", rows, names)._replace(below="Error in percent.")


def mean_errors_by_severity(result: Result) -> dict[float, float]:
    errors = defaultdict(list)
    for row in result.corruptions:
        errors[row.severity].append(row.error)
    return {severity: sum(values) / len(values) for severity, values in sorted(errors.items())}


SHOWN = Shown("corruptions", "corruptions", Result, COLUMNS, figures, phase_blocks, place=7)
