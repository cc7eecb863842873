"""The tables: one value with its interval for every method and metric.

And where the best one is beyond doubt.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.measure.sizes import Result as Sizes
from moecore.report.claims import significance
from moecore.report.column import Ahead, Metric
from moecore.report.measured import Models, Phase, Results
from moecore.report.measures import SHOWN, sizes
from moecore.report.references import references, seen
from moecore.report.tables.cells import Cell, cell_to_json, read_cell
from moecore.report.tables.paper_numbers import PAPERS
from moecore.study.document import near
from moecore.study.selection import Phase as PhaseName
from moecore.study.study import Study
from moecore.tasks.regression import Regression


class Table(NamedTuple):
    """The metrics that any method has; a cell is None where a method has no such thing."""

    metrics: list[Metric]
    cells: dict[str, dict[str, Cell | None]]


def metrics_of(phase: Phase) -> list[Metric]:
    """All metrics in order: those of every paper, then paper by paper."""
    found = [
        Metric(column, kind)
        for shown in SHOWN
        if shown.applies(phase.task)
        for kind in (shown.result,)
        for entry in shown.columns
        for column in entry.columns(seen(phase, kind))
    ]
    order = ["", *PAPERS]
    return sorted(found, key=lambda metric: order.index(metric.column.paper))


def table(results: Results, phase: Phase) -> Table:
    """Every metric of every method; controls are never marked."""
    metrics = metrics_of(phase)
    columns = {
        metric.name: column(metric, phase.models, results.controls, results.without_experts)
        for metric in metrics
    }
    cells = {
        method: {name: found[method] for name, found in columns.items()} for method in phase.models
    }
    return Table([metric for metric in metrics if any(columns[metric.name].values())], cells)


def column(
    metric: Metric,
    models: Models,
    controls: Collection[str] = (),
    unmarked: Collection[str] = (),
) -> dict[str, Cell | None]:
    """The cell of every method, the best one marked where a test or the intervals show it.

    controls: neither are the best nor have to be beaten; unmarked: have to be beaten, and are not
    marked where they are ahead.
    """
    cells = {method: read_cell(metric, list(seeds.values())) for method, seeds in models.items()}
    first = best(metric, models, cells, controls)
    return {
        method: found._replace(
            leads=method == first, marked=method == first and method not in unmarked
        )
        if found
        else None
        for method, found in cells.items()
    }


def best(
    metric: Metric,
    models: Models,
    cells: Mapping[str, Cell | None],
    controls: Collection[str] = (),
) -> str | None:
    """The method that is better than every other, and not by chance; None where none is."""
    having = {method: found for method, found in cells.items() if found and method not in controls}
    if not metric.column.better or len(having) < 2:
        return None
    seeds = {method: models[method] for method in having}
    if significance.possible_test(metric, list(seeds.values())) == "intervals":
        return apart(metric, having)
    values = {method: found.interval.value for method, found in having.items()}
    return significance.leader(metric, seeds, values)


def apart(metric: Metric, cells: Mapping[str, Cell]) -> str | None:
    """The method whose interval lies beyond every other's, or None.

    A difference inside the intervals is no difference.
    """
    limits = {
        method: found.interval.limits for method, found in cells.items() if found.interval.limits
    }
    if not metric.column.better or len(cells) < 2 or len(limits) < len(cells):
        return None
    sign = 1 if metric.column.better == "higher" else -1
    edges = {method: sorted((sign * low, sign * high)) for method, (low, high) in limits.items()}
    first = max(edges, key=lambda method: edges[method][0])
    beaten = all(edges[first][0] > high for name, (_, high) in edges.items() if name != first)
    return first if beaten else None


def used_tests(results: Results, phase: Phase, metrics: Sequence[Metric]) -> set[str]:
    """The tests behind the marks of these metrics: keys of ``significance.WORDS``."""
    models = [seeds for name, seeds in phase.models.items() if name not in results.controls]
    found = set()
    for metric in metrics:
        having = [seeds for seeds in models if read_cell(metric, list(seeds.values()))]
        if len(having) > 1:
            found.add(significance.possible_test(metric, having))
    return found - {""}


def flat(results: Results) -> dict[str, Any]:
    """The content of compare.json: method → phase → metric → mean, low, high, interval, seeds.

    And ``against``: the tests against the baseline MoE and the dense model, by name; only where
    there is a paired test.
    """
    compared: dict[str, Any] = {
        method: {name: {} for name in results.phases} for method in results.methods
    }
    if found := results.alone.get(Sizes):
        compared["sizes"] = sizes.flat(found)
    for name, phase in results.phases.items():
        for metric in metrics_of(phase):
            tested = _tested(metric, phase.models)
            for method, found in column(metric, phase.models).items():
                if found:
                    compared[method][name][metric.name] = cell_to_json(found, metric.column.form)
                if method in tested:
                    compared[method][name][metric.name]["against"] = tested[method]
    return compared


def data_facts(results: Results) -> dict[str, Any]:
    """The entry ``data`` of compare.json: phase → name, simulated, target and unit.

    Only of data whose labels have a unit; {} without such data.
    """
    facts = {
        name: {
            "name": phase.card["name"],
            "simulated": phase.card["simulated"],
            "target": phase.task.target,
            "unit": phase.task.unit,
        }
        for name, phase in results.phases.items()
        if isinstance(phase.task, Regression)
    }
    return {"data": facts} if facts else {}


def unknown_metrics(study: Study, stages: Collection[str]) -> Iterator[tuple[tuple, str]]:
    """Metrics that claims and questions name and no measurement has: keys, and what is wrong.

    stages: of the study's dvc.yaml. Nothing is said of a phase that the study does not run.
    """
    for section, asked in (("claims", study.claims), ("questions", study.questions)):
        for index, one in enumerate(asked):
            known = foreseen(study, stages, one.phase) if one.phase in study.data else []
            for key, name in (("metric", one.metric), ("against_metric", one.against_metric)):
                if known and name and name not in known:
                    listed = ", ".join(known[:LISTED])
                    if len(known) > LISTED:
                        listed += f" and {len(known) - LISTED} more"
                    text = f"found {name!r}{near(name, known)}; allowed in {one.phase}: {listed}"
                    yield (section, index, key), text


LISTED = 40  # metrics that a message names
SCORES = {"regression": "mae", "next_token": "nats"}  # by the kind of task; others have accuracy


def foreseen(study: Study, stages: Collection[str], phase: PhaseName) -> list[str]:
    """The metrics that a phase will have, before anything has run."""
    task: Any = study.data[phase].task  # a class; it answers what it needs
    ahead = Ahead(study, SCORES.get(task.model_fields["kind"].default, "accuracy"))
    measured = set(stages) | set(study.run.measurements if "measure" in stages else ())
    names = [
        name
        for shown in SHOWN
        if shown.applies(task)
        if not shown.stage or shown.stage in measured and study.run.covers(shown.stage, phase)
        for entry in shown.columns
        for name in entry.foreseen(ahead)
    ]
    return list(dict.fromkeys(names))


def _tested(metric: Metric, models: Models) -> dict[str, dict[str, Any]]:
    """method → reference → the test between them."""
    having = {
        method: seeds for method, seeds in models.items() if read_cell(metric, list(seeds.values()))
    }
    found: dict[str, dict[str, Any]] = {}
    for reference in references(models):
        for method, tested in significance.against(metric, having, reference).items():
            found.setdefault(method, {})[reference] = significance.as_json(tested)
    return found
