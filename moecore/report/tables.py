"""The tables: one value with its interval for every method and metric, and where the best one is beyond doubt."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moecore.evaluation.intervals import Interval, over_seeds
from moecore.report.metrics import Metric, metrics_of
from moecore.report.results import Measured, Results


class Cell(NamedTuple):
    """One entry of the table; ``kind`` says what its limits are: t, wilson, bootstrap or "" for none."""

    interval: Interval
    kind: str
    seeds: int


def table(results: Results, phase: str) -> tuple[list[Metric], dict[str, dict[str, Cell | None]]]:
    """The metrics that any method has, and the cell of every method and metric (None where a method has no such thing)."""
    methods = results.models[phase]
    metrics = metrics_of([model for seeds in methods.values() for model in seeds.values()])
    cells = {method: {metric.name: cell(metric, list(seeds.values())) for metric in metrics} for method, seeds in methods.items()}
    return [metric for metric in metrics if any(row[metric.name] for row in cells.values())], cells


def cell(metric: Metric, models: Sequence[Measured]) -> Cell | None:
    """Mean over seeds with Student's interval; for a single seed the metric's own interval, where it has one."""
    read = [metric.read(model) for model in models]
    if any(value is None for value in read):
        return None
    if len(read) == 1 and isinstance(read[0], Interval):
        own = "wilson" if metric.name.startswith(("test_accuracy", "accuracy_")) else "bootstrap"
        return Cell(read[0], own if read[0].low is not None else "", 1)
    values = [value.value if isinstance(value, Interval) else float(value) for value in read]
    found = over_seeds(values)
    if metric.form == "share" and found.low is not None:
        found = Interval(found.value, max(0.0, found.low), min(1.0, found.high))
    return Cell(found, "t" if len(values) > 1 else "", len(values))


def best(metric: Metric, cells: Mapping[str, Cell | None]) -> str | None:
    """The method whose interval lies beyond every other's, or None: a difference inside the intervals is no difference."""
    known = {method: found.interval for method, found in cells.items() if found is not None}
    if not metric.better or len(known) < 2 or any(interval.low is None for interval in known.values()):
        return None
    sign = 1 if metric.better == "higher" else -1
    edges = {method: sorted((sign * interval.low, sign * interval.high)) for method, interval in known.items()}
    first = max(edges, key=lambda method: edges[method][0])
    return first if all(edges[first][0] > high for method, (_, high) in edges.items() if method != first) else None


def flat(results: Results) -> dict[str, Any]:
    """The content of compare.json: method → phase → metric → mean, low, high, interval, seeds."""
    tables = {phase: table(results, phase)[1] for phase in results.models}
    methods = next(iter(results.models.values()))

    def known(cells: Mapping[str, Cell | None]) -> dict[str, Any]:
        return {name: as_json(found) for name, found in cells.items() if found}

    return {method: {phase: known(cells[method]) for phase, cells in tables.items()} for method in methods}


def as_json(found: Cell) -> dict[str, Any]:
    """mean, low, high, interval (its kind) and seeds; without limits where there are none."""
    limits = {"low": found.interval.low, "high": found.interval.high, "interval": found.kind} if found.kind else {}
    return {"mean": found.interval.value, **limits, "seeds": found.seeds}
