"""The tables: one value with its interval for every method and metric, and where the best one is beyond doubt."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.data.prepared import is_real
from moecore.evaluation.intervals import Interval, over_seeds
from moecore.report import standing
from moecore.report.metric import Metric, number
from moecore.report.metrics import metrics_of
from moecore.report.relative import Models, references, relative_to
from moecore.report.results import Measured, Results


class Cell(NamedTuple):
    """One entry of the table; ``kind`` says what its limits are: t, wilson, bootstrap, quartiles or "" for none."""

    interval: Interval
    kind: str
    seeds: int
    marked: bool = False  # better than every other method of its column but controls, and not by chance


def table(results: Results, phase: str) -> tuple[list[Metric], dict[str, dict[str, Cell | None]]]:
    """The metrics that any method has, and the cell of every method and metric (None where a method has no such thing)."""
    models = results.models[phase]
    metrics = metrics_of([model for seeds in models.values() for model in seeds.values()], relative_to(models))
    controls = results.controls
    columns = {metric.name: column(metric, models, controls) for metric in metrics}
    cells = {method: {name: found[method] for name, found in columns.items()} for method in models}
    return [metric for metric in metrics if any(columns[metric.name].values())], cells


def column(metric: Metric, models: Models, controls: Collection[str] = ()) -> dict[str, Cell | None]:
    """The cell of every method, the best one marked where a test or the intervals show it; ``controls`` neither are the best nor have to be beaten."""
    cells = {method: cell(metric, list(seeds.values())) for method, seeds in models.items()}
    known = {method: models[method] for method, found in cells.items() if found and method not in controls}
    if not metric.better or len(known) < 2:
        return cells
    if standing.way_of(metric, list(known.values())) == "intervals":
        first = best(metric, {method: cells[method] for method in known})
    else:
        first = standing.leader(metric, known, {method: cells[method].interval.value for method in known})
    return {method: found._replace(marked=method == first) if found else None for method, found in cells.items()}


def ways(results: Results, phase: str, metrics: Sequence[Metric]) -> set[str]:
    """The tests behind the marks of these metrics: keys of ``standing.WORDS``."""
    models = [seeds for method, seeds in results.models[phase].items() if method not in results.controls]
    found = set()
    for metric in metrics:
        having = [seeds for seeds in models if cell(metric, list(seeds.values()))]
        found |= {standing.way_of(metric, having)} if len(having) > 1 else set()
    return found - {""}


def cell(metric: Metric, models: Sequence[Measured]) -> Cell | None:
    """Mean over seeds with Student's interval; for a single seed the metric's own interval, where it has one."""
    read = [metric.read(model) for model in models]
    if any(value is None for value in read):
        return None
    if len(read) == 1 and isinstance(read[0], Interval):
        return Cell(read[0], metric.limits if read[0].low is not None else "", 1)
    found = over_seeds([number(value) for value in read])
    if metric.form == "share" and found.low is not None:
        found = Interval(found.value, max(0.0, found.low), min(1.0, found.high))
    return Cell(found, "t" if len(read) > 1 else "", len(read))


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
    """The content of compare.json: method → phase → metric → mean, low, high, interval, seeds, and ``against``.

    against: the tests against the baseline MoE and the dense model, by name; only where there is a paired test.
    """
    compared: dict[str, Any] = {method: {phase: {} for phase in results.models} for method in next(iter(results.models.values()))}
    for phase, models in results.models.items():
        for metric in table(results, phase)[0]:
            cells, tested = column(metric, models), _tested(metric, models)
            for method, found in cells.items():
                if found:
                    compared[method][phase][metric.name] = as_json(found) | ({"against": tested[method]} if method in tested else {})
    return compared


def data_facts(results: Results) -> dict[str, Any]:
    """The entry ``data`` of compare.json where answers are real numbers: phase → name, simulated, target and unit; {} without such data."""
    cohorts = {phase: card for phase, card in results.cards.items() if is_real(card)}
    facts = {phase: {name: card[name] for name in ("name", "simulated", "target", "unit")} for phase, card in cohorts.items()}
    return {"data": facts} if facts else {}


def as_json(found: Cell) -> dict[str, Any]:
    """mean, low, high, interval (its kind) and seeds; without limits where there are none."""
    limits = {"low": found.interval.low, "high": found.interval.high, "interval": found.kind} if found.kind else {}
    return {"mean": found.interval.value, **limits, "seeds": found.seeds}


def _tested(metric: Metric, models: Models) -> dict[str, dict[str, Any]]:
    """method → reference → the test between them."""
    having = {method: seeds for method, seeds in models.items() if cell(metric, list(seeds.values()))}
    found: dict[str, dict[str, Any]] = {}
    for reference in references(models):
        for method, tested in standing.against(metric, having, reference).items():
            found.setdefault(method, {})[reference] = standing.as_json(tested)
    return found
