"""One entry of a table: a value with its interval over seeds, or of one seed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moecore.report.column import Metric
from moecore.report.measured import Measured
from moecore.statistics.intervals import Interval, over_seeds


class Cell(NamedTuple):
    """One entry of the table."""

    interval: Interval
    kind: str  # of its limits: t, wilson, bootstrap, quartiles or "" for none
    seeds: int
    # Better than every other method of its column but controls, and not by chance.
    leads: bool = False
    # Shown as the best: it leads, and is no model without experts that the others are held against.
    marked: bool = False


Cells = Mapping[str, Mapping[str, Cell | None]]  # method → metric → cell


def cell(metric: Metric, models: Sequence[Measured]) -> Cell | None:
    """Mean over seeds with Student's interval; one seed has the metric's own interval, if any."""
    read = [metric.read(model) for model in models]
    known = [found for found in read if found is not None]
    if len(known) < len(read):
        return None
    if len(known) == 1:
        return Cell(known[0], metric.column.limits if known[0].limits else "", 1)
    found = over_seeds([interval.value for interval in known])
    if metric.column.form == "share" and found.limits:
        low, high = found.limits
        found = Interval(found.value, max(0.0, low), min(1.0, high))
    return Cell(found, "t", len(known))


def as_json(found: Cell) -> dict[str, Any]:
    """mean, low, high, interval (its kind) and seeds; without limits where there are none."""
    value, low, high = found.interval
    if not found.kind:
        return {"mean": value, "seeds": found.seeds}
    return {"mean": value, "low": low, "high": high, "interval": found.kind, "seeds": found.seeds}
