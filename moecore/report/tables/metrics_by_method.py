"""The comparison table: each metric of each method with its interval, the best one marked."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import UserError, read_json
from moecore.data.card import Card
from moecore.measure.base import find_measurement
from moecore.report.claims import significance
from moecore.report.column import (
    Column,
    PhaseBeforeRun,
    PlannedMetric,
    build_column_context,
    reference_methods,
)
from moecore.report.pictures.experts import routing_gain_share
from moecore.report.result_types import (
    Models,
    PhaseResults,
    StudyResults,
    add_measurements_to_stages,
)
from moecore.report.results_and_displays import list_calculations, list_displays
from moecore.report.tables.cells import TITLES, Cell, cell_to_json, method_cells_over_seeds
from moecore.study.model_rules import build_phase_model, planned_image_spec
from moecore.study.run_and_claims import Comparison
from moecore.study.run_and_claims import PhaseName as PhaseName
from moecore.study.stages import STAGES, describe_how_to_add
from moecore.study.study import Study
from moecore.study.yaml_document import did_you_mean
from moecore.tasks.regression import Regression

MAX_LISTED_METRICS = 40  # metrics that a message names
SCORES = {"regression": "mae", "next_token": "nats"}  # by the kind of task; others have accuracy
PlannedMetrics = dict[str, PlannedMetric]  # by name
# entries of compare.json that are no methods
NO_METHODS = ("asked", "baselines", "calculations", "claims", "data", "first_sentence", "questions")


class ComparisonTable(NamedTuple):
    metrics: list[Column]  # those that any method has
    cells: dict[str, dict[str, Cell | None]]  # method → metric → cell


def phase_result_columns(phase: PhaseResults) -> list[Column]:
    metrics = [
        column
        for shown in list_displays()
        if shown.applies(phase.task)
        for column in shown.columns.columns(build_column_context(phase, shown.kind))
    ]
    order = ["", *TITLES]
    return sorted(metrics, key=lambda metric: order.index(metric.paper))


def build_table(results: StudyResults, phase: PhaseResults) -> ComparisonTable:
    """Return a phase's table of methods and metrics, in which the best methods are marked."""
    unmarked = results.without_experts
    columns = {
        metric: cells_with_best_marked(metric, phase.models, results.controls, unmarked)
        for metric in phase_result_columns(phase)
    }
    cells = {
        method: {metric.name: of_metric[method] for metric, of_metric in columns.items()}
        for method in phase.models
    }
    metrics = [metric for metric, of_metric in columns.items() if any(of_metric.values())]
    return ComparisonTable(metrics, cells)


def cells_with_best_marked(
    metric: Column, models: Models, controls: Collection[str] = (), unmarked: Collection[str] = ()
) -> dict[str, Cell | None]:
    """Return method → cell of one metric; the significantly best method is marked."""
    # controls: neither best nor compared; unmarked: compared, but not marked if best.
    cells = method_cells_over_seeds(metric, models)
    having = {method: cell for method, cell in cells.items() if cell and method not in controls}
    if not metric.better or len(having) < 2:
        return cells
    seeds = {method: models[method] for method in having}
    if significance.choose_test(metric, list(seeds.values())) == "intervals":
        first = best_by_disjoint_intervals(metric, having)
    else:
        values = {method: cell.interval.value for method, cell in having.items()}
        first = significance.find_significant_leader(metric, seeds, values)
    if first is not None:
        cells[first] = having[first]._replace(leads=True, marked=first not in unmarked)
    return cells


def best_by_disjoint_intervals(metric: Column, cells: Mapping[str, Cell]) -> str | None:
    sign = {"higher": 1, "lower": -1}.get(metric.better)
    limits = {method: cell.interval.limits for method, cell in cells.items()}
    if sign is None or len(cells) < 2 or None in limits.values():
        return None
    edges = {name: sorted(sign * limit for limit in ends) for name, ends in limits.items() if ends}
    first = max(edges, key=lambda method: edges[method][0])
    beaten = all(edges[first][0] > high for name, (_, high) in edges.items() if name != first)
    return first if beaten else None


def used_tests(results: StudyResults, phase: PhaseResults, compared: ComparisonTable) -> set[str]:
    """Return the tests that decided a table's marks: keys of ``significance.TEST_DESCRIPTIONS``."""
    tests = set()
    rows = {name: row for name, row in compared.cells.items() if name not in results.controls}
    for metric in compared.metrics:
        having = [phase.models[name] for name, row in rows.items() if row[metric.name]]
        if len(having) > 1:
            tests.add(significance.choose_test(metric, having))
    return tests - {""}


def compare_methods(results: StudyResults) -> dict[str, Any]:
    """Return compare.json without claims: method → phase → metric → mean, interval, tests."""
    # Also ``against``: the paired tests against the baseline MoE and the dense model, by name;
    # ``baselines``: phase → classifier on pixels → its test score; ``headroom_recovered`` for
    # methods between dense and told; ``data``: phase → its data, if labels have a unit;
    # ``calculations``: name → metric → value.
    compared: dict[str, Any] = {
        method: {name: {} for name in results.phases} for method in results.methods
    }
    for display, phase in list_calculations(results):
        table = build_table(results, phase)
        ((_, cells),) = table.cells.items()
        compared.setdefault("calculations", {})[display.stage] = {
            column.name: cell_to_json(cell, column.form)
            for column in table.metrics
            if (cell := cells[column.name])
        }
    facts = {
        name: {"name": phase.card["name"], "simulated": phase.card["simulated"]}
        | {"target": phase.task.target, "unit": phase.task.unit}
        for name, phase in results.phases.items()
        if isinstance(phase.task, Regression)
    }
    if facts:
        compared["data"] = facts
    baselines = {
        name: {
            classifier: cell_to_json(Cell(value.interval, "wilson", 1), phase.task.score.form)
            for classifier, value in phase.baselines.items()
        }
        for name, phase in results.phases.items()
        if phase.baselines
    }
    if baselines:
        compared["baselines"] = baselines
    for name, phase in results.phases.items():
        for metric in phase_result_columns(phase):
            all_cells = method_cells_over_seeds(metric, phase.models)
            cells = {method: cell for method, cell in all_cells.items() if cell}
            for method, cell in cells.items():
                compared[method][name][metric.name] = cell_to_json(cell, metric.form)
            having = {method: phase.models[method] for method in cells}
            for reference in reference_methods(phase.models):
                tests = significance.compare_with_reference(metric, having, reference)
                for method, tested in tests.items():
                    against = compared[method][name][metric.name].setdefault("against", {})
                    against[reference] = tested.to_json()
        for method in phase.models:
            if share := routing_gain_share(phase, method):
                cell = Cell(share.interval(), share.kind, share.seeds)
                compared[method][name]["headroom_recovered"] = cell_to_json(cell, "share")
    return compared


def read_compare_json(path: Path) -> dict[str, dict[str, Any]]:
    return check_compare_json_form(path, read_json(path))


def check_compare_json_form(path: Path, compared: Any) -> dict[str, dict[str, Any]]:
    """Return ``compared``, the parsed JSON of ``path``; UserError unless it maps to mappings."""
    entries = compared.values() if isinstance(compared, dict) else [compared]
    if not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: found no tables of a study; run `dvc repro compare` again")
    return compared


def unanswerable_claims(
    study: Study, stages: Collection[str], previews: Mapping[str, Card]
) -> Iterator[tuple[tuple, str]]:
    """Yield (key in params.yaml, problem) for claims whose metric the runs will not give."""
    # previews: phase → its data, as far as known. A metric cannot answer a claim or question if one
    # of its methods will not have it. Phases that the study does not run are ignored.
    displays = list_displays()
    shown = {display.stage for display in displays}
    for index, name in enumerate(study.run.measurements):
        if name not in shown:
            text = f"found {name}, which declares no metrics; allowed: one that does"
            since = "typed results and SHOWN are not read since 0.4.0"
            place = ("run", "measurements", index)
            yield place, f"{text}; {since} (docs/tutorials/own_measurement.md)"
    planned: dict[str, PlannedMetrics] = {
        phase: expected_metrics(study, stages, phase) for phase in study.data
    }
    absent = {
        metric: describe_how_to_add(display.stage)
        for display in displays
        if display.stage in STAGES and display.stage not in stages
        for metric in display.kind.metrics
    }
    for display in displays:
        if display.stage in study.run.calculations:
            planned[display.stage] = display.columns.planned(PhaseBeforeRun(study, "accuracy", ""))

    @cache  # many claims name the same methods
    def metrics_of(phase: PhaseName, method: str) -> PlannedMetrics:
        alone = study.run.model_copy(update={"methods": (method,)})
        return expected_metrics(study.model_copy(update={"run": alone}), stages, phase)

    for section, comparisons in (("claims", study.claims), ("questions", study.questions)):
        for index, comparison in enumerate(comparisons):
            if metrics := planned.get(comparison.subject):
                problems = chain(
                    _metric_problems(comparison, metrics, len(study.run.seeds), absent),
                    _methods_without_metric(study, metrics_of, comparison, metrics, previews),
                )
                yield from (((section, index, key), text) for key, text in problems)


def _methods_without_metric(
    study: Study,
    metrics_of: Callable[[PhaseName, str], PlannedMetrics],
    comparison: Comparison,
    metrics: PlannedMetrics,
    previews: Mapping[str, Card],
) -> Iterator[tuple[str, str]]:
    """Yield ("method" or "against", problem) for each side that will not have its metric."""
    ours = ("method", comparison.method, comparison.metric)
    theirs = ("against", comparison.against, comparison.against_metric or comparison.metric)
    for key, method, name in (ours, theirs):
        planned = metrics.get(name)
        if planned is None or comparison.subject != comparison.phase:
            continue
        text = f"found {method}, which will have no {name}"
        preview = previews.get(comparison.phase)
        if preview is not None and planned.stage in (*study.run.measurements, "routing"):
            model = build_phase_model(study, method, comparison.phase, planned_image_spec(preview))
            refusal = planned.refusal or find_measurement(planned.stage).model_refusal
            if model is not None and (reason := refusal(model)):
                yield key, f"{text}: {reason}; allowed: methods that {planned.stage} measures"
                continue
        methods = study.run.methods
        having = [other for other in methods if name in metrics_of(comparison.phase, other)]
        if method in methods and method not in having:
            yield key, f"{text}; allowed: {', '.join(having)}"


def _metric_problems(
    comparison: Comparison, metrics: PlannedMetrics, seeds: int, absent: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (key of the comparison, problem) if the metric is missing or cannot answer it."""
    # absent: metric → how to add the stage that measures it.
    for key, name in (("metric", comparison.metric), ("against_metric", comparison.against_metric)):
        if name and name not in metrics:
            names = tuple(metrics)
            listed = ", ".join(names[:MAX_LISTED_METRICS])
            if len(names) > MAX_LISTED_METRICS:
                listed += f" and {len(names) - MAX_LISTED_METRICS} more"
            hint = did_you_mean(name, names)
            if name in absent:
                hint = f", a metric of {absent[name]}"
            yield key, f"found {name!r}{hint}; allowed in {comparison.subject}: {listed}"
        if name in metrics and metrics[name].of_pairs and seeds < 2:
            between = f"found {name}, which compares seeds, and run.seeds has {seeds}"
            yield key, f"{between}; allowed: two seeds or more, three for an interval"
    metric = metrics.get(comparison.metric)
    if metric and metric.is_fixed:
        fixed = "the settings decide it, not the runs, so this cannot fail"
        yield "metric", f"found {comparison.metric}: {fixed}; allowed: what is measured"
    other = metrics.get(comparison.against_metric)
    is_of_itself = comparison.method == comparison.against and comparison.margin is None
    if metric and other and is_of_itself and metric.curve and metric.curve == other.curve:
        sure = f"found another point of {metric.curve}, which rises or falls by construction"
        yield "against_metric", f"{sure}, so this cannot fail; allowed: equivalent, or no_worse"
    if metric and comparison.better == "no_worse" and not metric.better:
        directed = ", ".join(name for name, planned in metrics.items() if planned.better)
        neither = f"found no_worse, but neither more nor less {comparison.metric} is worse"
        yield "better", f"{neither}; allowed: higher, lower, equivalent, or one of {directed}"


def expected_metrics(study: Study, stages: Collection[str], phase: PhaseName) -> PlannedMetrics:
    """Return name → properties of all metrics that a phase will have after its run."""
    task: Any = study.data[phase].task  # a class; it answers what it needs
    ahead = PhaseBeforeRun(study, SCORES.get(task.model_fields["kind"].default, "accuracy"), phase)
    measured = add_measurements_to_stages(stages, study.run)
    metrics: PlannedMetrics = {}
    for shown in list_displays():
        covered = shown.stage in measured and study.run.covers(shown.stage, phase)
        if not shown.applies(task) or (shown.stage and not covered):
            continue
        if not shown.within or getattr(getattr(study, shown.stage), shown.within) is not None:
            refusal = shown.kind.model_refusal if shown.within else None
            metrics |= {
                name: planned._replace(stage=shown.stage, refusal=refusal)
                for name, planned in shown.columns.planned(ahead).items()
            }
    return metrics
