"""The headline numbers of one method and seed: those of the first tables, for MLflow."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError, read_json
from moecore.data.preview import read_task
from moecore.measure.base import Skipped, read_result
from moecore.report.column import Metric
from moecore.report.measured import Measured, Phase
from moecore.report.measures import SHOWN
from moecore.report.quantities import headline
from moecore.report.tables.comparison import metrics_of
from moecore.study.reading.run_section import Phase as PhaseName
from moecore.tasks.base import Task

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
Items = Mapping[str, Collection[str]]  # method → the items whose results are of its model


def headline_numbers(
    study: Path, method: str, seed: int, items: Items
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the numbers of every phase that was measured, ``finetune/accuracy``, and the counts.

    items: of the method, and of the dense one that some numbers are relative to; what is not among
    them is of an earlier model. What other code wrote is left out.
    """
    numbers: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name in PHASES:
        phase = _read_phase(study, name, seed, items)
        if phase is None or not phase.models[method][seed].results:
            continue
        for metric in headline_metrics(phase):
            value = metric.read(phase.models[method][seed])
            if value is not None and metric.column.form == "count":
                counts[f"{name}.{metric.name}"] = int(value.value)
            elif value is not None:
                numbers[f"{name}/{metric.name.removeprefix('test_')}"] = float(value.value)
    return numbers, counts


def headline_metrics(phase: Phase) -> list[Metric]:
    """Return the metrics of the report's first table of a phase."""
    metrics = metrics_of(phase)
    names = {column.name for column in headline(phase, [metric.column for metric in metrics])}
    return [metric for metric in metrics if metric.name in names]


def _read_phase(study: Path, name: str, seed: int, items: Items) -> Phase | None:
    """Return what is known of these models after a phase; None before its data are prepared."""
    try:
        card = read_json(study / "artifacts/data" / name / "card.json")
        task = read_task(card["task"])
    except (UserError, ValidationError, KeyError):
        return None  # not there, or of other code: the run of `prepare` says so
    models = {
        method: {seed: Measured(_read_results(study, name, f"{method}/{seed}", task, current))}
        for method, current in items.items()
    }
    return Phase(name, card, task, models)


def _read_results(
    study: Path, phase: str, model: str, task: Task, current: Collection[str]
) -> dict[type[Config], Config]:
    results: dict[type[Config], Config] = {}
    for shown in SHOWN:
        path = Path(shown.stage, phase, model)
        if not shown.applies(task) or path.as_posix() not in current:
            continue
        file = study / "artifacts/measured" / f"{path}.json"
        try:
            result = read_result(file, shown.result, shown.stage or phase)
        except UserError:  # of other code, or gone: its own run says so
            continue
        if not isinstance(result, Skipped):
            results[shown.result] = result
    return results
