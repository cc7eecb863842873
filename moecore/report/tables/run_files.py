"""The headline numbers of a run: its file for ``dvc metrics show`` and experiments, and those that
MLflow shows of a method and seed.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.measure.base import Skipped, read_result
from moecore.measure.sizes import Result as Sizes
from moecore.report.column import Metric
from moecore.report.headlines import HEADLINES
from moecore.report.measured import Measured, Phase, Results
from moecore.report.measures import SHOWN, sizes
from moecore.report.quantities import attacked_names, first_columns
from moecore.report.results import MEASURED, read_card
from moecore.report.tables.comparison import metrics_of
from moecore.study.reading.run_section import Phase as PhaseName
from moecore.tasks.base import Task

MOST = 12  # numbers of a run
DIGITS = 5  # significant ones
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
Items = Mapping[str, Collection[str]]  # method → the items whose results are of its model


def run_files(results: Results) -> dict[str, str]:
    """Path below reports/ → content: ``metrics/pretrain/vmoe-0.json``, a flat JSON of numbers."""
    numbers = {}
    if counted := results.alone.get(Sizes):
        numbers["sizes"] = {
            f"{model}, {name}": round_significant(float(compared["ours"]))
            for model, metrics in sizes.flat(counted).items()
            for name, compared in metrics.items()
        }
    for phase in results.phases.values():
        metrics = run_metrics(phase)
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                read = {metric.name: metric.read(model) for metric in metrics}
                numbers[f"{phase.name}/{method}-{seed}"] = {
                    name: round_significant(interval.value)
                    for name, interval in read.items()
                    if interval is not None
                }
    return {
        f"metrics/{name}.json": json.dumps(values, indent=1) + "\n"
        for name, values in numbers.items()
    }


def run_metrics(phase: Phase) -> list[Metric]:
    """At most ``MOST`` that any model has: the score first, then under attack, routing, cost."""
    metrics = {metric.name: metric for metric in metrics_of(phase)}
    names = [headline.name for headline in HEADLINES if headline.run]
    names = list(dict.fromkeys([*names[:4], *attacked_names(phase), *names]))
    return [metrics[name] for name in names if name in metrics][:MOST]


def round_significant(value: float) -> float:
    """The value with ``DIGITS`` significant digits; counts stay whole."""
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")


def headline_numbers(
    study: Path, method: str, seed: int, items: Items
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the numbers of the first table of every phase that was measured,
    ``finetune/accuracy``, and the counts.

    items: of the method, and of the dense one that some numbers are relative to; what is not among
    them is of an earlier model. What other code wrote is left out.
    """
    numbers: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name in PHASES:
        phase = _read_phase(study, name, seed, items)
        if phase is None or not phase.models[method][seed].results:
            continue
        metrics = {metric.name: metric for metric in metrics_of(phase)}
        for metric in map(metrics.__getitem__, first_columns(phase, metrics)):
            interval = metric.read(phase.models[method][seed])
            if interval is not None and metric.column.form == "count":
                counts[f"{name}.{metric.name}"] = int(interval.value)
            elif interval is not None:
                numbers[f"{name}/{metric.name.removeprefix('test_')}"] = float(interval.value)
    return numbers, counts


def _read_phase(study: Path, name: str, seed: int, items: Items) -> Phase | None:
    """Return what is known of these models after a phase; None before its data are prepared."""
    try:
        card, task = read_card(study, name)
    except UserError:
        return None  # not there, or of other code: the run of `prepare` says so
    models = {
        method: {seed: Measured(_read_current(study, name, f"{method}/{seed}", task, current))}
        for method, current in items.items()
    }
    return Phase(name, card, task, models)


def _read_current(
    study: Path, phase: str, model: str, task: Task, current: Collection[str]
) -> dict[type[Config], Config]:
    results: dict[type[Config], Config] = {}
    for shown in SHOWN:
        path = Path(shown.stage, phase, model)
        if not shown.applies(task) or path.as_posix() not in current:
            continue
        try:
            result = read_result(
                study / MEASURED / f"{path}.json", shown.result, shown.stage or phase
            )
        except UserError:  # of other code, or gone: its own run says so
            continue
        if not isinstance(result, Skipped):
            results[shown.result] = result
    return results
