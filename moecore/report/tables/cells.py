"""Entries of tables: a value with its limits, over the seeds of a method; tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moecore.report.column import Column
from moecore.report.typed_results import Measured, Models, list_without_none
from moecore.statistics.crossed import BOTH, crossed_difference
from moecore.statistics.intervals import Interval, mean_over_seed_pairs, mean_over_seeds


class Cell(NamedTuple):
    """One entry of the table."""

    interval: Interval
    kind: str  # of its limits: BOTH, t, jackknife, wilson, bootstrap, quartiles or "" for none
    seeds: int
    # Better than every other method of its column but controls, and not by chance.
    leads: bool = False
    # Shown as the best: it leads, and is no model without experts that the others are held against.
    marked: bool = False


Cells = Mapping[str, Mapping[str, Cell | None]]  # method → metric → cell


def cell_over_seeds(metric: Column, models: Sequence[Measured]) -> Cell | None:
    """Return the mean over seeds with its interval over items and seeds; Student's over seeds where
    they do not keep two items and as many each, none where a value is a bound. Of one seed the
    metric's own, if any; of a metric of pairs of seeds the mean over pairs.
    """
    if metric.of_pairs:
        return cell_over_seed_pairs(metric, models)
    intervals = [interval for model in models if (interval := metric.read(model)) is not None]
    if len(intervals) < len(models):
        return None
    if len(intervals) == 1:
        return Cell(intervals[0], metric.limits if intervals[0].limits else "", 1)
    mean, kind = mean_over_seeds([interval.value for interval in intervals]), "t"
    if metric.has_bound(models):
        return Cell(Interval(mean.value), "", len(intervals))
    items = list_without_none(metric.items(model) for model in models)
    counts = {len(values) for values in items}
    has_items = len(items) == len(models) and len(counts) == 1 and counts != {1}
    if has_items and (half := crossed_difference(np.stack(items)).half()):
        mean, kind = Interval(mean.value, mean.value - half, mean.value + half), BOTH
    if metric.form == "share" and mean.limits:
        low, high = mean.limits
        mean = Interval(mean.value, max(0.0, low), min(1.0, high))
    return Cell(mean, kind, len(intervals))


def cell_over_seed_pairs(metric: Column, models: Sequence[Measured]) -> Cell | None:
    """Return the mean over pairs of seeds with the jackknife's interval, without one of two."""
    pairs = metric.pair_values(models)
    if pairs is None:
        return None
    mean = mean_over_seed_pairs(pairs)
    return Cell(mean, "jackknife" if mean.limits else "", len(models))


def method_cells_over_seeds(metric: Column, models: Models) -> dict[str, Cell | None]:
    """Return method → its cell; None where a method has no such thing."""
    return {
        method: cell_over_seeds(metric, list(seeds.values())) for method, seeds in models.items()
    }


def cell_to_json(cell: Cell, form: str) -> dict[str, Any]:
    """Return mean, low, high, interval (its kind), seeds and form; no limits where there are none.

    form: how the value is printed, see ``NumberFormat``.
    """
    value, low, high = cell.interval
    entry = {"mean": value, "low": low, "high": high, "interval": cell.kind}
    if not cell.kind:
        entry = {"mean": value}
    return entry | {"seeds": cell.seeds, "form": form}


def interval_from_json(cell: Mapping[str, Any]) -> Interval:
    """Return the value and the limits of a cell of compare.json."""
    return Interval(cell["mean"], cell.get("low"), cell.get("high"))


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---"
) -> list[str]:
    """Return the lines of a table; rule: below the heads but the first, ``---:`` for numbers."""
    rules = ["---", *[rule] * (len(head) - 1)]
    return [f"| {' | '.join(map(_escape_cell, cells))} |" for cells in (head, rules, *rows)]


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
